"""``Cluster``: several calls on the same hosts, from Python."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from wheelmount import Cluster
from wheelmount.config import Settings
from wheelmount.errors import CommandError, HostError, InputError
from wheelmount.hosts.commands import Result
from wheelmount.hosts.host import Host
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.operations import containers, installs
from wheelmount.operations.image import Image, packages_point
from wheelmount.operations.installs import Venv
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT
from wheelmount.wheels.wanted import Wanted

pytestmark = [pytest.mark.hosts, pytest.mark.fuse]


@pytest.fixture
def source(workplace: Path) -> Path:
    place = workplace / "source"
    place.mkdir()
    (place / "word").write_text("one")
    (place / "say.sh").write_text("cat word; echo; echo $WHEELMOUNT_HOST $WHEELMOUNT_RANK $@ $MORE")
    return place


@pytest.fixture
def cluster(settings: Settings) -> Iterator[Cluster]:
    with Cluster("local:2", settings=settings) as made:
        yield made


def test_a_mount_stays_and_follows(cluster: Cluster, source: Path) -> None:
    assert cluster.hosts == ["host0", "host1"]
    script = source / "say.sh"
    results = cluster.run(script, "a b", mount=source, variables={"MORE": "more"})
    results.raise_for_status()
    assert results.texts == {f"host{n}": f"one\nhost{n} {n} a b more\n" for n in (0, 1)}
    (source / "word").write_text("two")
    assert cluster.run(["cat", "word"], mount=source).texts == dict.fromkeys(cluster.hosts, "two")
    mount = cluster.mount(source)
    assert mount is cluster.mount(source)
    assert set(mount.mntpoints.values()) == {str(source)}


def test_packages_stay_mounted_for_later_calls(cluster: Cluster, source: Path) -> None:
    pool = cluster._open.pool
    for part in cluster, cluster.on("host0"):
        with pool.mount(source, packages_point(part._open, source)):
            pass
    assert len(pool._mounts) == 1
    with Cluster("local:1", settings=cluster._site.settings) as other:
        points = packages_point(other._open, source), packages_point(cluster._open, source)
    assert points[0] != points[1], "both may be on one machine"


def test_a_mount_where_the_caller_sees_it(
    settings: Settings, source: Path, workplace: Path
) -> None:
    with Cluster("local:2", settings=settings, namespaces=False) as cluster:
        mount = cluster.mount(source, f"{workplace}/{{host}}")
        mount.wait(60)
        assert (workplace / "host1" / "word").read_text() == "one"
    assert not os.path.ismount(workplace / "host1")


def test_some_of_the_hosts(cluster: Cluster, source: Path) -> None:
    one = cluster.on("host1")
    assert one.hosts == ["host1"]
    assert one.run(["cat", "word"], mount=source).texts == {"host1": "one"}
    assert set(cluster.run(["cat", "word"], mount=source).texts) == {"host0", "host1"}
    with pytest.raises(InputError, match="no host host7"):
        cluster.on("host7")


def test_without_a_directory(cluster: Cluster, source: Path) -> None:
    script = source / "program.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert cluster.run(script, "a b").texts == dict.fromkeys(cluster.hosts, "['a b']\n")
    results = cluster.run(["sh", "-c", "echo $WHEELMOUNT_LOCAL_RANK"], per_host=2)
    assert results.texts["host1:1"] == "1\n"


def test_the_metadata_of_a_script_counts(cluster: Cluster, source: Path) -> None:
    script = source / "new.py"
    script.write_text('# /// script\n# requires-python = ">=99"\n# ///\nprint()\n')
    for mount in source, None:
        with pytest.raises(InputError, match="the script requires Python >=99"):
            cluster.run(script, mount=mount)


def test_containers_and_environments_are_those_that_are_named(
    cluster: Cluster, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image({"": workplace / "missing.sif"}, variables={"OWN": "1", "BOTH": "1"})
    with pytest.raises(InputError, match="cannot write to one overlay together"):
        cluster.run(["true"], image=image, per_host=2)
    given: list[Image | Venv] = []  # what would be run or filled on hosts

    def note(
        _site: Site, found: Image | Wanted, into: object, *_rest: object, **_more: str
    ) -> None:
        given.extend(each for each in (found, into) if isinstance(each, Image | Venv))

    monkeypatch.setattr(containers, "execute", note)
    monkeypatch.setattr(installs, "install", note)
    cluster.run(["true"], image=image, variables={"BOTH": "2"})
    cluster.exec(image, ["true"], variables={"BOTH": "2"})
    both = replace(image, variables={"OWN": "1", "BOTH": "2"})
    monkeypatch.chdir(workplace)
    cluster.install("hello", venv="venv-{host}")
    assert given == [both, both, Venv(f"{workplace}/venv-{{host}}")]


def test_failures_are_raised_when_asked_for(cluster: Cluster) -> None:
    results = cluster.run(["sh", "-c", "echo why >&2; exit $((3 + WHEELMOUNT_RANK))"])
    assert [r.code for r in results.values() if isinstance(r, Result)] == [3, 4]
    assert repr(results).splitlines()[0].startswith("host0: <exit code 3 after 0.")
    with pytest.raises(CommandError, match="exit code 3 on host0 and 1 more: 'why'"):
        results.raise_for_status()
    with pytest.raises(CommandError, match="exit code 124"):
        cluster.run(["sleep", "100"], timeout=0.2).raise_for_status()
    with pytest.raises(HostError, match="no-such-program"):
        cluster.run(["no-such-program"]).raise_for_status()


def test_in_a_running_loop(settings: Settings, source: Path) -> None:
    async def work() -> dict[str, str]:
        async with Cluster("local:1", settings=settings) as cluster:
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0.01)
                    turns += 1

            counting = asyncio.create_task(count())
            command = ["sh", "-c", "sleep 0.5; cat word"]
            results = await asyncio.to_thread(cluster.run, command, mount=source)
            counting.cancel()
            assert turns > 5
            return results.texts

    assert asyncio.run(work()) == {"host0": "one"}


OPENED = {Cluster: ("start", "stop"), RemoteMount: ("open", "clear")}
"""What begins a context, and what undoes it."""


def _context(kind: type[Any], source: Path, settings: Settings) -> Any:
    if kind is Cluster:
        return Cluster("local:1", settings=settings)
    return RemoteMount([Host("host0", None)], source, None, settings, SILENT)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", OPENED)
def test_what_is_cancelled_while_it_opens_is_closed(
    source: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any],
    fails: bool,
) -> None:
    begun, go, done, lost = threading.Event(), threading.Event(), [], []

    def begin(_context: object) -> None:
        begun.set()
        assert go.wait(30)
        done.append("begun")
        if fails:
            raise HostError("a host does not start")

    def undo(_context: object) -> None:
        done.append("undone")

    for name, work in zip(OPENED[kind], (begin, undo), strict=True):
        monkeypatch.setattr(kind, name, work)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: lost.append(found))
        opening = asyncio.create_task(_context(kind, source, settings).__aenter__())
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(2):  # the second while the first is heeded
            opening.cancel()
            await asyncio.sleep(0.01)
        assert not opening.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        del opening
        gc.collect()

    asyncio.run(main())
    assert done == (["begun"] if fails else ["begun", "undone"])
    assert lost == []


def test_hosts_of_a_session_stay(cli: Cli, settings: Settings, source: Path) -> None:
    assert cli("up", "--hosts", "local:1").returncode == 0
    try:
        with Cluster("session:default", settings=settings) as cluster:
            assert repr(cluster) == "<cluster session:default: host0>"
            assert cluster.run(["cat", "word"], mount=source).texts == {"host0": "one"}
        assert str(source) in cli("status").stdout
    finally:
        assert cli("down").returncode == 0


def test_what_is_not_started_says_so(settings: Settings) -> None:
    cluster = Cluster("local:1", settings=settings)
    assert repr(cluster) == "<cluster local:1: not started>"
    with pytest.raises(InputError, match="not started"):
        cluster.run(["true"])
    with pytest.raises(InputError, match="invalid --hosts"):
        Cluster("nonsense", settings=settings)
