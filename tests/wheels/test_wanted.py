from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import uv

from wheelmount.errors import InputError, ResolveError, SourceError, WheelmountError
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import ARM, TARGET, Index, make_wheel

PROJECT = """
[project]
name = "mine"
version = "1"
requires-python = ">=3.10"
dependencies = ["a"]
[project.optional-dependencies]
more = ["b"]
[dependency-groups]
test = ["c"]
wide = [{include-group = "test"}, "d"]
"""


@pytest.fixture
def project(uv_index: Index, tmp_path: Path) -> Path:
    """The ``pyproject.toml`` of a project; the index has two versions of all it may want."""
    for name in "abcd":
        for version in ("1.0", "2.0"):
            make_wheel(uv_index.directory, name, version)
    file = tmp_path / "a project" / "pyproject.toml"
    file.parent.mkdir()
    file.write_text(PROJECT)
    return file


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


def lock(project: Path, *arguments: str) -> Path:
    subprocess.run(
        [uv.find_uv_bin(), "lock", "-q", *arguments], cwd=project.parent, check=True, timeout=60
    )
    return project.with_name("uv.lock")


def names(house: Wheelhouse) -> list[str]:
    return [wheel.name.split("-py3")[0] for wheel in house.wheels()]


def refused(**given: list[Path] | list[str]) -> WheelmountError:
    with pytest.raises(WheelmountError) as caught:
        Wanted.of(**given)  # type: ignore[arg-type]
    assert caught.value.hint
    return caught.value


def test_constraints(project: Path, house: Wheelhouse, tmp_path: Path) -> None:
    (tmp_path / "limits.txt").write_text("a<2\nb<1\n")
    wanted = Wanted.of(["a"], constraints=[Path("limits.txt")])
    house.add(wanted, targets=[TARGET])
    assert names(house) == ["a-1.0"]
    house.check(wanted, targets=[TARGET]).raise_if_any()
    (tmp_path / "limits.txt").write_text("a>=2\n")
    assert house.check(wanted, targets=[TARGET]).gaps
    house.check().raise_if_any()


@pytest.mark.parametrize(
    ("extras", "groups", "expected"),
    [
        ([], [], ["a-2.0"]),
        (["More"], [], ["a-2.0", "b-2.0"]),
        ([], ["test"], ["a-2.0", "c-2.0"]),
        (["more"], ["wide"], ["a-2.0", "b-2.0", "c-2.0", "d-2.0"]),
    ],
)
def test_a_project(
    project: Path, house: Wheelhouse, extras: list[str], groups: list[str], expected: list[str]
) -> None:
    wanted = Wanted.of(files=[project], extras=extras, groups=groups)
    house.add(wanted, targets=[TARGET])
    assert names(house) == expected
    house.check(wanted, targets=[TARGET]).raise_if_any()
    project.unlink()
    house.check().raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "groups", "expected"),
    [([], [], ["a-1.0"]), (["more"], ["wide"], ["a-1.0", "b-1.0", "c-1.0", "d-1.0"])],
)
def test_a_lock_of_uv(
    project: Path, house: Wheelhouse, extras: list[str], groups: list[str], expected: list[str]
) -> None:
    file = lock(project, "--resolution", "lowest")
    wanted = Wanted.of(files=[file], extras=extras, groups=groups)
    house.add(wanted, targets=[TARGET, ARM])
    assert names(house) == expected
    house.check(wanted, targets=[TARGET]).raise_if_any()
    house.check().raise_if_any()
    house.wheels()[0].unlink()
    (gap,) = house.check(wanted, targets=[TARGET]).gaps
    assert [str(one) for one in gap.missing] == ["a==1.0 (wanted by pylock.toml)"]


