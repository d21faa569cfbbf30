from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pytest
import tomli_w
import uv

from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import (
    InputError,
    ResolveError,
    SourceError,
    TransferError,
    WheelError,
    WheelmountError,
)
from wheelmount.wheels.install import clean_environment, install_command
from wheelmount.wheels.lockfile import chosen_wheels, parse_lock
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import (
    ARM,
    TARGET,
    Fault,
    Index,
    lock_of,
    make_wheel,
    package_of,
    sha256,
    spoil,
    with_files,
)


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


@pytest.fixture
def filled(uv_index: Index, house: Wheelhouse) -> Wheelhouse:
    """A wheelhouse with ``a``, which wants ``b`` and ``c``."""
    make_wheel(uv_index.directory, "a", requires=["b>=1", "c"])
    make_wheel(uv_index.directory, "b", padding=1000)
    make_wheel(uv_index.directory, "c", "2.5")
    house.add(Wanted.of(["a"]), targets=[TARGET])
    return house


def names(house: Wheelhouse) -> list[str]:
    return [wheel.name.split("-py3")[0] for wheel in house.wheels()]


def refused(house: Wheelhouse, *requirements: str, files: tuple[Path, ...] = ()) -> WheelmountError:
    with pytest.raises(WheelmountError) as caught:
        if requirements or files:
            house.check(Wanted.of(requirements, files), targets=[TARGET]).raise_if_any()
        else:
            house.check().raise_if_any()
    assert caught.value.hint
    assert "\n" not in caught.value.message.replace("\n  And because", "")
    return caught.value


def test_making_one_touches_nothing(house: Wheelhouse) -> None:
    assert (house.wheels(), house.size()) == ([], 0)
    assert not house.directory.exists()


def test_add(filled: Wheelhouse) -> None:
    assert names(filled) == ["a-1.0", "b-1.0", "c-2.5"]
    assert filled.size() == sum(wheel.stat().st_size for wheel in filled.wheels()) > 1000
    lock = parse_lock((filled.directory / "pylock.toml").read_text())
    assert [wheel.pin for wheel in chosen_wheels(lock, TARGET)] == ["a==1.0", "b==1.0", "c==2.5"]
    others = {file.name for file in filled.directory.iterdir() if file.suffix != ".whl"}
    assert others == {
        "pylock.toml", "wheelmount.json", ".wheelmount.lock", "simple", "requests",
    }  # fmt: skip
    filled.check().raise_if_any()
    filled.check(Wanted.of(["a", "b<2"]), targets=[TARGET]).raise_if_any()


@pytest.mark.slow
def test_add_again(filled: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "d", requires=["c"])
    report = filled.add(Wanted.of(["d"]), targets=[TARGET])
    assert report.fetched == ("d-1.0-py3-none-any.whl",)
    assert names(filled) == ["a-1.0", "b-1.0", "c-2.5", "d-1.0"]
    lock = parse_lock((filled.directory / "pylock.toml").read_text())
    assert [package.name for package in lock.packages] == ["c", "d"]  # of the latest request
    (filled.directory / "b-1.0-py3-none-any.whl").unlink()
    assert "b>=1 (wanted by a 1.0)" in refused(filled).message  # the earlier one is not forgotten
    filled.check(Wanted.of(["d"]), targets=[TARGET]).raise_if_any()


def test_the_same_request_again_takes_the_place_of_the_first(filled: Wheelhouse) -> None:
    filled.add(Wanted.of(["a"]), targets=[TARGET])
    manifest = json.loads((filled.directory / "wheelmount.json").read_text())
    assert len(manifest["requests"]) == 1
    filled.add(Wanted.of(["a"]), targets=[ARM])
    manifest = json.loads((filled.directory / "wheelmount.json").read_text())
    assert len(manifest["requests"]) == 2


def test_requests_that_would_conflict(filled: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "c", "1.0")
    make_wheel(uv_index.directory, "old", requires=["c<2"])
    with Index(uv_index.directory) as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", other.url)  # uv remembers what the first one had
        filled.add(Wanted.of(["old"]), targets=[TARGET])
    assert {"c-1.0", "c-2.5"} <= set(names(filled))
    filled.check().raise_if_any()


