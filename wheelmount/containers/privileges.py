"""Limit the privileges of containers that root starts.

Root in such a container is root of the host. The kernel limits it only by its capabilities, by a
filter of system calls, and by the kernel's own files that it can write to. Untrusted packages are
built and run there, so it gets the privileges that pip, uv, apt and compilers need, and none that
reaches outside. Containers of ordinary users are in a user namespace, where they have no privileges
over the machine that could be taken away.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from wheelmount import linux

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
"""Capabilities that root keeps, with their numbers: docker's, without those for device nodes and
raw sockets."""

_REFUSED = (
    *("mount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig", "fspick"),
    *("mount_setattr", "pivot_root", "unshare", "setns", "open_by_handle_at", "quotactl", "acct"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot"),
    *("swapon", "swapoff", "syslog", "vhangup", "iopl", "ioperm", "bpf", "perf_event_open"),
    *("add_key", "request_key", "keyctl", "userfaultfd", "io_uring_setup", "adjtimex"),
    *("clock_adjtime", "clock_settime", "settimeofday", "process_vm_readv", "process_vm_writev"),
)
"""System calls to refuse: they affect more than the container, or few programs need them and the
kernel had many vulnerabilities in them."""

_CLONE_NEWUSER = 0x10000000  # linux/sched.h

_HIDDEN = "kcore", "keys", "latency_stats", "sched_debug", "timer_list", "timer_stats"
"""Files of /proc from which root could read of the machine's other programs; docker hides them."""

_PROC = Path("/proc")

_SYSTEM = "/sys/devices/system"
"""The part of /sys in which programs look up processors; the rest is not shown."""


def options(profile: Path, *, nv: bool) -> list[str]:
    """Return options of ``apptainer exec`` and ``instance start`` that limit root's privileges.

    Args:
        profile: the file that `write_profile` made.
        nv: also show the devices of /sys, where NVIDIA's libraries look for theirs.
    """
    system = ["/sys/devices", "/sys/bus", "/sys/class"] if nv else [_SYSTEM]
    shown = {path: path for path in system if Path(path).is_dir()} | _in_proc(_PROC)
    binds = (f"{source}:{path}:ro" for path, source in shown.items())
    return [
        *of_command(profile),
        *("--no-mount", "sys"),
        *(option for bind in binds for option in ("--bind", bind)),
    ]


def _in_proc(proc: Path) -> dict[str, str]:
    """Return what to show read-only of a /proc, or in place of it, by path.

    All but the directories of processes is the machine's. Root may write to it without any
    capability, as to ``sysrq-trigger``, and which files there are depends on the kernel.
    """
    shown = {}
    for path in sorted(proc.iterdir()):
        if path.name in _HIDDEN:
            shown[str(path)] = os.devnull
        elif not path.name.isdigit() and not path.is_symlink():
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode) or mode & 0o222:
                shown[str(path)] = str(path)
    return shown


def of_command(profile: Path) -> list[str]:
    """Return the options for a command in an instance that was started with `options`."""
    permitted = linux.capabilities("CapPrm")
    # apptainer fails if a capability is refused.
    had = [name for name, number in CAPABILITIES.items() if number in permitted]
    # --no-privs also sets no_new_privs.
    return ["--no-privs", "--add-caps", ",".join(had), "--security", f"seccomp:{profile}"]


def write_profile(profile: Path) -> None:
    """Write the filter of system calls, in the format of apptainer."""
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