def test_a_pylock(project: Path, house: Wheelhouse, tmp_path: Path) -> None:
    house.add(Wanted.of(["a<2", "b"]), targets=[TARGET])
    file = tmp_path / "pylock.other.toml"
    file.write_bytes((house.directory / "pylock.toml").read_bytes())
    other = Wheelhouse(tmp_path / "other")
    other.add(Wanted.of(files=[file]), targets=[TARGET])
    assert names(other) == ["a-1.0", "b-2.0"]
    assert (other.directory / "pylock.toml").read_bytes() == file.read_bytes()
    other.check().raise_if_any()


def test_a_lock_that_does_not_fit(project: Path, house: Wheelhouse) -> None:
    make_wheel(project.parent, "x", tag="cp312-cp312-manylinux_2_17_aarch64")
    file = project.with_name("pylock.toml")
    file.write_text(
        'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "x"\nversion = "1.0"\n'
        'wheels = [{ path = "x-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", hashes = '
        '{ sha256 = "00" } }]\n'
    )
    with pytest.raises(InputError, match=r"has a file beside it: x-1\.0-"):
        house.add(Wanted.of(files=[file]), targets=[TARGET])
    file.write_text(file.read_text().replace('path = "', 'url = "https://127.0.0.1/'))
    with pytest.raises(ResolveError, match="'x'"):
        house.add(Wanted.of(files=[file]), targets=[TARGET])
    broken = lock(project)
    broken.write_text("version = [")
    with pytest.raises(InputError) as caught:
        house.add(Wanted.of(files=[broken]), targets=[TARGET])
    assert str(broken) in caught.value.message
    assert "uv lock" in (caught.value.hint or "")


def test_refusals(project: Path) -> None:
    assert type(refused(files=[project.with_name("no.txt")])) is SourceError
    assert type(refused(constraints=[project.with_name("no.txt")])) is SourceError
    assert type(refused()) is InputError
    assert type(refused(constraints=[project])) is InputError  # of nothing
    file = lock(project)
    for more in ({"requirements": ["a"]}, {"constraints": [project]}, {"files": [file, project]}):
        assert "cannot be joined" in refused(**{"files": [file], **more}).message  # type: ignore[arg-type]
    assert "which project" in refused(requirements=["a"], groups=["test"]).message
    for bad in ("", "--extra", "a b", "a:b", "x\ny"):
        assert "is not a name" in refused(files=[project], extras=[bad]).message


def test_a_group_that_is_not_there(project: Path, house: Wheelhouse) -> None:
    with pytest.raises(WheelmountError) as caught:
        house.add(Wanted.of(files=[project], groups=["nosuch"]), targets=[TARGET])
    assert "nosuch" in caught.value.message


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("a>=1\nb  # -r is no option here\n", True),
        ("a==1.0 \\\n    --hash=sha256:00\n", True),
        ("--index-url http://127.0.0.1/simple\na\n", True),
        ("-r other.txt\n", False),
        ("  -c other.txt\n", False),
        ("--find-links links\na\n", False),
        ("-e .\n", False),
        ("./a-1.0-py3-none-any.whl\n", False),
        ("a @ file:///a.whl\n", False),
        ("a @ git+https://127.0.0.1/a\n", False),
        ("a @ ./dist/a-1.0-py3-none-any.whl\n", False),
        ("a @ dist/a-1.0-py3-none-any.whl\n", False),
        ("dist/a-1.0-py3-none-any.whl\n", False),
        ("dist/a\n", False),
        ("a @ https://127.0.0.1/a-1.0-py3-none-any.whl\n", True),
        ("https://127.0.0.1/a-1.0-py3-none-any.whl\n", True),
    ],
)
def test_when_nothing_can_have_changed(tmp_path: Path, text: str, known: bool) -> None:
    file = tmp_path / "needs.txt"
    file.write_text(text)
    digest = Wanted.of(["x"], [file]).digest()
    assert bool(digest) == known
    assert digest == Wanted.of(["x"], [file]).digest()
    assert not known or digest != Wanted.of(["y"], [file]).digest()
    file.write_text(f"{text}more\n")
    assert not known or digest != Wanted.of(["x"], [file]).digest()


