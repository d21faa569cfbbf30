"""Callers that show no certificate take neither descriptors nor disks."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import WORKER_PORT, Service
from wheelmount.hosts import doorway, runtime, sockets
from wheelmount.hosts.address import OPEN, SECURE
from wheelmount.hosts.credentials import Authority, encode
from wheelmount.variables import CREDENTIALS

HERE = "127.0.0.1"

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

CALLERS = 1200

CALL = """
import socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
calls = []
for _ in range(count):
    try:
        calls.append(socket.create_connection((host, port), 10))
        calls[-1].sendall(bytes.fromhex(sys.argv[4]))
    except OSError:
        pass
print(len(calls), flush=True)
sys.stdin.read()
"""

LIMIT = 1024

BEGUN = bytes.fromhex("1603010400") + bytes(1019)
"""A record of a handshake that is never complete, of more bytes than a certificate takes."""


@pytest.fixture(scope="module")
def lab(shared_source: Path) -> Iterator[Lab]:
    with Lab(1, shared=[shared_source.parent]) as made, pytest.MonkeyPatch.context() as environment:
        environment.setenv("WHEELMOUNT_STATE_DIR", str(shared_source.parent / "state"))
        yield made


@pytest.mark.costly
@pytest.mark.parametrize("said", [b"", BEGUN], ids=["silent", "begun"])
def test_idle_callers_keep_nobody_out(said: bytes, lab: Lab, source: Path) -> None:
    port = WORKER_PORT + len(said) % 7
    address = f"{SECURE}://{lab.address('host0')}:{port}"
    command = ["prlimit", f"--nofile={LIMIT}:{LIMIT}", sys.executable, "-m"]
    worker = Service(lab, "host0", [*command, "wheelmount.hosts.worker", address], port)
    worker.await_port()
    call = [sys.executable, "-c", CALL, lab.address("host0"), str(port), str(CALLERS), said.hex()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with lab.popen(LOGIN, call, **pipes) as callers:
        assert callers.stdout is not None
        assert int(callers.stdout.readline()) > LIMIT
        run = [sys.executable, "-m", "wheelmount.cli.main", "run", "--hosts", address]
        run += ["--mntpoint", "/mnt/tree", str(source), "-"]
        done = lab.run(LOGIN, run, stdin=None, input="echo ran")
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ran"]), done.stderr
        callers.communicate(b"")
    assert len(worker.output()) < 64 << 10


def _accepted(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    caller = socket.create_connection(server.getsockname()[:2])
    caller.settimeout(0)
    return caller, server.accept()[0]


def _is_open(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) != b""
    except BlockingIOError:
        return True


def test_who_says_too_little_is_hung_up_on_in_time() -> None:
    door = doorway.Doorway(answer=900)
    with socket.create_server((HERE, 0)) as server, contextlib.ExitStack() as stack:
        callers = []
        for number in range(doorway.MOST + 3):
            caller, accepted = map(stack.enter_context, _accepted(server))
            callers.append(caller)
            if number in (1, 2):
                caller.sendall(BEGUN)
                accepted.recv(len(BEGUN), socket.MSG_WAITALL)
            if number == 1:  # was answered as one whose certificate was taken
                accepted.sendall(bytes(900))
                caller.setblocking(True)
                caller.recv(900, socket.MSG_WAITALL)
                caller.setblocking(False)
            door.take(accepted)
        first, taken, begun, second, *_, last = callers
        assert not _is_open(first)  # the oldest of too many
        assert not _is_open(begun)
        assert all(map(_is_open, (taken, second, last)))
        time.sleep(0.05)
        door.sweep(0.01)
        assert not _is_open(last)
        assert _is_open(taken)
    door.close()


def test_who_has_begun_goes_where_descriptors_are_wanted() -> None:
    door = doorway.Doorway(answer=900)
    with socket.create_server((HERE, 0)) as server, contextlib.ExitStack() as stack:
        caller, accepted = map(stack.enter_context, _accepted(server))
        caller.sendall(BEGUN)
        accepted.recv(len(BEGUN), socket.MSG_WAITALL)
        door.take(accepted)
        time.sleep(0.05)
        door.sweep(0.01)
        assert _is_open(caller)
        door.sweep(0.01, urgent=True)
        assert not _is_open(caller)
    door.close()


WATCHED = """
import os, socket, sys, threading
from wheelmount.hosts import socketguard
server = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(server.getsockname())
accepted = socketguard._accept_own(server.fileno(), None, None, 0)
print(any(each.name == "doorway" for each in threading.enumerate()))
"""


@pytest.mark.parametrize("scheme", [OPEN, SECURE])
def test_only_callers_who_owe_a_certificate_are_watched(scheme: str) -> None:
    identity = Authority.make().issue([HERE])
    environment = {**os.environ, **identity, runtime.ADDRESS: f"{scheme}://{HERE}:0"}
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{scheme == SECURE}\n"


def _shake_hands(port: int, context: ssl.SSLContext) -> tuple[int, bytes]:
    """Bytes that a server sends while and after hands are shaken, and its certificate."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context.check_hostname = False
    hand = context.wrap_bio(incoming, outgoing)
    count = 0
    with socket.create_connection((HERE, port), 30) as caller:
        while True:
            try:
                hand.do_handshake()
                break
            except ssl.SSLWantReadError:
                caller.sendall(outgoing.read())
                piece = caller.recv(1 << 16)
                assert piece
                count += len(piece)
                incoming.write(piece)
        certificate = hand.getpeercert(binary_form=True)
        assert certificate is not None
        if context.verify_mode is ssl.CERT_REQUIRED:
            caller.sendall(outgoing.read())
            caller.settimeout(3)
            with contextlib.suppress(TimeoutError):
                while piece := caller.recv(1 << 16):
                    count += len(piece)
    return count, certificate


def test_monarch_sends_more_to_who_has_shown_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the numbers in ``doorway`` stand for, with the library as it is installed."""
    identity = Authority.make().issue([HERE])
    monkeypatch.setattr(runtime, "identity", lambda: identity)
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    given = {CREDENTIALS: encode(identity).decode(), "WHEELMOUNT_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "wheelmount.hosts.worker", f"{SECURE}://{HERE}:{port}"]
    with subprocess.Popen(command, env={**os.environ, **given}) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.socket() as probe:
                    probe.connect((HERE, port))
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
            known = sockets.trust(ssl.PROTOCOL_TLS_CLIENT)
            count, shown = _shake_hands(port, known)
            wanted = doorway.answer(ssl.DER_cert_to_PEM_cert(shown))
            assert count >= wanted + 20
            stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            stranger.check_hostname = False
            stranger.verify_mode = ssl.CERT_NONE
            # And 93 for one that first offers another kind of key, as OpenSSL can.
            assert _shake_hands(port, stranger)[0] + 93 <= wanted - 20
        finally:
            process.kill()
