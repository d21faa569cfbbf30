from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.wheels.support import make_wheel, sha256
from wheelmount.config import Settings
from wheelmount.errors import ConfigError, InputError, WaitError
from wheelmount.hosts import spec
from wheelmount.hosts.session import Record, Session
from wheelmount.operations import cache, environments, records
from wheelmount.operations.environments import Needed
from wheelmount.operations.records import MountNote
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT
from wheelmount.wheels import venv
from wheelmount.wheels.interpreter import base_executable
from wheelmount.wheels.linktree import Item, Plan, grow
from wheelmount.wheels.target import Target
from wheelmount.wheels.unpacked import Unpacked
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse


def fill(settings: Settings) -> None:
    """Two wheelhouses, and two trees of unpacked wheels, older and newer."""
    place = Path(settings.cache_dir)
    for age, name in enumerate(("old", "new")):
        house = place / "wheelhouses" / name
        wheel = make_wheel(house, name, padding=300_000 + age)
        (house / ".wheelmount.lock").touch()
        unpacked = Unpacked(place / "unpacked")
        (recipe,) = unpacked.add([(wheel, sha256(wheel))])
        plan = Plan.make([Item(wheel.name, recipe)], Target.here())
        grow(place / "unpacked" / "trees" / name, plan, unpacked)
        used = 1_000_000_000 + age * 1000
        for path in (
            house / ".wheelmount.lock",
            place / "unpacked" / "wheels" / f"{recipe.sha256}.json",
            place / "unpacked" / "used" / name,
        ):
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.utime(path, (used, used))


def names(settings: Settings) -> set[str]:
    place = Path(settings.cache_dir)
    found = [*(place / "wheelhouses").iterdir(), *(place / "unpacked" / "trees").iterdir()]
    return {f"{path.parent.name}/{path.name}" for path in found}


