"""Wheels of a wheelhouse on their way to hosts, with where they are from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wheelmount.wheels.shipment import Shipment, prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import Index, make_wheel, sha256


def plan_of(shipment: Shipment) -> dict[str, dict[str, object]]:
    plan = json.loads((shipment.tree / shipment.plan).read_text())
    return {wheel["name"]: wheel for wheel in plan["wheels"]}


def test_what_was_asked_for_and_by_which_url(uv_index: Index, tmp_path: Path) -> None:
    make_wheel(uv_index.directory, "own", requires=["other"])
    make_wheel(uv_index.directory, "other")
    local = make_wheel(tmp_path / "local", "local")
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "project"\nversion = "1.0"\n'
    )
    made = make_wheel(tmp_path / "made", "project")
    (project / "backend.py").write_text(
        "import shutil\n"
        "def build_wheel(directory, *_):\n"
        f"    return shutil.copy({str(made)!r}, directory) and {made.name!r}\n"
    )
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(["own", str(local), str(project)]), targets=[Target.here()])
    shipment = prepare(house.directory, report.answers[0], Target.here(), tmp_path / "cache")
    plan = plan_of(shipment)
    assert {name for name, wheel in plan.items() if wheel["requested"]} == {
        "own", "local", "project",
    }  # fmt: skip
    assert plan["own"]["direct_url"] is None
    hashes = {"hashes": {"sha256": sha256(local)}}
    assert plan["local"]["direct_url"] == {"url": local.as_uri(), "archive_info": hashes}
    assert plan["project"]["direct_url"] == {"url": project.as_uri(), "dir_info": {}}


@pytest.mark.slow
def test_what_another_request_with_the_same_wheels_asked_for_does_not_count(
    uv_index: Index, tmp_path: Path
) -> None:
    make_wheel(uv_index.directory, "own", requires=["other"])
    make_wheel(uv_index.directory, "other")
    house = Wheelhouse(tmp_path / "house")
    for names in (["own"], ["own", "other"], ["own"]):
        (answer,) = house.add(Wanted.of(names), targets=[Target.here()]).answers
        plan = plan_of(prepare(house.directory, answer, Target.here(), tmp_path / "cache"))
        assert [name for name, wheel in plan.items() if wheel["requested"]] == sorted(names)


@pytest.mark.slow
def test_a_tree_that_grows_keeps_what_it_has(uv_index: Index, tmp_path: Path) -> None:
    for name in ("one", "other"):
        make_wheel(uv_index.directory, name)
    house = Wheelhouse(tmp_path / "house")
    shipments = []
    for name in ("one", "other"):
        report = house.add(Wanted.of([name]), targets=[Target.here()])
        (answer,), cache = report.answers, tmp_path / "cache"
        shipments.append(prepare(house.directory, answer, Target.here(), cache, tree="growing"))
    first, second = shipments
    assert first.tree == second.tree
    assert list(plan_of(first)) == ["one"]
    assert list(plan_of(second)) == ["other"]
    assert len(list(first.tree.glob("*/purelib/*.py"))) == 2
    # Without a name each has a tree of its own, and the same wheels the same.
    report = house.add(Wanted.of(["one"]), targets=[Target.here()])
    trees = {
        prepare(house.directory, report.answers[0], Target.here(), tmp_path / "cache").tree
        for _ in range(2)
    }
    assert len(trees) == 1
    assert trees != {first.tree}


def test_no_file_has_a_password(
    uv_index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(uv_index.directory, "own", requires=["needed"])
    make_wheel(uv_index.directory, "needed")
    uv_index.password = "s3cr3t"  # noqa: S105
    url = uv_index.url.replace("://", "://me:s3cr3t@")
    (tmp_path / "uv.toml").write_text(f'[[index]]\nname = "mine"\nurl = "{url}"\ndefault = true\n')
    for name in ("UV_DEFAULT_INDEX", "UV_NO_CONFIG"):
        monkeypatch.delenv(name)
    house = Wheelhouse(tmp_path / "house")
    report = house.add(Wanted.of(["own"]), targets=[Target.here()])
    tree = prepare(house.directory, report.answers[0], Target.here(), tmp_path / "cache").tree
    assert any(tree.rglob("needed.py"))
    made = [path for place in ("house", "cache") for path in (tmp_path / place).rglob("*")]
    assert not [path for path in made if path.is_file() and b"s3cr3t" in path.read_bytes()]
