"""Code of strangers that builds a wheel: what it can reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from wheelmount.errors import ResolveError
from wheelmount.wheels import sandbox
from wheelmount.wheels.given import file_of
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import Index, make_wheel

HERE = Target.here()

# A build backend that tries what it should not be able to, and says in the wheel what worked.
BACKEND = """
import base64, hashlib, json, os, pathlib, shutil, socket, subprocess, sys, zipfile

ASKED = json.loads(pathlib.Path("asked.json").read_text())

def attempt(action):
    try:
        return action()
    except BaseException:
        return None

def mount():
    os.mkdir("mounted")
    subprocess.run(["mount", "-t", "tmpfs", "x", "mounted"], check=True)
    return subprocess.run(["umount", "mounted"], check=True).returncode == 0

def get_requires_for_build_wheel(settings=None):
    attempt(lambda: pathlib.Path(ASKED["written"]).write_text("x"))
    return ["late"]

def build_wheel(directory, config_settings=None, metadata_directory=None):
    import late
    os.setsid()
    reached = {
        "secret": attempt(lambda: pathlib.Path(ASKED["secret"]).read_text()),
        "written": attempt(lambda: pathlib.Path(ASKED["written"]).write_text("x")),
        "network": attempt(lambda: bool(socket.create_connection(ASKED["server"], 5))),
        "variable": os.environ.get("MY_TOKEN"),
        "processes": attempt(lambda: [
            p for p in os.listdir("/proc") if p.isdigit()
            and b"MY_TOKEN" in pathlib.Path("/proc", p, "environ").read_bytes()
        ]),
        "mount": attempt(mount),
        "devices": attempt(lambda: [n for n in os.listdir("/dev") if n.startswith(("vd", "sd"))]),
        "system": attempt(lambda: pathlib.Path("/etc/wheelmount-test").write_text("x")),
    }
    with zipfile.ZipFile(ASKED["wheel"]) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["reached.json"] = text = json.dumps(reached).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    files["own-1.0.dist-info/RECORD"] += f"reached.json,sha256={digest},{len(text)}\\n".encode()
    with zipfile.ZipFile(os.path.join(directory, ASKED["wheel"]), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return ASKED["wheel"]
"""


def stranger(tmp_path: Path, index: Index, secret: Path) -> Path:
    """A source distribution with that backend."""
    place = tmp_path / "own-1.0"
    place.mkdir()
    (place / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "1.0"\ndynamic = ["dependencies"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (place / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (place / "backend.py").write_text(BACKEND)
    wheel = make_wheel(place, "own")
    asked = {
        "secret": str(secret),
        "written": str(tmp_path / "written"),
        "server": ["127.0.0.1", int(index.address.rpartition(":")[2])],
        "wheel": wheel.name,
    }
    (place / "asked.json").write_text(json.dumps(asked))
    source = tmp_path / "own-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        archive.add(place, "own-1.0")
    return source


def reached(house: Path) -> dict[str, object]:
    with zipfile.ZipFile(house / "own-1.0-py3-none-any.whl") as archive:
        found = json.loads(archive.read("reached.json"))
    return {name: value for name, value in found.items() if value}


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.skipif(not sandbox.available(), reason="no namespaces")
@pytest.mark.parametrize("how", ["path", "url", "index", "url in a file", "git in a file"])
def test_strangers_code_reaches_nothing(
    uv_index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Not when uv wants to know what a source needs either, which only its code tells."""
    make_wheel(uv_index.directory, "late")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MY_TOKEN", "secret")
    (tmp_path / "home" / "key").write_text("secret")
    source = stranger(tmp_path, uv_index, tmp_path / "home" / "key")
    house = Wheelhouse(tmp_path / "house")
    shutil.copy(source, uv_index.directory)
    line = f"own @ {uv_index.file_url(source)}"
    if how == "git in a file":
        place = tmp_path / "own-1.0"
        git = ["git", "-c", "user.name=Me", "-c", "user.email=me@example.org"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run([*git, *command], cwd=place, check=True)
        line = f"git+{place.as_uri()}"
    (tmp_path / "needs.txt").write_text(f"{line}\n")
    wanted = {
        "path": lambda: Wanted.of([str(source)]),
        "url": lambda: Wanted.of([line]),
        "index": lambda: Wanted.of(builds=["own"]),
    }.get(how, lambda: Wanted.of(files=[tmp_path / "needs.txt"]))()
    house.add(wanted, targets=[HERE])
    house.check().raise_if_any()
    for pip in (False, True):
        house.check(wanted, targets=[HERE], pip=pip).raise_if_any()
    assert reached(house.directory) == {}
    assert not (tmp_path / "written").exists()
    assert not Path("/etc/wheelmount-test").exists()


def test_what_it_reaches_without_a_sandbox(
    uv_index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above tests something."""
    make_wheel(uv_index.directory, "late")
    monkeypatch.setenv("MY_TOKEN", "secret")
    (tmp_path / "key").write_text("secret")
    source = stranger(tmp_path, uv_index, tmp_path / "key")
    wanted = Wanted.of([str(source)], confined=False)
    try:
        Wheelhouse(tmp_path / "house").add(wanted, targets=[HERE])
    finally:
        Path("/etc/wheelmount-test").unlink(missing_ok=True)
    expected = {"secret", "written", "network", "variable"} | (
        {"mount"} if not os.getuid() else set()
    )
    assert reached(tmp_path / "house").keys() >= expected


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_it_holds_no_mounts_of_others(tmp_path: Path) -> None:
    """Those could not be unmounted for as long as something is built."""
    place, view = tmp_path / "place", tmp_path / "a view é"
    for path in (place, place / "below", view):
        path.mkdir()
    for path in (place / "below", view):
        subprocess.run(["mount", "--bind", tmp_path, path], check=True)
    files = "/proc/self/mountinfo", "/proc/self/oom_score_adj"
    try:
        command = sandbox.command(["cat", *files], place, [sys.prefix])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for path in (place / "below", view):
            subprocess.run(["umount", path], check=True)
    assert f"{place}/below" in done.stdout
    assert "view" not in done.stdout
    assert done.stdout.endswith("\n1000\n"), "it ends first where memory runs out"


@pytest.mark.skipif(os.getuid() != 0, reason="makes a directory elsewhere")
def test_temporary_files_may_lie_anywhere() -> None:
    """Root's builds run as another user, who could not come through a private directory."""
    folder = Path(tempfile.mkdtemp(prefix="wheelmount-test-", dir="/"))
    try:
        place = folder / "place"
        place.mkdir()
        os.chown(place, sandbox.NOBODY, sandbox.NOBODY)
        command = sandbox.command(["touch", str(place / "made")], place, [])
        subprocess.run(command, check=True)
        assert (place / "made").exists()
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_the_place_of_an_ordinary_user() -> None:
    """With the system's Python, which every user can run."""
    folder = Path(tempfile.mkdtemp(prefix="wheelmount-test-"))
    try:
        for name in ("home", "place"):
            (folder / name).mkdir()
        (folder / "home" / "key").write_text("secret")
        shutil.copy(sandbox.__file__, folder / "sandbox.py")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 23456, 23456)
        user = ["setpriv", "--reuid", "23456", "--regid", "23456", "--clear-groups"]
        done = subprocess.run(
            [*user, "/usr/bin/python3", "-c", ORDINARY],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "MY_TOKEN": "secret"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if "no namespaces" in done.stdout:
            pytest.skip("no namespaces for ordinary users")
        assert done.stdout == "made\n", done.stderr
        assert (folder / "place" / "made").is_file()
        assert not (folder / "written").exists()
    finally:
        shutil.rmtree(folder)


ORDINARY = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
import sandbox
place = Path.cwd() / "place"
script = 'touch made; echo made; touch ../written; cat "$1/key"; echo $MY_TOKEN; ls -A "$1"; ' \
    'mount -t tmpfs x /mnt && echo mounted; grep -q "lo:" /proc/net/dev || echo $?; ' \
    'ls /dev | grep -E "^(sd|vd)"; [ $(ls -d /proc/[0-9]* | wc -l) -lt 9 ] || echo processes'
if not sandbox.available():
    sys.exit(print("no namespaces"))
argv = sandbox.command(["sh", "-c", script, "sh", os.environ["HOME"]], place, [])
done = subprocess.run(argv, env=sandbox.environment(place), stdout=subprocess.PIPE, text=True)
print(done.stdout.replace("\\n\\n", "\\n"), end="")
"""


# A build backend that puts a link in place of what it was given or has made, and asks for more.
LEADING = """
import os, pathlib, shutil

def get_requires_for_build_wheel(settings=None):
    place = pathlib.Path(os.environ["HOME"])
    for folder in (place / "needs", place.with_name("needs"), place / "made"):
        try:
            shutil.rmtree(folder)
            folder.symlink_to({target!r})
        except OSError:
            pass
    return ["late"]

def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise SystemExit(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sandbox.available(), reason="no namespaces")
def test_what_a_build_asks_for_goes_nowhere_else(uv_index: Index, tmp_path: Path) -> None:
    make_wheel(uv_index.directory, "late")
    precious = tmp_path / "precious"
    make_wheel(precious, "own")
    before = sorted(precious.iterdir())
    place = tmp_path / "own-1.0"
    place.mkdir()
    (place / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (place / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (place / "backend.py").write_text(LEADING.format(target=str(precious)))
    source = tmp_path / "own-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        archive.add(place, "own-1.0")
    with pytest.raises(ResolveError, match="does not build"):
        Wheelhouse(tmp_path / "house").add(Wanted.of([str(source)]), targets=[HERE])
    assert sorted(precious.iterdir()) == before, "what was brought lies there"
    assert not list((tmp_path / "house").glob("own*")), "a file of the user's was taken for it"


@pytest.mark.skipif(not sandbox.available(), reason="no namespaces")
@pytest.mark.parametrize("how", ["wheel", "index", "file", "url"])
def test_strangers_name_no_code_that_runs_as_the_user(
    uv_index: Index, tmp_path: Path, how: str
) -> None:
    """Metadata of a wheel, or a file that comes from a URL, may name a directory that is here."""
    late, source = tmp_path / "late-1.0", tmp_path / "written"
    late.mkdir()
    (late / "pyproject.toml").write_text(
        '[project]\nname = "late"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (late / "backend.py").write_text(WRITING.format(written=str(source)))
    folder = uv_index.directory if how == "index" else tmp_path
    wheel = make_wheel(folder, "outer", requires=[f"late @ {late.as_uri()}"])
    listed = uv_index.directory / "needs.txt"
    listed.write_text(f"{late}\n")
    (tmp_path / "needs.txt").write_text(f"{wheel}\n")
    if how == "wheel":
        wanted = Wanted.of([str(wheel)])
    elif how == "index":
        wanted = Wanted.of(["outer"])
    elif how == "url":
        wanted = Wanted.of(files=[file_of(uv_index.file_url(listed), tmp_path / "given")])
    else:
        wanted = Wanted.of(files=[tmp_path / "needs.txt"])
    with pytest.raises(ResolveError):
        Wheelhouse(tmp_path / "house").add(wanted, targets=[HERE])
    assert not source.exists()


# A build backend that says where it can be seen that it ran.
WRITING = """
import pathlib

def build_wheel(directory, config_settings=None, metadata_directory=None):
    try:
        pathlib.Path({written!r}).write_text("x")
    finally:
        raise SystemExit(1)
"""

# One whose wheel is there already.
COPYING = """
import shutil

def build_wheel(directory, config_settings=None, metadata_directory=None):
    shutil.copy("other-1.0-py3-none-any.whl", directory)
    return "other-1.0-py3-none-any.whl"
"""


@pytest.mark.parametrize("how", ["file", "project", "beside", "workspace"])
def test_the_user_s_own_projects_build_as_the_user(
    uv_index: Index, tmp_path: Path, how: str
) -> None:
    """Those that the user's files name, which may need a network or the user's files."""
    own, written = tmp_path / "top" / "own", tmp_path / "written"
    own.mkdir(parents=True)
    (own / "pyproject.toml").write_text(
        '[project]\nname = "own"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (own / "backend.py").write_text(WRITING.format(written=str(written)))
    other = tmp_path / "top" / "other"
    other.mkdir()
    sources = {"workspace": "{ workspace = true }"}.get(how, '{ path = "../own" }')
    make_wheel(other, "other", requires=["own"])
    (other / "backend.py").write_text(COPYING)
    (other / "pyproject.toml").write_text(
        '[project]\nname = "other"\nversion = "1.0"\ndependencies = ["own"]\n'
        f"[tool.uv.sources]\nown = {sources}\n"
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    if how == "workspace":
        (tmp_path / "top" / "pyproject.toml").write_text(
            '[tool.uv.workspace]\nmembers = ["own", "other"]\n'
        )
    (tmp_path / "needs.txt").write_text(f"{own}\n" if how == "file" else f"{other}\n")
    file = other / "pyproject.toml" if how in ("project", "workspace") else tmp_path / "needs.txt"
    with pytest.raises(ResolveError, match="own does not build"):
        Wheelhouse(tmp_path / "house").add(Wanted.of(files=[file]), targets=[HERE])
    assert written.exists()
