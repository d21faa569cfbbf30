"""Root in a container of root's reaches nothing of the host, and can do its work."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.test_running import output
from wheelmount.containers import privileges
from wheelmount.containers.container import Container
from wheelmount.containers.instance import Instance

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(200),
    pytest.mark.skipif(os.geteuid() != 0, reason="of root's containers"),
]

ATTACKS = {
    "a device node": "mknod /tmp/disk b $(stat -c '%Hd %Ld' / 2>/dev/null || echo 8 0)",
    "a disk": "mount -t ext4 /dev/sda1 /mnt",
    "a file system": "mount -t tmpfs none /mnt",
    "the old root": "umount /proc/sys",
    "the host's kernel": "echo pwned >/proc/sys/kernel/core_pattern",
    "its cache": "echo 1 >/proc/sys/vm/drop_caches",
    "its network": "echo 1 >/proc/sys/net/ipv4/ip_forward",
    "its devices": "ls /sys/kernel || echo 0 >/sys/devices/system/cpu/cpu1/online",
    "interrupts": "echo 1 >/proc/irq/default_smp_affinity",
    "its keys": "echo h >/proc/sysrq-trigger",
    "its files in /proc": "find /proc/[!0-9]* -maxdepth 0 ! -type l "
    "'(' -type d -o -type f -perm /222 ')' -writable | grep .",
    "its timers": "cat /proc/timer_list /proc/keys /proc/sched_debug 2>/dev/null | grep .",
    "its name": "hostname stranger",
    "its clock": "date -s '2001-01-01'",
    "namespaces": "unshare --mount true || unshare --user true",
    "its root": "nsenter --target 1 --mount true",
    "modules": "python3 -c 'import ctypes, sys; "
    'sys.exit(ctypes.CDLL(None, use_errno=True).syscall(175, b"x", 1, b"") == 0 '
    "or ctypes.get_errno() != 1)' && exit 1; false",
    "raw sockets": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "packets": "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
    "memory": "head -c 1 /dev/mem || head -c 1 /proc/kcore",
    "messages": "head -n 1 /dev/kmsg || head -n 1 /proc/kmsg",
    "handles": "python3 -c 'import ctypes, sys; "
    "sys.exit(ctypes.CDLL(None).syscall(304, -100, None, 0) < 0)'",
}

NAMESPACES = """
import ctypes, errno, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
CLONE, CLONE3, UNSHARE, SETNS = (
    (56, 435, 272, 308) if os.uname().machine == "x86_64" else (220, 435, 97, 268)
)
found = []
def attempt(name, *words):
    result = libc.syscall(*words)
    if result == 0 and words[0] in (CLONE, CLONE3):
        os._exit(0)
    if result >= 0:
        found.append(name)
