"""The command line of a container, without running one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from wheelmount.containers import apptainer, privileges
from wheelmount.containers.container import Bind, Container
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import InputError, SourceError, UnavailableError

pytestmark = pytest.mark.usefixtures("fake_apptainer")


def values(command: list[str], option: str) -> list[str]:
    return [after for before, after in itertools.pairwise(command) if before == option]


def test_says_everything_once(tmp_path: Path, fake_apptainer: Path) -> None:
    container = Container(
        image=tmp_path / "python.sif",
        workdir=tmp_path / "work",
        overlay=Overlay(tmp_path / "state", "mine", "n1"),
        packages=Path("/mnt/wheels"),
        binds=[Bind(Path("/data"), "/data"), Bind(Path("/out"), "/results", writable=True)],
        env={"SECRET": "x"},
        files={"/etc/pip.conf": "[global]\n"},
    )
    command = container.command(["pip", "install", "--quiet", "x"])
    assert command[:3] == [str(fake_apptainer), "--silent", "exec"]
    assert {"--containall", "--no-eval"} <= set(command)
    assert values(command, "--network") == ["none"]
    assert values(command, "--overlay") == [f"{tmp_path}/state/overlays/mine/n1"]
    limited = values(privileges.options(tmp_path, nv=False), "--bind") if container.confined else []
    assert values(command, "--bind") == [
        *limited,
        "/mnt/wheels:/packages:ro",
        "/data:/data:ro",
        "/out:/results:rw",
        f"{tmp_path}/work/files/0:/etc/hosts:ro",
        f"{tmp_path}/work/files/1:/etc/resolv.conf:ro",
        f"{tmp_path}/work/files/2:/etc/pip.conf:ro",
    ]
    hidden = ["sys"] if container.confined else []
    assert values(command, "--no-mount") == [*hidden, "bind-paths"]
    assert command[-5:] == [f"{tmp_path}/python.sif", "pip", "install", "--quiet", "x"]
    assert "SECRET" not in " ".join(command), "other users can read a command line"


def test_image_cannot_be_an_option_or_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("--privileged", "docker://busybox"):
        command = Container(Path(name), tmp_path / "work").command(["--help"])
        assert command[-2] == str(tmp_path / Path(name))
        assert command[-1] == "--help"


@pytest.mark.parametrize("name", ["a:b", "a,b", 'a"b', "a\\b", "a\nb"])
def test_paths_that_apptainer_would_split_are_refused(tmp_path: Path, name: str) -> None:
    bad = tmp_path / name
    for arguments in (
        {"packages": bad},
        {"binds": [Bind(bad, "/x")]},
        {"binds": [Bind(tmp_path, f"/{name}")]},
        {"files": {f"/{name}": ""}},
        {"overlay": Overlay(bad, "o", "n1")},
    ):
        with pytest.raises(InputError, match="cannot be shown"):
            Container(tmp_path / "i.sif", tmp_path / "work", **arguments)
    with pytest.raises(InputError, match="cannot be shown"):
        Container(tmp_path / "i.sif", bad)


def test_relative_target_and_bad_variable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot bind"):
        Container(tmp_path / "i.sif", tmp_path / "work", files={"etc/pip.conf": ""})
    with pytest.raises(InputError, match="environment variable"):
        Container(tmp_path / "i.sif", tmp_path / "work", env={"A B": ""})
    with pytest.raises(InputError, match="UID cannot be set in a container"):
        Container(tmp_path / "i.sif", tmp_path / "work", env={"UID": "5"})


def test_no_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no command"):
        Container(tmp_path / "i.sif", tmp_path / "work").command([])


def test_missing_things_are_named_before_anything_is_made(tmp_path: Path) -> None:
    container = Container(tmp_path / "i.sif", tmp_path / "work")
    with pytest.raises(SourceError, match=r"i\.sif") as error:
        container.prepare()
    assert "wheelmount image build" in str(error.value.hint)
    (tmp_path / "i.sif").touch()
    with pytest.raises(SourceError, match="gone"):
        Container(tmp_path / "i.sif", tmp_path / "work", packages=tmp_path / "gone").prepare()
    assert not (tmp_path / "work").exists()


def test_context_makes_a_private_directory_and_removes_it(tmp_path: Path) -> None:
    (tmp_path / "i.sif").touch()
    container = Container(tmp_path / "i.sif", tmp_path / "work", files={"/etc/x": "text"})
    with container:
        assert (tmp_path / "work").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "work" / "files" / "2").read_text() == "text"
    assert not (tmp_path / "work").exists()


def test_no_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError) as error:
        Container(tmp_path / "i.sif", tmp_path / "work").command(["true"])
    assert "wheelmount setup" in str(error.value.hint)


def test_version(fake_apptainer: Path) -> None:
    assert apptainer.version() == "apptainer version 0.0"


@pytest.mark.parametrize(
    ("user", "missing", "expected"),
    [
        (1000, set(), ["--fakeroot"]),
        (0, set(), []),
        (0, {24}, ["--drop-caps", "CAP_SYS_RESOURCE"]),
        (0, {24, 25}, ["--no-privs"]),
    ],
)
def test_privileges(
    user: int, missing: set[int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(apptainer, "_missing_capabilities", lambda: missing)
    assert apptainer.exec_privileges() == expected


def test_environment_of_apptainer_itself() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "APPTAINER_TMPDIR": "/scratch"}
    others = {"http_proxy": "http://p", "APPTAINERENV_A": "1", "APPTAINER_BIND": "/", "SECRET": "1"}
    assert apptainer.environment({**kept, **others}) == kept


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("INFO: a\nE: no such package x\nFATAL:   While building: exit status 100\n", "E: no such"),
        ("\x1b[31mFATAL:   could not open image\x1b[0m\n", "could not open image"),
        ("FATAL:   While building: exit status 1\n", "While building"),
        ("FATAL: mount hook: while mounting overlay: invalid argument\n", "while mounting"),
        ("", "did not say why"),
    ],
)
def test_the_line_that_tells(output: str, said: str) -> None:
    assert said in apptainer.start_error(Path("x.sif"), output).message