def test_values_of_variables_count_and_passwords_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "needs.txt"
    file.write_text("--index-url https://me:${PASSWORD}@127.0.0.1/simple\na==${VERSION}\n")
    digests = []
    for password, version in (("one", "1"), ("other", "1"), ("other", "2")):
        monkeypatch.setenv("PASSWORD", password)
        monkeypatch.setenv("VERSION", version)
        digests.append(Wanted.of(files=[file]).digest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("uv.lock", 'source = {{ {} = "." }}', True),
        ("uv.lock", 'source = {{registry = "https://127.0.0.1/{}"}}', True),
        ("uv.lock", 'source={{{}="../a"}}', False),
        ("uv.lock", '[package.source]\n{} = "../a"', False),
        ("pylock.toml", "[packages.{}]\npath = '../a'", False),
        ("pylock.toml", "{}={{path='../a'}}", False),
        ("pylock.toml", "vcs={{type='git',commit-id='1',path='../{}'}}", False),
        ("pylock.toml", "vcs={{type='git',commit-id='1',url='https://127.0.0.1/{}'}}", True),
        ("pyproject.toml", "[tool.uv.sources]\na.path = '{}'", False),
        ("pyproject.toml", "[tool.uv.sources.a]\nworkspace = true #{}", False),
        ("pyproject.toml", "[tool.uv.sources]\na.index = '{}'", True),
        ("pyproject.toml", "[project]\ndynamic=['dependencies'] #{}", False),
        ("pyproject.toml", "[project]\ndependencies=['a @ git+https://127.0.0.1/{}']", False),
    ],
)
def test_locks_and_projects_that_may_change(
    tmp_path: Path, name: str, text: str, known: bool
) -> None:
    starts = {
        "uv.lock": '[[package]]\nname = "a"\n',
        "pylock.toml": "lock-version = '1.0'\ncreated-by = 'me'\n[[packages]]\nname = 'a'\n",
    }
    (tmp_path / name).write_text(f"{starts.get(name, '')}{text.format('directory')}\n")
    assert bool(Wanted.of(files=[tmp_path / name]).digest()) == known


def test_what_is_on_this_machine_may_change(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "a")
    assert Wanted.of([str(wheel)]).digest() == ""
    assert Wanted.of([str(tmp_path)]).digest() == ""
    assert Wanted.of(["a @ git+https://127.0.0.1/a"]).digest() == ""
    assert Wanted.of(["a @ ./a-1.0-py3-none-any.whl"]).digest() == ""
    assert Wanted.of(["a @ https://127.0.0.1/a.whl"], builds=["b"]).digest() != ""


INDEXES = {
    "UV_DEFAULT_INDEX": "https://{}127.0.0.1/simple",
    "UV_INDEX": "own=https://{}127.0.0.1/simple https://{}127.0.0.1/more",
    "UV_EXTRA_INDEX_URL": "https://{}127.0.0.1/simple",
    "UV_FIND_LINKS": "https://{}127.0.0.1/links,https://{}127.0.0.1/more",
    "uv.toml": '[[index]]\nname = "own"\nurl = "https://{}127.0.0.1/simple"\n',
}


@pytest.mark.parametrize("where", INDEXES)
def test_another_index_makes_another_request_and_another_password_does_not(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_NO_CONFIG")
    digests = [Wanted.of(["a"]).digest()]
    for user in ("me:one@", "me:other@", ""):
        text = INDEXES[where].replace("{}", user)
        if where == "uv.toml":
            (tmp_path / where).write_text(text)
        else:
            monkeypatch.setenv(where, text)
        digests.append(Wanted.of(["a"]).digest())
    assert digests[0] != digests[1] == digests[2] == digests[3]


def test_another_password_makes_no_other_request() -> None:
    one, other = (
        Wanted.of([f"a @ https://me:{password}@127.0.0.1/a-1.0-py3-none-any.whl"])
        for password in ("one", "other")
    )
    assert one.digest() == other.digest() != ""
