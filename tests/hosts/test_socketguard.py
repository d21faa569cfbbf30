"""Nobody else on the machine comes in by Monarch's own sockets."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import NOBODY
from wheelmount.config import Settings
from wheelmount.hosts import socketguard
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands, Result
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import remotemount

pytestmark = [pytest.mark.hosts, pytest.mark.fuse]

CONNECT = """
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as caller:
    caller.settimeout(1)
    try:
        caller.connect(chr(0) + sys.argv[2])
    except ConnectionRefusedError:
        sys.exit(print("gone"))  # some are there for a moment only
    try:
        print("hung up" if caller.recv(1) == b"" else "in")
    except TimeoutError:
        print("in")
    except OSError:
        print("hung up")
"""


LISTENS = "00010000"
"""Flags of a socket that accepts, in ``/proc/net/unix`` (proc(5))."""


def _connect(name: str, user: int) -> str:
    command = [sys.executable, "-I", "-S", "-c", CONNECT, str(user), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def abstract_sockets() -> set[str]:
    """Names of the sockets that this process and all it started listen at."""
    numbers = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, number, *path = line.split()
        if flags == LISTENS and path and path[0].startswith("@"):
            numbers[f"socket:[{number}]"] = path[0][1:]
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(numbers.get(os.readlink(fd), ""))
    return found - {""}


@pytest.mark.costly
def test_other_users_are_hung_up_on(settings: Settings, source: Path, workplace: Path) -> None:
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, str(workplace / "mnt"), settings=settings) as mount,
        Commands(list(hosts), 30) as commands,
    ):
        mount.wait(60)  # all that Monarch opens for a transfer is open
        names = abstract_sockets()
        answers = {(_connect(name, NOBODY), _connect(name, os.getuid())) for name in names}
        assert ("hung up", "in") in answers
        assert answers <= {("hung up", "in"), ("gone", "gone"), ("hung up", "gone")}
        result = commands.run({"host0": Command(("echo", "still there"))})["host0"]
        assert isinstance(result, Result)
        assert result.stdout == b"still there\n"


LISTEN = """
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(chr(0) + sys.argv[2])
    listening.listen()
    print("listens", flush=True)
    caller, _ = listening.accept()
    print(caller.recv(1), flush=True)
"""


@pytest.mark.parametrize("user", [NOBODY, 0])
def test_a_name_that_another_user_has_taken_is_not_called(user: int) -> None:
    name = f"wheelmount-test-{os.getpid()}-{user}"
    command = [sys.executable, "-I", "-S", "-c", LISTEN, str(user), name]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
        socket.socket(socket.AF_UNIX) as caller,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        address = struct.pack("=H", socket.AF_UNIX) + b"\0" + name.encode()
        memory = ctypes.create_string_buffer(address, len(address))
        place = ctypes.cast(memory, ctypes.c_void_p)
        done = socketguard._CLOSED["connect"](caller.fileno(), place, len(address))
        number = ctypes.get_errno()
        if user == NOBODY:
            assert (done, number) == (-1, errno.ECONNREFUSED)
            assert other.stdout.readline() == "b''\n"  # nothing was sent
        else:
            assert done == 0
            caller.sendall(b"x")
            assert other.stdout.readline() == "b'x'\n"


def test_what_cannot_be_closed_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other_format(_library: Path) -> dict[str, list[int]]:
        raise ValueError("it is of another format")

    monkeypatch.setattr(socketguard, "_slots", other_format)
    assert socketguard.close.__wrapped__() is False
    assert "other users of this machine can connect" in caplog.text


GIVEN_BACK = """
import atexit, ctypes, importlib, sys
from pathlib import Path
import wheelmount
assert "wheelmount.hosts.socketguard" not in sys.modules
from wheelmount.hosts import socketguard
socketguard.load()  # as a program that uses Monarch by itself would
slots = socketguard._slots(Path(importlib.import_module(socketguard.LIBRARY).__file__))
own = [slot for name in ("accept4", "connect") for slot in slots[name]]
def called():
    return [ctypes.c_void_p.from_address(slot).value for slot in own]
before = called()
assert before and socketguard.close()
assert not set(called()) & set(before)
atexit._run_exitfuncs()
assert called() == before
"""


def test_what_monarch_calls_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_socket_of_a_network_is_left_to_certificates() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as caller,
    ):
        assert socketguard.own(caller)


def test_the_name_of_a_mapped_file_may_contain_any_characters(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"a b\rc\x0bd\x1ce\x85f\xffg\xe2\x80\xa8h\ni")
    odd.write_bytes(b"x")
    with odd.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        lines = socketguard._maps()
    assert [len(line.split()) >= 5 for line in lines] == [True] * len(lines)
    assert any("a b\rc" in line for line in lines)
