"""Bytes that rot in a host's store: found, named, and made right again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.conftest import NOBODY, Cli, mounts_shown
from tests.mount.conformance import assert_same, await_last
from wheelmount.config import MEMORY, Settings
from wheelmount.hosts.local import LocalHosts
from wheelmount.mount.client.remote import RemoteMount, remotemount
from wheelmount.mount.serve import processes, server
from wheelmount.mount.serve.control import Task
from wheelmount.mount.snapshot.layout import Extent
from wheelmount.mount.store import proofs
from wheelmount.mount.store import verify as verification
from wheelmount.mount.store.store import current

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


@pytest.fixture(params=["bind", "devfuse", "pyfuse3"])
def mount(
    source: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[RemoteMount]:
    """A mount of ``source`` on two hosts, complete."""
    settings = replace(settings, adapter=request.param, store=MEMORY)
    with LocalHosts(2, settings, namespaces=False) as hosts:
        made = remotemount(hosts, source, f"{workplace}/{{host}}", settings=settings)
        with made:
            made.wait(30)
            yield made


def _store(mount: RemoteMount, host: str) -> Path:
    place = mount._settings.private_store(mounted=True)
    return place / f"{mount.identity}-{host}"


def _kept(mount: RemoteMount, host: str, path: str) -> Path:
    store = _store(mount, host)
    return store / str(current(store)) / path


def _flip(file: Path, offset: int = 0) -> None:
    mode = file.stat().st_mode
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))
    file.chmod(mode & 0o7777)


@pytest.mark.costly
def test_what_rots_is_found_and_repaired_also_for_who_has_it_open(
    mount: RemoteMount, source: Path, workplace: Path
) -> None:
    found = mount.verify()
    assert [each.paths or each.unknown for each in found.values()] == [[], []]
    assert all(each.files > 300 and each.size > 300_000 for each in found.values())
    _flip(_kept(mount, "host0", "blocks"), 200_000)
    _flip(_kept(mount, "host0", "package/small7"))
    _kept(mount, "host1", "odd").unlink()
    shown = workplace / "host0" / "blocks"
    with shown.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[200_000] != (source / "blocks").read_bytes()[200_000]
        found = mount.verify()
        assert found["host0"].wrong == ["blocks", "package/small7"]
        assert found["host1"].wrong == ["odd"]
        assert mount.status()["host0"]["verified"]["wrong"] == ["blocks", "package/small7"]
        (source / "blocks").write_bytes(b"other bytes now")  # those of the other host will do
        found = mount.verify(repair=True)
        assert found["host0"].repaired == ["blocks", "package/small7"]
        assert found["host1"].repaired == ["odd"]
        assert mapped[:] == file.read() == bytes(range(256)) * 1024
    assert mount.status()["host0"]["verified"]["wrong"] == []
    found = mount.verify()
    assert [each.paths for each in found.values()] == [[], []]
    (source / "blocks").write_bytes(bytes(range(256)) * 1024)
    assert mount.refresh()
    await_last([_store(mount, name) for name in ("host0", "host1")])
    for name in ("host0", "host1"):
        assert_same(source, workplace / name)


def test_hashes_stay_with_files_from_refresh_to_refresh(mount: RemoteMount, source: Path) -> None:
    (source / "page").write_bytes(b"Q" * 4096)
    (source / "odd").rename(source / "moved")
    (source / "blocks").chmod(0o600)
    (source / "package" / "small1").unlink()
    assert mount.refresh()
    (source / "page").write_bytes(b"R" * 8192)
    assert mount.refresh()
    found = mount.verify()
    assert [each.paths or each.unknown for each in found.values()] == [[], []]
    names = ["blocks", "moved", "page", "package/small7"]
    for name in names:
        _flip(_kept(mount, "host1", name), 1)
    found = mount.verify(repair=True)
    assert found["host1"].repaired == sorted(names)
    assert found["host0"].damaged == []


def test_damage_that_nobody_can_repair_stays_named(mount: RemoteMount, source: Path) -> None:
    for host in ("host0", "host1"):
        _flip(_kept(mount, host, "page"))
    (source / "page").unlink()
    found = mount.verify(repair=True)
    assert [each.wrong for each in found.values()] == [["page"], ["page"]]


def test_the_log_of_hashes_does_not_grow_with_refreshes(tmp_path: Path) -> None:
    block = memoryview(os.urandom(100))
    for generation in range(1, 2000):
        extents = [Extent(2 * generation, 0, 0, 60), Extent(2 * generation + 1, 0, 60, 40)]
        proofs.add(tmp_path, generation, extents, block, b"")
        proofs.trim(tmp_path, 2, range(2 * generation, 2 * generation + 2))
    assert (tmp_path / proofs.LOG).stat().st_size <= 1 << 17
    assert [each.length for each in proofs.read(tmp_path)[3999]] == [40]


def test_what_an_abandoned_generation_brought_is_no_proof(tmp_path: Path) -> None:
    proofs.add(tmp_path, 2, [Extent(9, 0, 0, 5), Extent(9, 5, 5, 5)], memoryview(bytes(10)), b"")
    proofs.add(tmp_path, 3, [Extent(9, 0, 0, 7)], memoryview(bytes(7)), b"d" * 32)
    proofs.copy(tmp_path, 4, {10: 9})
    assert proofs.read(tmp_path) == {n: [proofs.Proof(0, 7, b"d" * 32)] for n in (9, 10)}


@pytest.mark.costly
def test_the_command_names_repairs_and_ends_with_74(
    cli: Cli, source: Path, workplace: Path
) -> None:
    (source / "page").chmod(0o444)
    assert cli("mount", source, "--hosts", "local:2").returncode == 0
    assert cli("verify", source).returncode == 0
    mounts = mounts_shown(cli)
    (store,) = (workplace / "store").glob("*/*-host1")
    _flip(store / "1" / "page")
    done = cli("verify", source)
    assert done.returncode == 74
    assert f"host1 {source} damaged: page\n" in done.stdout
    assert f"host0 {source} {mounts[0]['files']} files" in done.stdout
    assert "damaged: page" in cli("status").stdout
    done = cli("verify", "--repair")
    assert (done.returncode, done.stdout.count("repaired: page")) == (0, 1), done.stderr
    assert cli("verify", "-q").stderr == ""
    assert cli("umount", "--all").returncode == 0


def test_in_the_background_at_a_bounded_rate(
    source: Path, workplace: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "VERIFY_PAUSE", 0.05)
    settings = replace(settings, verify_rate=0.3)
    with (
        LocalHosts(1, settings, namespaces=False) as hosts,
        remotemount(hosts, source, str(workplace / "w"), settings=settings) as mount,
    ):
        mount.wait(30)
        (directory,) = processes.find(settings)
        task = Task.read(directory)
        assert task.verify_rate == 300_000
        _flip(Path(task.store) / "1" / "page")

        async def watch() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.Server(directory, task)._verify)
                with trio.fail_after(60):
                    while verification.last(directory) is None:
                        await trio.sleep(0.05)
                nursery.cancel_scope.cancel()

        trio.run(watch)
        found = mount.status()["host0"]["verified"]
        assert found["wrong"] == ["page"]
        assert found["seconds"] >= 0.9 * found["size"] / 300_000


def test_an_ordinary_users_files_that_may_not_be_written(workplace: Path) -> None:
    workplace.chmod(0o755)
    file = workplace / "file"
    file.write_bytes(b"old")
    file.chmod(0o444)
    os.chown(file, NOBODY, NOBODY)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with verification._writable(os.fsencode(file)) as fd:
                os.write(fd, b"new")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o444)
