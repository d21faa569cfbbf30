from __future__ import annotations

import socket
from pathlib import Path

import pytest

from wheelmount.errors import (
    InputError,
    ResolveError,
    SourceError,
    UnavailableError,
    WheelmountError,
)
from wheelmount.wheels.lockfile import chosen_wheels, parse_lock
from wheelmount.wheels.resolve import resolve
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted

from .support import ARM, TARGET, Index, make_wheel


def names(
    index: Index, *requirements: str, target: Target = TARGET, files: tuple[Path, ...] = ()
) -> list[str]:
    output = index.directory.parent / "pylock.toml"
    lock = resolve(Wanted.of(requirements, files), target=target, output=output)
    assert parse_lock(output.read_text()).packages == lock.packages
    return [wheel.filename for wheel in chosen_wheels(lock, target)]


def refused(
    *requirements: str, target: Target = TARGET, files: tuple[Path, ...] = ()
) -> WheelmountError:
    with pytest.raises(WheelmountError) as caught:
        resolve(Wanted.of(requirements, files), target=target, output=Path("pylock.toml"))
    assert caught.value.hint
    assert "\n" not in caught.value.message.replace("\n  And because", "") + caught.value.hint
    assert list(Path().glob("pylock*")) == []
    return caught.value


def test_dependencies_for_a_target(uv_index: Index) -> None:
    make_wheel(uv_index.directory, "a", requires=["b>=1", "c; platform_machine == 'aarch64'"])
    make_wheel(uv_index.directory, "b", "0.9")
    make_wheel(uv_index.directory, "b", "1.1", tag="cp311-cp311-manylinux_2_17_x86_64")
    make_wheel(uv_index.directory, "b", "1.1", tag="cp312-cp312-manylinux_2_17_aarch64")
    make_wheel(uv_index.directory, "c")
    assert names(uv_index, "a") == [
        "a-1.0-py3-none-any.whl",
        "b-1.1-cp311-cp311-manylinux_2_17_x86_64.whl",
    ]
    assert names(uv_index, "a", target=ARM) == [
        "a-1.0-py3-none-any.whl",
        "b-1.1-cp312-cp312-manylinux_2_17_aarch64.whl",
        "c-1.0-py3-none-any.whl",
    ]


def test_an_earlier_lock_has_no_say(uv_index: Index) -> None:
    make_wheel(uv_index.directory, "a", "1.0")
    assert names(uv_index, "a") == ["a-1.0-py3-none-any.whl"]
    make_wheel(uv_index.directory, "a", "2.0")
    # uv keeps an index's answer for minutes, as HTTP lets it: another address is another answer.
    with Index(uv_index.directory) as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", other.url)
        assert names(uv_index, "a") == ["a-2.0-py3-none-any.whl"]


def test_files_of_requirements(uv_index: Index, tmp_path: Path) -> None:
    for name in "abc":
        make_wheel(uv_index.directory, name)
    file = tmp_path / "-r odd name.txt"
    file.write_text("a  # one\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("b\n")
    assert [name[0] for name in names(uv_index, "c", files=(Path(file.name),))] == ["a", "b", "c"]


def test_a_wheel_by_path_and_by_url(uv_index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "near", "a", requires=["b"])
    other = make_wheel(uv_index.directory, "b")
    url = uv_index.file_url(other)
    assert names(uv_index, f"a @ {wheel.as_uri()}", f"b @ {url}") == [wheel.name, other.name]


def test_unknown_package(uv_index: Index) -> None:
    error = refused("no-such-thing")
    assert type(error) is ResolveError
    assert error.message == "no package named no-such-thing in the index"


def test_unknown_dependency(uv_index: Index) -> None:
    make_wheel(uv_index.directory, "a", requires=["no-such-thing"])
    message = refused("a").message
    assert message.startswith("no package named no-such-thing in the index (wanted by a")


def test_only_a_source_distribution(uv_index: Index) -> None:
    (uv_index.directory / "a-1.0.tar.gz").write_bytes(b"")
    error = refused("a", target=ARM)
    assert type(error) is ResolveError
    assert error.message == f"no wheel of a for {ARM}: only a source distribution exists"


def test_wheels_for_other_targets(uv_index: Index) -> None:
    make_wheel(uv_index.directory, "a", tag="cp311-cp311-manylinux_2_17_x86_64")
    error = refused("a", target=ARM)
    assert type(error) is ResolveError
    assert error.message.startswith(f"no wheel of a for {ARM}: ")
    assert "cp311" in error.message + (error.hint or "")
    make_wheel(uv_index.directory, "b", tag="cp312-cp312-manylinux_2_40_aarch64")
    assert refused("b", target=ARM).message.startswith(f"no wheel of b for {ARM}: ")


def test_conflict(uv_index: Index) -> None:
    make_wheel(uv_index.directory, "a", requires=["b<2"])
    make_wheel(uv_index.directory, "b", "2.0")
    make_wheel(uv_index.directory, "b", "1.0")
    error = refused("a", "b>=2")
    assert type(error) is ResolveError
    assert "no solution" in error.message
    assert "b<2" in error.message
    assert "b>=2" in error.message


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
        error = refused("a")
    assert type(error) is UnavailableError
    assert "UV_DEFAULT_INDEX" in (error.hint or "")


def test_uv_told_to_stay_offline(uv_index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(uv_index.directory, "a")
    monkeypatch.setenv("UV_OFFLINE", "1")
    error = refused("a")
    assert type(error) is UnavailableError
    assert error.hint == "unset UV_OFFLINE"


def test_credentials_refused(uv_index: Index) -> None:
    uv_index.password = "secret"  # noqa: S105
    error = refused("a")
    assert type(error) is UnavailableError
    assert uv_index.url in error.message
    assert "refuses" in error.message


def test_bad_input(uv_index: Index, tmp_path: Path) -> None:
    assert type(refused()) is InputError
    assert type(refused("--pre")) is InputError
    assert type(refused(files=(tmp_path / "no.txt",))) is SourceError
    (tmp_path / "bad.txt").write_text("a=1\n")
    error = refused(files=(tmp_path / "bad.txt",))
    assert type(error) is InputError
    assert "bad.txt" in error.message
    (tmp_path / "outer.txt").write_text("-r inner.txt\n")
    error = refused(files=(tmp_path / "outer.txt",))
    assert type(error) is SourceError
    assert "inner.txt" in error.message


def test_no_directory(uv_index: Index, tmp_path: Path) -> None:
    make_wheel(uv_index.directory, "a")
    with pytest.raises(WheelmountError) as caught:
        resolve(Wanted.of(["a"]), target=TARGET, output=tmp_path / "no" / "pylock.toml")
    assert type(caught.value) is SourceError
