"""What a container may do to the machine that it runs on, where root starts it.

Root of such a container is root of the host: the kernel checks what that one may do by its
capabilities, by the system calls that are let through, and by what of the kernel's own files it
can write to. Untrusted packages are built and run there, so it gets what pip, uv, apt and
compilers need and nothing that reaches outside. Ordinary users' containers are in a user namespace,
in which they have nothing to give away.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_SYS_CHROOT": 18,
    "CAP_AUDIT_WRITE": 29,
    "CAP_SETFCAP": 31,
}
"""What is left to root, and the number of each: what docker leaves, less device nodes and raw
sockets."""

_REFUSED = (
    *("mount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig", "fspick"),
    *("mount_setattr", "pivot_root", "unshare", "setns", "open_by_handle_at", "quotactl", "acct"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot"),
    *("swapon", "swapoff", "syslog", "vhangup", "iopl", "ioperm", "bpf", "perf_event_open"),
    *("add_key", "request_key", "keyctl", "userfaultfd", "io_uring_setup", "adjtimex"),
    *("clock_adjtime", "clock_settime", "settimeofday", "process_vm_readv", "process_vm_writev"),
)
"""System calls that work on more than the container, or that few programs need and many holes of
the kernel were in."""

_CLONE_NEWUSER = 0x10000000  # linux/sched.h

_READ_ONLY = "bus", "fs", "irq", "sys"
"""Directories of /proc whose files are the machine's, and writable to its root whatever it may."""

_SYSTEM = "/sys/devices/system"
"""What programs look up their processors in; the rest of /sys is not shown."""


def options(profile: Path, *, nv: bool) -> list[str]:
    """Options of ``apptainer exec`` and of ``instance start`` that leave root no more than that.

    Args:
        profile: the file that `write_profile` made.
        nv: show it the devices too, among which NVIDIA's libraries look for theirs.
    """
    shown = [f"/proc/{name}" for name in _READ_ONLY]
    shown += ["/sys/devices", "/sys/bus", "/sys/class"] if nv else [_SYSTEM]
    binds = [o for path in shown if Path(path).is_dir() for o in ("--bind", f"{path}:{path}:ro")]
    return [*of_command(profile), "--no-mount", "sys", *binds]


def of_command(profile: Path) -> list[str]:
    """The part of them that a command needs in an instance that was started with `options`."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    permitted = int(re.findall(r"^CapPrm:\s*(\w+)", status, re.MULTILINE)[0], 16)
    # apptainer gives up if one is refused.
    had = [name for name, number in CAPABILITIES.items() if permitted >> number & 1]
    # --no-privs also sets no_new_privs.
    return ["--no-privs", "--add-caps", ",".join(had), "--security", f"seccomp:{profile}"]


def write_profile(profile: Path) -> None:
    """Write down which system calls are refused, as apptainer reads it."""
    refused = [
        {"names": _REFUSED, "action": "SCMP_ACT_ERRNO"},
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ERRNO",
            "args": [
                {
                    "index": 0,
                    "value": _CLONE_NEWUSER,
                    "valueTwo": _CLONE_NEWUSER,
                    "op": "SCMP_CMP_MASKED_EQ",
                }
            ],
        },
    ]
    machines = {
        "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
    }
    known = machines.get(os.uname().machine, [])
    text = {"defaultAction": "SCMP_ACT_ALLOW", "architectures": known, "syscalls": refused}
    profile.write_text(json.dumps(text), encoding="ascii")