def test_an_interrupted_removal_leaves_no_part(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings)

    def interrupted(_path: Path, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", interrupted)
        cache.prune(settings, 0)
    whole = {"wheelhouses/old", "wheelhouses/new", "trees/old", "trees/new"}
    assert len(whole & names(settings)) == 3
    cache.prune(settings, 0)
    assert not whole & names(settings)


def test_what_was_used_least_recently_goes_first(settings: Settings) -> None:
    fill(settings)
    whole = cache.size(settings)
    assert whole > 1_200_000
    gone = cache.prune(settings, whole // 2 + 50_000)
    assert {item.kind for item in gone} == {"wheelhouse", "tree", "unpacked"}
    assert names(settings) == {"wheelhouses/new", "trees/new"}
    assert cache.size(settings) <= whole // 2 + 50_000
    objects = list((Path(settings.cache_dir) / "unpacked" / "objects").rglob("*"))
    assert any(path.stat().st_size > 300_000 for path in objects)  # those of the newer one
    assert cache.prune(settings, whole) == []
    cache.clean(settings)
    assert names(settings) == set()
    assert not [path for path in objects if path.is_file()]


def test_a_wheelhouse_that_is_used_again_goes_last(settings: Settings) -> None:
    fill(settings)
    cache.touch(Path(os.path.relpath(cache.wheelhouse(settings, "old"))), settings)
    houses = [item.path.name for item in cache.items(settings) if item.kind == "wheelhouse"]
    assert houses == ["new", "old"]
    cache.clean(settings)
    assert list((Path(settings.cache_dir) / "wheelhouses").iterdir()) == []


@contextlib.contextmanager
def mounted(settings: Settings, source: Path) -> Iterator[None]:
    """A session's note of a mount."""
    session = Session("one", settings)
    note = MountNote("01234567", str(source), "/packages")
    mounts = {records.key(note.source, note.mntpoint): dataclasses.asdict(note)}
    with session.lock():
        session.write(Record("local:1", "local", ["host0"], {}, notes={records.MOUNTS: mounts}))
    try:
        yield
    finally:
        with session.lock():
            session.forget()


@pytest.mark.parametrize("source", ["wheelhouses/old", "unpacked/trees/old", "link", "unpacked"])
def test_what_a_session_has_mounted_stays(settings: Settings, source: str) -> None:
    fill(settings)
    place = Path(settings.cache_dir)
    (place / "link").symlink_to(place / "unpacked" / "trees" / "old")
    stays = {"wheelhouses/old": "wheelhouses/old", "unpacked": "trees/old trees/new"}
    with mounted(settings, place / source):
        cache.clean(settings)
        assert names(settings) == set(stays.get(source, "trees/old").split())
    cache.clean(settings)
    assert names(settings) == set()


def test_a_record_of_a_session_that_cannot_be_read_keeps_what_it_may_have_mounted(
    settings: Settings,
) -> None:
    fill(settings)
    with mounted(settings, Path("/data")):
        (Session("one", settings).directory / "session.json").write_text("{")
        cache.clean(settings)
        assert names(settings) == {"trees/old", "trees/new"}


def test_a_tree_that_is_mounted_is_used(settings: Settings, tmp_path: Path) -> None:
    fill(settings)
    for folder in ("unpacked/trees/old", "unpacked/used"):
        cache.touch(Path(settings.cache_dir) / folder, settings)
    trees = [item.path.name for item in cache.items(settings) if item.kind == "tree"]
    assert trees == ["new", "old"]
    source = tmp_path / "source"
    source.mkdir()
    cache.touch(source, settings)
    assert list(tmp_path.glob(".source*")) == []
    cache.clean(settings)
    assert list((Path(settings.cache_dir) / "unpacked" / "used").iterdir()) == []


def test_a_use_is_noted_as_far_as_the_file_system_allows(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)
    cache.touch(cache.wheelhouse(settings, "old"), settings)


@pytest.mark.slow
def test_a_request_that_is_answered_already_uses_its_wheelhouse(settings: Settings) -> None:
    site = Site(spec.parse("local:1"), settings, SILENT)
    wheel = make_wheel(Path(settings.cache_dir) / "given", "small")

    def used() -> float:
        with environments._planned(site, Needed.of([str(wheel)]), None, None):
            (item,) = (one for one in cache.items(settings) if one.kind == "wheelhouse")
        return item.used

    assert used() > 1000
    for file in cache.wheelhouse(settings, "").iterdir():
        os.utime(file, (1000, 1000))
        for below in file.glob("*lock"):
            os.utime(below, (1000, 1000))
    assert used() > 1000


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": 1}', '{"files": {}, "bytecode": {"a": 1}}'], ids=len
)
def test_a_damaged_description_of_a_wheel_keeps_nothing(settings: Settings, text: str) -> None:
    fill(settings)
    recipes = (Path(settings.cache_dir) / "unpacked" / "wheels").glob("*.json")
    damaged = max(recipes, key=lambda recipe: recipe.stat().st_mtime)  # the last to go
    damaged.write_text(text)
    assert cache.prune(settings, cache.size(settings) - 1), "the oldest goes"
    cache.clean(settings)
    objects = Path(settings.cache_dir) / "unpacked" / "objects"
    assert not [path for path in objects.rglob("*") if path.is_file()]


def test_not_while_it_is_used(settings: Settings) -> None:
    fill(settings)
    with cache.used(settings), cache.used(settings), pytest.raises(WaitError):
        cache.clean(settings)
    cache.clean(settings)


def test_a_wait_for_a_removal_ends(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LONGEST", 0.0)
    with cache.alone(settings):
        with pytest.raises(WaitError, match="deleting parts of") as caught, cache.used(settings):
            pass
        assert "WHEELMOUNT_CACHE_DIR" in str(caught.value.hint)
    with cache.used(settings):
        pass


def test_a_file_system_without_locks(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(settings)

    def refuse(file: int, how: int, lock: Callable[[int, int], None] = fcntl.flock) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(settings.cache_dir):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", refuse)
    with cache.used(settings):
        pass
    assert cache.clean(settings)
    assert names(settings) == set()


def test_a_lock_that_cannot_be_asked_for_deletes_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings)
    before = names(settings)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="Input/output"):
        cache.clean(settings)
    assert names(settings) == before


def test_each_description_is_read_a_few_times(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(settings)
    wheels = Path(settings.cache_dir) / "unpacked" / "wheels"
    first = next(wheels.iterdir())
    for number in range(20):
        shutil.copy(first, wheels / f"{number}.json")
    read: Counter[Path] = Counter()
    of_recipe = cache._names

    def counted(recipe: Path) -> set[str]:
        read[recipe] += 1
        return of_recipe(recipe)

    monkeypatch.setattr(cache, "_names", counted)
    cache.clean(settings)
    assert list(wheels.iterdir()) == []
    assert max(read.values()) <= 3


def test_the_bytes_of_each_file_count_until_its_last_name_is_deleted(settings: Settings) -> None:
    fill(settings)
    for item in cache.items(settings):
        if item.kind != "wheelhouse":
            os.utime(item.path, (1_000_001_000, 1_000_001_000))
    for bound in range(cache.size(settings), 0, -50_000):
        before = cache.size(settings)
        gone = cache.prune(settings, bound)
        assert cache.size(settings) <= bound or len(cache.items(settings)) == 0
        assert bool(gone) == (before > bound)


def test_nothing_there(settings: Settings) -> None:
    assert cache.size(settings) == 0
    assert cache.clean(settings) == []


@pytest.mark.slow
def test_the_command(cli: Cli, settings: Settings, workplace: Path) -> None:
    place = json.loads(cli("cache", "size", "--json").stdout)
    assert place["bytes"] == 0
    fill(dataclasses.replace(settings, cache_dir=place["directory"]))
    shown = cli("cache", "size").stdout
    assert shown.startswith("wheelhouse: 2, 0.6 MB\ntree: 2, ")
    done = cli("cache", "prune")
    assert done.returncode == 2
    assert "cache_size" in done.stderr
    removed = json.loads(cli("cache", "prune", "--to", "1K", "--json").stdout)
    assert removed
    assert "0 removed" in cli("cache", "clean").stdout


@pytest.mark.slow
def test_environments_go_unless_a_command_uses_them(settings: Settings) -> None:
    place = Path(settings.cache_dir)
    wheel = make_wheel(place / "given", "small")
    house = Wheelhouse(place / "house")
    report = house.add(Wanted.of([str(wheel)]), targets=[Target.here()])
    python = base_executable()
    planned = venv.plan(house.directory, report.answers[0], Target.here(), python, place)
    planned.make()
    made = venv.Environment.read(planned.folder)
    name = made.folder.name
    other = venv.plan(house.directory, None, Target.here(), python, place)
    other.make()
    with cache.hold(made.folder):
        with pytest.raises(WaitError, match="uses environment"):
            environments.remove([other.folder.name, name], settings)
        assert other.folder.is_dir(), "all or none"
        environments.remove([other.folder.name], settings)
        assert "environment" not in {item.kind for item in cache.clean(settings)}
        with pytest.raises(WaitError, match="uses environment"):
            environments.remove([name], settings)
        assert list(venv.every(place)) == [made]
    with cache.used(settings), pytest.raises(WaitError):
        environments.remove([name], settings)
    assert [one.folder.name for one in environments.remove([name], settings)] == [name]
    with pytest.raises(InputError, match="no environment"):
        environments.remove([name], settings)
    planned = venv.plan(house.directory, report.answers[0], Target.here(), python, place)
    assert planned.items is not None
    planned.make()
    assert "environment" in {item.kind for item in cache.clean(settings)}
    assert list((place / "environments").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_cache_of_others_is_not_touched(settings: Settings, tmp_path: Path, mode: int) -> None:
    """What lies there may lead to what is the user's, and be code of others."""
    precious = tmp_path / "home" / "work" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    place = Path(settings.cache_dir)
    (place / "unpacked").mkdir(parents=True)
    (place / "wheelhouses").symlink_to(tmp_path / "home")
    (place / "unpacked" / "objects").symlink_to(tmp_path / "home")
    os.chown(place, 0 if mode == 0o777 else 65534, -1)
    place.chmod(mode)
    with pytest.raises(ConfigError, match="only you may write to"):
        cache.clean(settings)
    with pytest.raises(ConfigError, match="only you may write to"), cache.used(settings):
        pass
    assert precious.exists()
