"""What is kept of sessions, and by whom."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.sharedctypes
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from wheelmount import shared
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import worker
from wheelmount.hosts.network import NetworkHosts
from wheelmount.hosts.session import Record, Session
from wheelmount.hosts.spec import parse


def _make(session: Session) -> None:
    spec = parse("tls://a:1,b:2")
    hosts = NetworkHosts(spec.addresses, session.settings)
    session.write(Record.leaving(spec, hosts))


def test_it_is_there_until_it_is_forgotten(settings: Settings) -> None:
    session = Session("one", settings)
    assert not session.exists
    with session.lock():
        _make(session)
        session.keep({"numbers": [1, 2]})
    assert [each.name for each in Session.all(settings)] == ["one"]
    record = Session("one", settings).read()
    assert record.spec == "tls://a:1,tls://b:2"
    assert record.hosts == {"addresses": ["tls://a:1", "tls://b:2"], "names": ["a", "b"]}
    assert Session("one", settings).handles() == {"numbers": [1, 2]}
    assert session.directory.stat().st_mode & 0o777 == 0o700
    with session.lock():
        session.forget()
    assert not session.directory.exists()
    with pytest.raises(HostError, match="there is no session one"):
        session.read()


def test_one_that_is_ended_while_others_are_read_is_left_out(settings: Settings) -> None:
    one, two = Session("one", settings), Session("two", settings)
    for session in one, two:
        with session.lock():
            _make(session)
    file = one.directory / "session.json"
    text = file.read_text()
    file.unlink()
    os.mkfifo(file)  # its reader waits until the other one has ended
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(Session.records, settings)
        with file.open("w") as pipe:
            with two.lock():
                two.forget()
            pipe.write(text)
        assert [(session.name, record.kind) for session, record in found.result()] == [
            ("one", "tls")
        ]
    with one.lock():
        one.forget()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 64])
def test_names_cannot_lead_elsewhere(settings: Settings, name: str) -> None:
    with pytest.raises(InputError):
        Session(name, settings)


def test_one_of_another_version_is_not_read(settings: Settings) -> None:
    session = Session("old", settings)
    with session.lock():
        _make(session)
        record = session.read()
        file = session.directory / "session.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 0}))
    with pytest.raises(HostError, match="another version"):
        session.check(record)
    with session.lock():
        session.forget()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"version": 1', b"\xff", b"[]", b"{}", b'{"version": 1}', b"[" * 100_000),
        b'{"version": 1, "spec": "local:1", "kind": "local", "names": "host0", "hosts": {}}',
    ],
)
def test_a_damaged_record_is_named(settings: Settings, content: bytes) -> None:
    session = Session("damaged", settings)
    with session.lock():
        _make(session)
        record = session.read()
        (session.directory / "session.json").write_bytes(content)
    with pytest.raises(HostError, match="session damaged is damaged") as caught:
        session.check(record)
    assert str(session.directory) in str(caught.value.hint)
    with session.lock():
        session.forget()


@pytest.mark.parametrize("content", [b"", b"\xff", b"N.", b"cwheelmount.none\nNone\n."])
def test_handles_that_cannot_be_read_are_an_error(settings: Settings, content: bytes) -> None:
    session = Session("one", settings)
    with session.lock():
        _make(session)
        (session.directory / "handles").write_bytes(content)
    with pytest.raises(HostError, match="the handles of session one cannot be read") as caught:
        session.handles()
    assert "wheelmount down one" in str(caught.value.hint)
    with session.lock():
        session.forget()


def _hold(session: Session, held: multiprocessing.synchronize.Event) -> None:
    with session.lock():
        held.set()
        multiprocessing.Event().wait(30)


def test_only_one_process_changes_it(settings: Settings) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=_hold, args=(Session("one", settings), held))
    other.start()
    try:
        held.wait(10)
        impatient = Session("one", replace(settings, start_timeout=0.2))
        with (
            pytest.raises(WaitError, match="another wheelmount changes session one"),
            impatient.lock(),
        ):
            pass
    finally:
        other.kill()
        other.join()
    with impatient.lock():  # what was killed holds nothing
        pass


def _change(settings: Settings, overlaps: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    session = Session("one", settings)
    inside = session.directory.parent.parent / "inside"
    for _ in range(50):
        with session.lock():
            try:
                inside.touch(exist_ok=False)
            except FileExistsError:
                overlaps.value += 1
            _make(session)
            session.forget()  # so that all of it is removed
            inside.unlink(missing_ok=True)


def test_only_one_changes_what_is_made_and_removed_in_turns(settings: Settings) -> None:
    context = multiprocessing.get_context("fork")
    overlaps = context.Value("i", 0)
    works = [context.Process(target=_change, args=(settings, overlaps)) for _ in range(3)]
    for work in works:
        work.start()
    for work in works:
        work.join(100)
    assert [work.exitcode for work in works] == [0, 0, 0]
    assert overlaps.value == 0
    assert not Session("one", settings).directory.exists()


def test_local_hosts_are_of_one_machine_whatever_its_name_is_by_now(tmp_path: Path) -> None:
    hosts = {"directory": str(tmp_path), "names": ["host0"]}

    def elsewhere() -> str | None:
        return Record("local:1", "local", ["host0"], hosts).elsewhere

    assert elsewhere() is None, "of a version that did not record the machine"
    hosts[shared.MACHINE] = socket.gethostname()
    assert elsewhere() is None
    hosts[shared.MACHINE] = "another"
    assert elsewhere() == "another"
    environment = {worker.MARK: str(tmp_path / "host0")}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environment) as process:
        while not environment.items() <= psutil.Process(process.pid).environ().items():
            time.sleep(0.01)
        assert elsewhere() is None, "the machine has a new name"
        process.communicate()
    assert elsewhere() == "another"
