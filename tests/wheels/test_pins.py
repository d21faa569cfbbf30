"""What is pinned to a hash is compared wherever a wheel is brought in, checked or installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import tomli_w

from tests.conftest import Cli
from wheelmount.errors import InputError, WheelError
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import TARGET, Index, lock_of, make_wheel, package_of, sha256

ZEROS = "0" * 64


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


@pytest.fixture
def wheel(uv_index: Index) -> Path:
    return make_wheel(uv_index.directory, "a")


def listed(tmp_path: Path, *lines: str, name: str = "r.txt") -> Wanted:
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return Wanted.of(files=[tmp_path / name])


def refused(house: Wheelhouse, wanted: Wanted) -> str:
    with pytest.raises(WheelError) as caught:
        house.add(wanted, targets=[TARGET])
    assert caught.value.hint
    assert house.wheels() == []
    return caught.value.message


def test_a_pinned_wheel_arrives_and_the_lock_says_what_was_pinned(
    wheel: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    wanted = listed(tmp_path, "--require-hashes", "a==1.0 \\", f"  --hash=sha256:{sha256(wheel)}")
    house.add(wanted, targets=[TARGET])
    assert f"sha256:{sha256(wheel)}" in (house.directory / "pylock.toml").read_text()
    house.check(wanted, targets=[TARGET]).raise_if_any()
    house.check().raise_if_any()


@pytest.mark.parametrize(
    "pin", [f'"sha256:{ZEROS}"', f"'sha256:{ZEROS}'", f"SHA256:{ZEROS}", "sha256:xyz", "sha256:"]
)
def test_a_pin_in_any_spelling_is_compared(
    pin: str, wheel: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    assert "no file of sha256:" in refused(house, listed(tmp_path, f"a==1.0 --hash={pin}"))
    right = pin.replace(ZEROS, sha256(wheel))
    if right != pin:
        house.add(listed(tmp_path, f"a==1.0 --hash={right}"), targets=[TARGET])


@pytest.mark.parametrize(
    "where", ["file", "nested", "constraint", "variable", "fragment", "marker"]
)
def test_another_hash_is_refused_by_download(
    where: str,
    wheel: Path,
    house: Wheelhouse,
    tmp_path: Path,
    uv_index: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = f"a==1.0 --hash=sha256:{ZEROS}"
    if where == "nested":
        listed(tmp_path, pin, name="inner.txt")
        wanted = listed(tmp_path, "-r inner.txt")
    elif where == "constraint":
        listed(tmp_path, pin, name="limits.txt")
        wanted = Wanted.of(["a"], constraints=[tmp_path / "limits.txt"])
    elif where == "variable":
        listed(tmp_path, pin, name="limits.txt")
        monkeypatch.setenv("UV_CONSTRAINT", str(tmp_path / "limits.txt"))
        wanted = Wanted.of(["a"])
    elif where == "fragment":
        wanted = Wanted.of([f"a @ {uv_index.file_url(wheel)}#sha256={ZEROS}"])
    elif where == "marker":
        right = f"a==1.0; python_version < '3' --hash=sha256:{sha256(wheel)}"
        wanted = listed(tmp_path, right, f"a==1.0; python_version > '3' --hash=sha256:{ZEROS}")
    else:
        wanted = listed(tmp_path, pin)
    assert ZEROS in refused(house, wanted)


def test_another_hash_is_refused_by_check(wheel: Path, house: Wheelhouse, tmp_path: Path) -> None:
    house.add(Wanted.of(["a"]), targets=[TARGET])
    wanted = listed(tmp_path, f"a --hash=sha256:{ZEROS}")
    (unsound,) = house.check(wanted, targets=[TARGET]).unsound
    assert unsound.wheel == wheel.name
    assert ZEROS in unsound.fault


def test_a_pinned_wheel_that_another_request_replaced_is_found(
    wheel: Path, house: Wheelhouse, tmp_path: Path, uv_index: Index
) -> None:
    wanted = listed(tmp_path, f"a --hash=sha256:{sha256(wheel)}")
    house.add(wanted, targets=[TARGET])
    make_wheel(uv_index.directory, "a", padding=10)
    house.add(Wanted.of(["a"]), targets=[TARGET])
    assert house.check().unsound
    with pytest.raises(WheelError):
        house.add(wanted, targets=[TARGET])


@pytest.mark.slow
def test_another_hash_is_refused_by_install(
    wheel: Path, tmp_path: Path, cli: Cli, workplace: Path
) -> None:
    listed(tmp_path, f"a==1.0 --hash=sha256:{ZEROS}")
    done = cli("install", "-r", tmp_path / "r.txt", "--venv", tmp_path / "env")
    assert done.returncode == 65
    assert ZEROS in done.stderr
    assert not list(tmp_path.glob("env*"))


def test_a_lock_that_is_checked_has_its_hashes_compared(
    wheel: Path, house: Wheelhouse, tmp_path: Path, uv_index: Index
) -> None:
    house.add(Wanted.of(["a"]), targets=[TARGET])
    other = lock_of(package_of(wheel, uv_index.file_url(wheel), digest=ZEROS))
    (tmp_path / "pylock.toml").write_text(tomli_w.dumps(dict(other.to_dict())))
    findings = house.check(Wanted.of(files=[tmp_path / "pylock.toml"]), targets=[TARGET])
    assert [one.wheel for one in findings.unsound] == [wheel.name]


@pytest.mark.parametrize("place", ["file", "option", "variable"])
def test_required_hashes_of_all_that_is_needed(
    place: str,
    wheel: Path,
    house: Wheelhouse,
    tmp_path: Path,
    uv_index: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    top = make_wheel(uv_index.directory, "top", requires=["a"])
    lines = [f"top==1.0 --hash=sha256:{sha256(top)}"]
    wanted = listed(tmp_path, *(["--require-hashes"] if place == "file" else []), *lines)
    if place == "option":
        wanted = Wanted.of(files=wanted.files, require_hashes=True)
    if place == "variable":
        monkeypatch.setenv("UV_REQUIRE_HASHES", "1")
    assert "a==1.0 is not pinned" in refused(house, wanted)
    lines.append(f"a==1.0 --hash=sha256:{sha256(wheel)}")
    listed(tmp_path, *(["--require-hashes"] if place == "file" else []), *lines)
    house.add(wanted, targets=[TARGET])


def test_required_hashes_of_all_requests(
    wheel: Path,
    house: Wheelhouse,
    tmp_path: Path,
    uv_index: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house.add(listed(tmp_path, f"a==1.0 --hash=sha256:{sha256(wheel)}"), targets=[TARGET])
    lock = lock_of(package_of(wheel, uv_index.file_url(wheel)))
    (tmp_path / "pylock.toml").write_text(tomli_w.dumps(dict(lock.to_dict())))
    house.add(Wanted.of(files=[tmp_path / "pylock.toml"]), targets=[TARGET])
    monkeypatch.setenv("UV_REQUIRE_HASHES", "1")
    house.check().raise_if_any()
    monkeypatch.delenv("UV_REQUIRE_HASHES")
    house.add(Wanted.of(["a"]), targets=[TARGET])
    house.check().raise_if_any()
    monkeypatch.setenv("UV_REQUIRE_HASHES", "1")
    (unsound,) = house.check().unsound
    assert (unsound.wheel, unsound.fault) == (wheel.name, "it is not pinned by a hash")


def test_required_hashes_want_a_version(wheel: Path, house: Wheelhouse, tmp_path: Path) -> None:
    wanted = listed(tmp_path, "--require-hashes", f"a>=1 --hash=sha256:{sha256(wheel)}")
    assert "a==1.0 is not pinned" in refused(house, wanted)


def test_of_several_files_the_pinned_one_is_chosen(
    wheel: Path, house: Wheelhouse, tmp_path: Path, uv_index: Index
) -> None:
    make_wheel(uv_index.directory, "a", tag="cp311-cp311-manylinux_2_17_x86_64")
    house.add(listed(tmp_path, f"a --hash=sha256:{sha256(wheel)}"), targets=[TARGET])
    assert [one.name for one in house.wheels()] == [wheel.name]


@pytest.mark.parametrize("right", [True, False])
def test_pins_by_another_algorithm(
    right: bool, wheel: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    digest = hashlib.sha512(wheel.read_bytes() if right else b"").hexdigest()
    wanted = listed(tmp_path, f"a --hash=sha512:{digest}")
    if right:
        house.add(wanted, targets=[TARGET])
        house.check().raise_if_any()
    else:
        assert digest in refused(house, wanted)


def test_an_unknown_algorithm_is_no_pin(wheel: Path, house: Wheelhouse, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="md5"):
        house.add(listed(tmp_path, "a --hash=md5:00"), targets=[TARGET])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "variable", "setting"])
def test_pins_of_overrides_are_compared_and_replace_others(
    wheel: Path,
    house: Wheelhouse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    url = f"a @ {wheel.as_uri()}#sha256="
    over = tmp_path / "over.txt"
    (tmp_path / "r.txt").write_text(f"a==9 --hash=sha256:{'1' * 64}\n")

    def wanted(digest: str) -> Wanted:
        over.write_text(f"a==1.0 --hash=sha256:{digest}\n")
        if how == "setting":
            monkeypatch.delenv("UV_NO_CONFIG", raising=False)
            table = {"override-dependencies": [f"{url}{digest}"]}
            (tmp_path / "uv.toml").write_text(tomli_w.dumps(table))
        elif how == "variable":
            monkeypatch.setenv("UV_OVERRIDE", str(over))
        files = [over] if how == "file" else []
        return Wanted.of(files=[tmp_path / "r.txt"], override_files=files)

    assert ZEROS in refused(house, wanted(ZEROS))
    house.add(wanted(sha256(wheel)), targets=[TARGET])
    house.check().raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["dependencies", "extra", "group"])
def test_pins_of_a_project_are_compared(
    wheel: Path, house: Wheelhouse, tmp_path: Path, where: str
) -> None:
    def wanted(digest: str) -> Wanted:
        lines = [f"a @ {wheel.as_uri()}#sha256={digest}"]
        project: dict[str, object] = {"name": "own", "version": "1"}
        if where == "dependencies":
            project["dependencies"] = lines
        project["optional-dependencies"] = {"more": lines if where == "extra" else []}
        groups = {"more": lines if where == "group" else []}
        table = {"project": project, "dependency-groups": groups}
        (tmp_path / "pyproject.toml").write_text(tomli_w.dumps(table))
        extras = ["more"] if where == "extra" else []
        groups_of = ["more"] if where == "group" else []
        return Wanted.of(files=[tmp_path / "pyproject.toml"], extras=extras, groups=groups_of)

    assert ZEROS in refused(house, wanted(ZEROS))
    house.add(wanted(sha256(wheel)), targets=[TARGET])
    house.check(wanted(sha256(wheel)), targets=[TARGET]).raise_if_any()
