from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.wheels.support import make_wheel, sha256
from wheelmount.config import Settings
from wheelmount.errors import ConfigError, InputError, WaitError
from wheelmount.operations import cache, environments
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
    with cache.hold(made.folder):
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