def test_a_failed_add_changes_nothing(filled: Wheelhouse, uv_index: Index) -> None:
    before = {file.name for file in filled.directory.iterdir()}
    with pytest.raises(ResolveError):
        filled.add(Wanted.of(["nosuch"]), targets=[TARGET])
    new = make_wheel(uv_index.directory, "d")
    filled.add(Wanted.of(["d"]), targets=[TARGET])
    (filled.directory / new.name).unlink()
    lock = (filled.directory / "pylock.toml").read_bytes()
    uv_index.faults[new.name] = [Fault(status=404, agent="python-httpx")]
    with pytest.raises(TransferError):
        filled.add(Wanted.of(["d", "a"]), targets=[TARGET])
    assert (filled.directory / "pylock.toml").read_bytes() == lock
    assert {file.name for file in filled.directory.iterdir()} == before
    manifest = json.loads((filled.directory / "wheelmount.json").read_text())
    assert len(manifest["requests"]) == 2


@pytest.mark.slow
def test_files_of_requirements(
    filled: Wheelhouse, uv_index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(uv_index.directory, "d", requires=["c"])
    file = tmp_path / "needs.txt"
    file.write_text("--pre\nd>=1  # why\n")
    filled.add(Wanted.of([], [file]), targets=[TARGET])
    filled.check(Wanted.of(files=[file]), targets=[TARGET]).raise_if_any()
    (filled.directory / "d-1.0-py3-none-any.whl").unlink()
    assert "d>=1 (wanted by needs.txt)" in refused(filled, files=(file,)).message
    file.unlink()  # the manifest does not need it
    assert "d==1.0 (wanted by pylock.toml)" in refused(filled).message


@pytest.mark.slow
def test_a_requirement_by_url(filled: Wheelhouse, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "near", "own", requires=["c"])
    filled.add(Wanted.of([f"own @ {wheel.as_uri()}"]), targets=[TARGET])
    wheel.unlink()
    filled.check().raise_if_any()
    filled.check(Wanted.of(["own"]), targets=[TARGET]).raise_if_any()


@pytest.mark.parametrize("password", ["secret", "it's-secret", "a@secret", 'se"secret`'])
def test_no_file_has_a_password(
    password: str, house: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    wheel = make_wheel(uv_index.directory, "own", requires=["needed"])
    make_wheel(uv_index.directory, "needed")
    uv_index.password = password
    url = uv_index.file_url(wheel).replace("://", f"://me:{password}@") + "?token=secret"
    (tmp_path / "needs.txt").write_text(
        f"--index-url {uv_index.url.replace('://', f'://me:{quote(password)}@')}\nown @ {url}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("UV_DEFAULT_INDEX")
        house.add(Wanted.of(files=[tmp_path / "needs.txt"]), targets=[TARGET])  # alone
        patch.setenv("UV_INDEX", uv_index.url.replace("://", f"://me:{quote(password)}@"))
        house.add(Wanted.of([f"own @ {url}"]), targets=[TARGET])
    assert len(house.wheels()) == 2
    files = [path for path in house.directory.rglob("*") if path.is_file()]
    assert [path for path in files if b"secret" in path.read_bytes()] == []
    house.check().raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_a_wheel_that_wants_another_by_url(
    tool: Literal["uv", "pip"], house: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    needed = make_wheel(uv_index.directory, "needed", headers="Requires-Python: <3.8\n")
    url = uv_index.file_url(needed)
    own = make_wheel(uv_index.directory, "own", "1.0rc1", requires=[f"needed @ {url}"])
    wanted = Wanted.of([f"own @ {uv_index.file_url(own)}"])
    report = house.add(wanted, targets=[TARGET])
    house.check().raise_if_any()
    house.check(wanted, targets=[TARGET]).raise_if_any()
    uv_index.password = "nobody has it"  # noqa: S105
    file = f"{house.directory}/{report.requests[0]}"
    command = install_command(
        tool, [], packages=str(house.directory), python=sys.executable, file=file
    )
    program = uv.find_uv_bin() if tool == "uv" else command[0]
    command = [program, *command[1:], "--target", str(tmp_path / "there")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "needed.py").is_file()
    assert (tmp_path / "there" / "own.py").is_file()


@pytest.mark.slow
def test_what_is_complete_for_uv_and_not_for_pip(house: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "own", requires=["needed"])
    make_wheel(uv_index.directory, "needed", headers="Requires-Python: >=3,<3.8\n")
    wanted, here = Wanted.of(["own"]), [Target.here()]
    house.add(wanted, targets=here)
    house.check(wanted, targets=here).raise_if_any()
    (gap,) = house.check(wanted, targets=here, pip=True).gaps
    assert "needed" in gap.reason
    assert "--ignore-requires-python" in gap.hint
    with pytest.raises(InputError, match="pip resolves for"):
        house.check(wanted, targets=[ARM], pip=True)
    make_wheel(uv_index.directory, "needed", "1.1")
    house.add(wanted, targets=here, upgrade=True)
    house.check(wanted, targets=here, pip=True).raise_if_any()


def test_what_was_taken_back_is_told_and_marked(
    house: Wheelhouse, uv_index: Index, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel(uv_index.directory, "own")
    uv_index.yanked[wheel.name] = "it <breaks>"
    progress = ConsoleProgress()
    house.add(Wanted.of(["own[nothing]==1.0"]), targets=[TARGET], progress=progress)
    progress.console.file.close()
    said = capfd.readouterr().err
    assert "warning: `own==1.0` is yanked" in said
    assert "does not have an extra named `nothing`" in said
    page = house.directory / "simple" / "own"
    assert 'data-yanked="it &lt;breaks&gt;"' in (page / "index.html").read_text()
    assert json.loads((page / "index.json").read_text())["files"][0]["yanked"] == "it <breaks>"


def test_relative_paths_in_a_file(house: Wheelhouse, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "near", "own")
    (tmp_path / "needs.txt").write_text(f"./near/{wheel.name}\n")
    house.add(Wanted.of([], [Path("needs.txt")]), targets=[TARGET])
    assert names(house) == ["own-1.0"]


def test_all_that_is_missing_is_named(filled: Wheelhouse) -> None:
    for wheel in filled.wheels()[1:]:
        wheel.unlink()
    error = refused(filled, "a", "d")
    assert type(error) is WheelError
    for missing in ("b>=1 (wanted by a 1.0)", "c (wanted by a 1.0)", "d (wanted by you)"):
        assert missing in error.message
    assert str(TARGET) in error.message
    manifest = refused(filled).message
    assert "b>=1 (wanted by a 1.0)" in manifest
    assert "pylock.toml" not in manifest  # who wants it says more than where it was locked


def test_what_resolves_to_other_versions_than_locked(filled: Wheelhouse) -> None:
    (filled.directory / "b-1.0-py3-none-any.whl").unlink()
    make_wheel(filled.directory, "b", "1.1")
    filled.check(Wanted.of(["a"]), targets=[TARGET]).raise_if_any()
    assert "b==1.0 (wanted by pylock.toml)" in refused(filled).message


def test_a_conflict(filled: Wheelhouse) -> None:
    make_wheel(filled.directory, "d", requires=["c<2"])
    make_wheel(filled.directory, "c", "1.0")
    make_wheel(filled.directory, "e", requires=["c>2"])
    error = refused(filled, "d", "e")
    assert type(error) is WheelError
    assert "c<2" in error.message


@pytest.mark.slow
def test_another_target(filled: Wheelhouse, uv_index: Index) -> None:
    filled.check(targets=[ARM]).raise_if_any()  # all of it is pure Python
    make_wheel(uv_index.directory, "d", tag="cp311-cp311-manylinux_2_17_x86_64")
    filled.add(Wanted.of(["d"]), targets=[TARGET])
    with pytest.raises(WheelError, match=r"d \(wanted by you\)") as caught:
        filled.check(targets=[ARM]).raise_if_any()
    assert str(ARM) in caught.value.message


@pytest.mark.parametrize("requirements", [(), ("a",)])
@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_damage(filled: Wheelhouse, requirements: tuple[str, ...], damage: str) -> None:
    filled.check().raise_if_any()  # what is remembered of the whole wheel must not count later
    wheel = filled.directory / "b-1.0-py3-none-any.whl"
    data, times = wheel.read_bytes(), wheel.stat()
    where = data.index(b"PK\x01\x02") - 10
    changed = {"cut": data[:-9], "emptied": b"", "changed": data[:where] + b"!" + data[where + 1 :]}
    wheel.write_bytes(changed[damage])
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a failing disk would have it
    error = refused(filled, *requirements)
    assert type(error) is WheelError
    assert "damaged" in error.message
    assert wheel.name in error.message


def test_damage_elsewhere_does_not_matter(filled: Wheelhouse) -> None:
    (filled.directory / "b-1.0-py3-none-any.whl").write_bytes(b"")
    filled.check(Wanted.of(["c"]), targets=[TARGET]).raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["link", "directory"])
@pytest.mark.parametrize("name", ["b-1.0-py3-none-any.whl", "x-1.0-py3-none-any.whl"])
def test_what_cannot_be_read_is_unsound(filled: Wheelhouse, name: str, what: str) -> None:
    place = filled.directory / name
    place.unlink(missing_ok=True)
    place.mkdir() if what == "directory" else place.symlink_to("nowhere")
    reason = {"link": "No such file or directory", "directory": "Is a directory"}[what]
    assert f"{name} (it cannot be read: {reason})" in refused(filled).message


@pytest.mark.parametrize("name", ["pylock.toml", "wheelmount.json"])
def test_hashes_of_both_files_count(filled: Wheelhouse, name: str) -> None:
    make_wheel(filled.directory, "c", "2.5", padding=3)
    (filled.directory / name).unlink()
    assert "c-2.5-py3-none-any.whl (another build than" in refused(filled, "a").message


@pytest.mark.slow
def test_every_wheel_is_read(filled: Wheelhouse) -> None:
    by_hand = make_wheel(filled.directory, "x")
    findings = filled.check()
    assert (len(findings.wheels), findings.size) == (4, filled.size())
    spoil(by_hand, {"x.py": b"VALUE = 'other'\n"})
    assert "x-1.0-py3-none-any.whl (hash / size of x.py" in refused(filled).message
    filled.check(Wanted.of(["a"]), targets=[TARGET]).raise_if_any()
    (filled.directory / "odd.whl").write_bytes(b"")
    assert {one.wheel for one in filled.check().unsound} == {by_hand.name, "odd.whl"}


@pytest.mark.slow
def test_all_that_is_wrong_is_found_at_once(filled: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "d", requires=["e"])
    make_wheel(uv_index.directory, "e")
    filled.add(Wanted.of(["d"]), targets=[ARM])
    (filled.directory / "b-1.0-py3-none-any.whl").unlink()
    (filled.directory / "e-1.0-py3-none-any.whl").unlink()
    (filled.directory / "c-2.5-py3-none-any.whl").write_bytes(b"")
    found = filled.check().to_dict()
    assert not found["complete"]
    assert [one["wheel"] for one in found["unsound"]] == ["c-2.5-py3-none-any.whl"]
    assert [(gap["python_version"], gap["missing"]) for gap in found["gaps"]] == [
        ("3.11", [{"requirement": "b>=1", "wanted_by": "a 1.0"}]),
        ("3.12", [{"requirement": "e", "wanted_by": "d 1.0"}]),
    ]
    message = refused(filled).message
    for word in ("c-2.5", f"{TARGET} of b>=1 (wanted by a 1.0)", f"{ARM} of e (wanted by d 1.0)"):
        assert word in message


def test_unsound_wheels_do_not_get_in(filled: Wheelhouse, uv_index: Index) -> None:
    wheel = make_wheel(uv_index.directory, "evil")
    spoil(wheel, {}, ("../../evil.py", b""))
    with pytest.raises(
        WheelError, match=r"evil-1\.0-py3-none-any\.whl is not sound: '\.\./"
    ) as caught:
        filled.add(Wanted.of(["evil"]), targets=[TARGET], trusted=["evil"])
    assert "--trust" not in (caught.value.hint or "")
    assert "evil-1.0" not in names(filled)
    assert not list(filled.directory.glob("*.part"))


@pytest.mark.slow
def test_a_wrong_record_is_taken_from_who_is_trusted(filled: Wheelhouse, uv_index: Index) -> None:
    spoil(make_wheel(uv_index.directory, "Odd_Name"), {"more.py": b""})
    with pytest.raises(WheelError, match=r"more\.py is not mentioned in RECORD") as caught:
        filled.add(Wanted.of(["odd-name"]), targets=[TARGET])
    assert "--trust odd-name" in (caught.value.hint or "")
    filled.add(Wanted.of(["odd-name"]), targets=[TARGET], trusted=["odd.name"])
    filled.check().raise_if_any()
    (filled.directory / "Odd_Name-1.0-py3-none-any.whl").unlink()
    assert filled.add(Wanted.of(["odd-name"]), targets=[TARGET]).fetched  # it stays trusted


def test_what_was_looked_into_is_not_unpacked_again(filled: Wheelhouse) -> None:
    file = filled.directory / "wheelmount.json"
    manifest = json.loads(file.read_text())
    (wheel,) = (one for one in filled.wheels() if one.name.startswith("a-"))
    # As if these bytes had been looked into: what is noted of a hash is taken for true.
    spoil(wheel, {"a.py": b"VALUE = 'other'\n"})
    manifest["wheels"][wheel.name]["sha256"] = sha256(wheel)
    file.write_text(json.dumps(manifest))
    (filled.directory / "pylock.toml").unlink()
    filled.check().raise_if_any()
    (unsound,) = filled.check(contents=True).unsound
    assert "hash / size of a.py" in unsound.fault


def test_a_file_where_another_wheel_has_a_directory(filled: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "one", requires=["other"])
    wheel = make_wheel(uv_index.directory, "other")
    lines = f"one.py/x.py,,\nother.py,,\n{OTHER}/METADATA,,\n{OTHER}/WHEEL,,\n{OTHER}/RECORD,,\n"
    spoil(wheel, {"one.py/x.py": b"", f"{OTHER}/RECORD": lines.encode()})
    with pytest.raises(WheelError, match=r"'one\.py' is a directory here and a file in one-1\.0"):
        filled.add(Wanted.of(["one"]), targets=[TARGET], trusted=["other"])
    for file in uv_index.directory.glob("o*.whl"):
        shutil.copy(file, filled.directory)
    assert "'one.py' is a directory here" in refused(filled, "one").message


@pytest.mark.slow
def test_wheels_that_clash_are_refused_again(house: Wheelhouse, uv_index: Index) -> None:
    with_files(make_wheel(uv_index.directory, "aaa"), {"x": b""})
    with_files(make_wheel(uv_index.directory, "bbb"), {"x/y.py": b""})
    for name in ("aaa", "bbb"):
        house.add(Wanted.of([name]), targets=[TARGET])
    for _ in range(2):
        with pytest.raises(WheelError, match="is not sound"):
            house.add(Wanted.of(["aaa", "bbb"]), targets=[TARGET])
    house.check().raise_if_any()
    # A version that did not look recorded them together.
    manifest = json.loads((house.directory / "wheelmount.json").read_text())
    manifest["requests"][0]["wheels"] += manifest["requests"][1]["wheels"]
    del manifest["requests"][0]["hashes"]
    (house.directory / "wheelmount.json").write_text(json.dumps(manifest))
    assert house.check(Wanted.of(["aaa", "bbb"]), targets=[TARGET]).unsound


OTHER = "other-1.0.dist-info"


@pytest.mark.slow
def test_contents_that_were_published_wrong(filled: Wheelhouse, uv_index: Index) -> None:
    wheel = spoil(make_wheel(uv_index.directory, "odd"), {"odd.py": b"VALUE = 'other'\n"})
    with pytest.raises(WheelError, match=r"hash / size of odd\.py didn't match RECORD") as caught:
        filled.add(Wanted.of(["odd"]), targets=[TARGET])
    assert "--trust odd" in (caught.value.hint or "")
    shutil.copy(wheel, filled.directory)  # by hand: nobody has looked into it yet
    error = refused(filled, "odd")
    assert f"{wheel.name} (hash / size of odd.py didn't match RECORD)" in error.message
    assert "--trust" in (error.hint or "")
    filled.add(Wanted.of(["odd"]), targets=[TARGET], trusted=["odd"])
    filled.check().raise_if_any()
    (filled.directory / wheel.name).write_bytes(b"")
    assert wheel.name in refused(filled, "odd").message


def test_what_was_there_before_it_was_looked_into(filled: Wheelhouse, uv_index: Index) -> None:
    wheel = spoil(make_wheel(uv_index.directory, "x"), {"more.py": b""})
    shutil.copy(wheel, filled.directory)
    with pytest.raises(WheelError, match=r"not sound: more\.py is not mentioned"):
        filled.add(Wanted.of(["x"]), targets=[TARGET])
    manifest = filled.directory / "wheelmount.json"
    manifest.write_text(manifest.read_text().replace(',\n   "verified": true', ""))
    filled.add(Wanted.of(["a"]), targets=[TARGET])
    assert manifest.read_text().count('"verified": true') == 3


@pytest.mark.parametrize("how", ["url", "links"])
def test_a_wheel_that_was_built_anew(house: Wheelhouse, tmp_path: Path, how: str) -> None:
    wheel = make_wheel(tmp_path / "near", "own")
    times = wheel.stat()
    needs = tmp_path / "needs.txt"
    needs.write_text(
        f"own @ {wheel.as_uri()}\n" if how == "url" else "--no-index\n--find-links near\nown\n"
    )
    house.add(Wanted.of([], [needs]), targets=[TARGET])
    make_wheel(wheel.parent, "own", module=b"VALUE = 'new'\n")
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert house.add(Wanted.of([], [needs]), targets=[TARGET]).fetched == (wheel.name,)
    assert (house.directory / wheel.name).read_bytes() == wheel.read_bytes()
    house.check().raise_if_any()
    make_wheel(house.directory, "own")
    assert "another build than the one that was locked" in refused(house).message


@pytest.mark.slow
def test_check_uses_no_network_settings_or_cache(
    filled: Wheelhouse, uv_index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = make_wheel(uv_index.directory, "d")
    links = make_wheel(tmp_path / "links", "d").parent
    (tmp_path / "constraint.txt").write_text("a<1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CONSTRAINT", str(tmp_path / "constraint.txt"))
    monkeypatch.delenv("UV_NO_CONFIG")
    Path("uv.toml").write_text(f'no-index = false\noffline = false\nfind-links = ["{links}"]\n')
    uv_index.requests.clear()
    filled.check(Wanted.of(["a"]), targets=[TARGET]).raise_if_any()
    assert "d (wanted by you)" in refused(filled, "d").message
    (tmp_path / "needs.txt").write_text(f"d @ {uv_index.file_url(wheel)}\n")
    assert "d (wanted by needs.txt)" in refused(filled, files=(tmp_path / "needs.txt",)).message
    assert uv_index.requests == []
    assert not (tmp_path / "cache").exists()


def test_bad_input(filled: Wheelhouse, tmp_path: Path) -> None:
    assert type(refused(filled, "--pre")) is InputError
    assert type(refused(filled, files=(tmp_path / "no.txt",))) is SourceError
    assert type(refused(Wheelhouse(tmp_path / "no"), "a")) is SourceError
    (tmp_path / "empty").mkdir()
    assert "does not say" in refused(Wheelhouse(tmp_path / "empty")).message


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "requests": 1}']
)
def test_a_spoilt_manifest(filled: Wheelhouse, text: str) -> None:
    file = filled.directory / "wheelmount.json"
    file.write_text(text)
    error = refused(filled)
    assert type(error) is WheelError
    assert str(file) in error.message
    file.unlink()  # as the hint says
    assert filled.add(Wanted.of(["a"]), targets=[TARGET]).fetched == ()
    filled.check().raise_if_any()


@pytest.mark.slow
def test_several_targets(house: Wheelhouse, uv_index: Index) -> None:
    for tag in ("cp311-cp311-manylinux_2_17_x86_64", "cp312-cp312-musllinux_1_1_aarch64"):
        make_wheel(uv_index.directory, "a", tag=tag, requires=["b"])
    make_wheel(uv_index.directory, "b")
    targets = [TARGET, Target.parse("3.12", "musllinux_1_2_aarch64")]
    report = house.add(Wanted.of(["a"]), targets=targets)
    assert len(report.wheels) == len(report.fetched) == len(house.wheels()) == 3
    house.check().raise_if_any()
    house.check(Wanted.of(["a"]), targets=targets).raise_if_any()
    gaps = house.check(Wanted.of(["a"]), targets=[*targets, ARM]).gaps
    assert [(gap.target, str(gap.missing[0])) for gap in gaps] == [(ARM, "a (wanted by you)")]


@pytest.mark.slow
def test_targets_that_are_no_interpreter_of_this_machine(
    house: Wheelhouse, uv_index: Index
) -> None:
    # The newest has no wheel for either; the markers are those of the target, too.
    make_wheel(uv_index.directory, "a", "2.0", tag="cp314-cp314-manylinux_2_17_x86_64")
    requires = ["b; implementation_name == 'pypy'", "c; implementation_name == 'cpython'"]
    for tag in ("cp314-cp314t", "pp311-pypy311_pp73"):
        make_wheel(uv_index.directory, "a", tag=f"{tag}-manylinux_2_17_x86_64", requires=requires)
    make_wheel(uv_index.directory, "b")
    make_wheel(uv_index.directory, "c")
    wanted = Wanted.of(["a"])
    expected = {
        "3.14t": ("a-1.0-cp314-cp314t-manylinux_2_17_x86_64.whl", "c-1.0-py3-none-any.whl"),
        "pypy3.11": (
            "a-1.0-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl",
            "b-1.0-py3-none-any.whl",
        ),
        "3.14": ("a-2.0-cp314-cp314-manylinux_2_17_x86_64.whl",),
    }
    for version, wheels in expected.items():
        target = Target.parse(version, "x86_64")
        assert house.add(wanted, targets=[target]).wheels == wheels
        house.check(wanted, targets=[target]).raise_if_any()
    house.check().raise_if_any()
    house.directory.joinpath(expected["pypy3.11"][1]).unlink()
    (gap,) = house.check().gaps
    assert gap.target.python_version == "pypy3.11"
    assert [str(one) for one in gap.missing] == ["b (wanted by a 1.0)"]


def state(house: Wheelhouse) -> dict[str, int]:
    files = house.directory.rglob("*")
    return {str(file): file.lstat().st_mtime_ns for file in files if ".lock" not in file.name}


def test_what_is_there_is_not_asked_for_again(filled: Wheelhouse, uv_index: Index) -> None:
    before = state(filled)
    make_wheel(uv_index.directory, "c", "3.0")
    uv_index.requests.clear()
    report = filled.add(Wanted.of(["a"]), targets=[TARGET])
    assert (len(report.wheels), report.fetched, report.size) == (3, (), filled.size())
    assert uv_index.requests == []
    assert state(filled) == before
    with Index(uv_index.directory) as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", other.url)
        filled.add(Wanted.of(["a"]), targets=[TARGET], upgrade=True)
    assert names(filled) == ["a-1.0", "b-1.0", "c-2.5", "c-3.0"]


@pytest.mark.slow
def test_another_index_is_asked(
    house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_NO_INDEX", "1")
    for name, version in (("one", "1.0"), ("two", "2.0")):
        make_wheel(tmp_path / name, "foo", version)
        monkeypatch.setenv("UV_FIND_LINKS", name)
        report = house.add(Wanted.of(["foo"]), targets=[TARGET])
        assert report.wheels == (f"foo-{version}-py3-none-any.whl",)


@pytest.mark.slow
def test_a_wheel_of_the_same_name_from_another_url_is_not_taken(
    house: Wheelhouse, index: Index, tmp_path: Path
) -> None:
    wheel = make_wheel(index.directory, "foo")
    (tmp_path / "other").mkdir()
    with Index(tmp_path / "other") as other:
        namesake = make_wheel(other.directory, "foo", module=b"VALUE = 'other'\n")
        for _ in range(2):
            for server, file in ((index, wheel), (other, namesake)):
                wanted = Wanted.of([f"foo @ {server.file_url(file)}"])
                house.add(wanted, targets=[TARGET])
                assert sha256(house.directory / file.name) == sha256(file)
                server.requests.clear()
                house.add(wanted, targets=[TARGET])
                assert server.requests == []


@pytest.mark.slow
def test_what_changed_is_asked_for_again(
    filled: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.txt"
    limits.write_text("a<2\n")
    wanted = Wanted.of(["a"], constraints=[limits])
    filled.add(wanted, targets=[TARGET])
    uv_index.requests.clear()
    filled.add(wanted, targets=[TARGET])
    assert uv_index.requests == []
    make_wheel(uv_index.directory, "d")
    changes: dict[str, Callable[[], object]] = {
        "another file": lambda: limits.write_text("a<3\n-c more.txt\n"),
        "which names others": lambda: (tmp_path / "more.txt").write_text("d\n"),
        "touched": lambda: os.utime(filled.wheels()[0]),
        "gone": lambda: filled.wheels()[0].unlink(),
    }
    (tmp_path / "more.txt").write_text("")
    lock = filled.directory / "pylock.toml"
    for what, change in changes.items():
        change()
        lock.unlink()
        filled.add(wanted, targets=[TARGET])
        assert lock.exists(), what


@pytest.mark.slow
def test_prune(filled: Wheelhouse, uv_index: Index) -> None:
    make_wheel(uv_index.directory, "c", "3.0")
    with Index(uv_index.directory) as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", other.url)
        filled.add(Wanted.of(["a"]), targets=[TARGET], upgrade=True)
        filled.add(Wanted.of(["c<3"]), targets=[TARGET])
        make_wheel(filled.directory, "by_hand")
        (filled.directory / "x-1-py3-none-any.whl.part").touch()
        filled.add(Wanted.of(["a"]), targets=[TARGET], prune=True)
        assert names(filled) == ["a-1.0", "b-1.0", "c-2.5", "c-3.0"]
        filled.add(Wanted.of(["c<3"]), targets=[ARM])
    filled.check().raise_if_any()
    assert not list(filled.directory.glob("*.part"))
    assert {path.name for path in (filled.directory / "simple").iterdir() if path.is_dir()} == set(
        "abc"
    )


def test_prune_knows_what_it_does(filled: Wheelhouse) -> None:
    manifest = filled.directory / "wheelmount.json"
    data = json.loads(manifest.read_text())
    del data["requests"][0]["wheels"]  # as it was written once
    manifest.write_text(json.dumps(data))
    with pytest.raises(WheelError, match="does not say which wheels"):
        filled.add(Wanted.of(["b"]), targets=[TARGET], prune=True)
    assert names(filled) == ["a-1.0", "b-1.0", "c-2.5"]
    filled.add(Wanted.of(["a"]), targets=[TARGET], prune=True)


def test_a_directory_that_is_a_file(house: Wheelhouse) -> None:
    house.directory.write_text("")
    with pytest.raises(SourceError):
        house.add(Wanted.of(["a"]), targets=[TARGET])


@pytest.mark.slow
def test_two_at_once(uv_index: Index, house: Wheelhouse) -> None:
    wanted = ["d", "e", "f", "g"]
    make_wheel(uv_index.directory, "c", padding=5000)
    for name in wanted:
        make_wheel(uv_index.directory, name, requires=["c"])
    threads = [
        threading.Thread(
            target=Wheelhouse(house.directory).add,
            args=(Wanted.of([name]),),
            kwargs={"targets": [TARGET]},
        )
        for name in wanted
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert names(house) == ["c-1.0", "d-1.0", "e-1.0", "f-1.0", "g-1.0"]
    manifest = json.loads((house.directory / "wheelmount.json").read_text())
    assert sorted(request["requirements"] for request in manifest["requests"]) == [
        [n] for n in wanted
    ]
    house.check().raise_if_any()


@pytest.mark.slow
def test_what_was_not_written_to_is_not_read_again(uv_index: Index, tmp_path: Path) -> None:
    size = 64 << 20
    make_wheel(uv_index.directory, "large", module=bytes(size))
    house = Wheelhouse(tmp_path / "house")
    house.add(Wanted.of(["large"]), targets=[TARGET])

    def read(*, contents: bool) -> int:
        """Bytes that were read by this process and those that it waited for."""
        counted = [int(Path("/proc/self/io").read_text().split()[1])]
        house.check(contents=contents).raise_if_any()
        counted.append(int(Path("/proc/self/io").read_text().split()[1]))
        return counted[1] - counted[0]

    assert read(contents=False) < size / 2
    assert read(contents=True) > size
    copied = Wheelhouse(shutil.copytree(house.directory, tmp_path / "copied"))
    (wheel,) = copied.wheels()
    times = wheel.stat()
    wheel.write_bytes(wheel.read_bytes().replace(b"Name: large", b"Name: lArge"))
    os.utime(wheel, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert copied.check().unsound


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_files_of_the_user_in_the_same_directory_stay(uv_index: Index, house: Wheelhouse) -> None:
    make_wheel(uv_index.directory, "a")
    for name in (
        *("requests/api.py", "requests/sub/x.py", "requests/.hidden.txt.12"),
        *(".app.log.1", ".notes.2024", ".own.json.3", ".index.html.4"),
    ):
        file = house.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    before = contents(house.directory)
    house.add(Wanted.of(["a"]), targets=[TARGET])
    (house.directory / "simple" / "own").mkdir()
    for name in ("simple/own/index.json", "simple/notes.txt"):
        (house.directory / name).write_text("{}")
        before[name] = b"{}"
    house.add(Wanted.of(["a"]), targets=[ARM], prune=True)
    after = contents(house.directory)
    assert {name: after.get(name) for name in before} == before
    house.check().raise_if_any()


@pytest.mark.parametrize("name", ["views.py", "index.html", "index.json", "a/index.html"])
def test_a_directory_simple_of_the_user_is_refused(
    name: str, uv_index: Index, house: Wheelhouse
) -> None:
    make_wheel(uv_index.directory, "a")
    file = house.directory / "simple" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(SourceError, match="simple is not an index") as caught:
        house.add(Wanted.of(["a"]), targets=[TARGET])
    assert caught.value.hint
    assert contents(house.directory / "simple") == {name: b"mine"}
    assert not house.wheels()


def test_a_path_that_is_not_utf8(uv_index: Index, house: Wheelhouse, tmp_path: Path) -> None:
    wheel = make_wheel(uv_index.directory, "a")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    lock = lock_of(package_of(wheel, uv_index.file_url(wheel)))
    (folder / "pylock.toml").write_text(tomli_w.dumps(dict(lock.to_dict())))
    for _ in range(2):
        report = house.add(Wanted.of(files=[folder / "pylock.toml"]), targets=[TARGET])
    assert "\\udcff/pylock.toml" in (house.directory / report.requests[0]).read_text()
    house.add(Wanted.of(["a"]), targets=[TARGET])
    house.check().raise_if_any()