kinds = {each.removeprefix("CLONE_"): flag for each, flag in [
    ("CLONE_NEWUSER", 0x10000000), ("CLONE_NEWNS", 0x20000), ("CLONE_NEWNET", 0x40000000),
    ("CLONE_NEWPID", 0x20000000), ("CLONE_NEWIPC", 0x8000000), ("CLONE_NEWUTS", 0x4000000),
    ("CLONE_NEWCGROUP", 0x2000000),
]}
for name, flag in kinds.items():
    for both in (flag, flag | kinds["NEWUSER"]):
        request = struct.pack("<11Q", both, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
        attempt("clone3 " + name, CLONE3, request, len(request))
        assert ctypes.get_errno() == errno.ENOSYS
        attempt("clone " + name, CLONE, both | signal.SIGCHLD, 0, 0, 0, 0)
        attempt("unshare " + name, UNSHARE, both)
for name in os.listdir("/proc/self/ns"):
    attempt("setns " + name, SETNS, os.open("/proc/self/ns/" + name, os.O_RDONLY), 0)
print(found)
"""
"""Prints by which system calls namespaces can be made or entered."""


@pytest.fixture(scope="module")
def container(sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with Container(sif, tmp_path_factory.mktemp("container") / "work") as made:
        yield made


@pytest.mark.parametrize("what", list(ATTACKS))
def test_it_cannot_reach(what: str, container: Container) -> None:
    code = container.run(["sh", "-c", ATTACKS[what]], stderr=subprocess.DEVNULL)
    assert code not in (0, 127, 255), what


def test_files_of_the_machine_are_read_only_whichever_there_are(tmp_path: Path) -> None:
    for name in ("sysrq-trigger", "mtrr", "kcore"):
        (tmp_path / name).touch()
    (tmp_path / "meminfo").touch(0o444)
    for name in ("1", "scsi"):
        (tmp_path / name).mkdir()
    (tmp_path / "self").symlink_to("1")
    written = [str(tmp_path / name) for name in ("mtrr", "scsi", "sysrq-trigger")]
    shown = {**dict(zip(written, written, strict=True)), f"{tmp_path}/kcore": "/dev/null"}
    assert privileges._in_proc(tmp_path) == shown


def test_it_gets_no_namespace_by_any_system_call(container: Container) -> None:
    said = output(container, f"python3 - <<'END'\n{NAMESPACES}END\n")
    assert said == "[]\n"


def test_it_cannot_touch_a_process_outside(container: Container) -> None:
    with subprocess.Popen(["sleep", "60"]) as outside:
        trace = (
            "import ctypes, os, sys\n"
            f"pid = {outside.pid}\n"
            "try:\n    os.kill(pid, 9)\nexcept OSError:\n    pass\n"
            "sys.exit(ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0)\n"
        )
        assert container.run(["python3", "-c", trace]) == 0
        assert outside.poll() is None
        outside.send_signal(signal.SIGTERM)


def test_it_has_what_its_work_needs(container: Container) -> None:
    said = output(
        container,
        # A package with an owner and a mode of its own, as dpkg installs it.
        "mkdir -p /tmp/deb/DEBIAN /tmp/deb/srv; echo data >/tmp/deb/srv/data\n"
        "printf 'Package: own\\nVersion: 1\\nArchitecture: all\\nMaintainer: a <a@b>\\n"
        "Description: d\\n' >/tmp/deb/DEBIAN/control\n"
        "printf '#!/bin/sh\\nchown nobody /srv/data; chmod 4750 /srv/data\\n'"
        " >/tmp/deb/DEBIAN/postinst; chmod 755 /tmp/deb/DEBIAN/postinst\n"
        "dpkg-deb --build /tmp/deb /tmp/own.deb >/dev/null; apt-get install -qq /tmp/own.deb\n"
        "stat -c '%U %a' /srv/data\n"
        "su -s /bin/sh nobody -c 'id -un'\n"
        "python3 -c 'import threading, os, multiprocessing; "
        "t = threading.Thread(target=print); t.start(); t.join(); "
        "print(multiprocessing.Pool(2).map(abs, [-1]), len(os.sched_getaffinity(0)) > 0)'\n"
        "chroot / true; nproc >/dev/null",
    )
    assert "nobody 4750" in said
    assert said.splitlines()[-3:] == ["nobody", "", "[1] True"]


def test_more_is_had_by_name(sif: Path, tmp_path: Path) -> None:
    with Container(sif, tmp_path / "work", privileged=True) as container:
        output(container, "mount -t tmpfs none /mnt")


def test_an_instance_is_no_way_round(sif: Path, tmp_path: Path) -> None:
    instance = Instance(tmp_path / "runtime", "mine", "n1")
    container = Container(sif, instance.workdir)
    try:
        instance.ensure(container)
        script = 'grep -q "^NoNewPrivs:.1" /proc/self/status && ! mount -t tmpfs none /mnt'
        assert instance.run(container, ["sh", "-c", f"{script} && ! echo >/proc/sys/x"]) == 0
        assert instance.run(container, ["sh", "-c", "! ls /sys/kernel"]) == 0
        count = f"{NAMESPACES}raise SystemExit(len(found))"
        assert instance.run(container, ["python3", "-c", count]) == 0
    finally:
        instance.stop()
