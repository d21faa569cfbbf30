"""Real builds with a real backend, which lies in the index beside what is built."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
import uv
from packaging.pylock import Pylock

from wheelmount import toml
from wheelmount.errors import (
    InputError,
    ResolveError,
    SourceError,
    TransferError,
    WaitError,
    WheelError,
    WheelmountError,
)
from wheelmount.wheels import compiler, wheelhouse
from wheelmount.wheels.build import clone
from wheelmount.wheels.resolve import resolve
from wheelmount.wheels.shipment import prepare
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

from .support import ARM, Fault, Index, make_wheel, sha256

HERE = Target.here()

PYPROJECT = """
[build-system]
requires = ["backend"]
build-backend = "backend"
[project]
name = "Own.Name"
version = "1.0"
dependencies = ["needed"]
"""

# A build backend (PEP 517) in one module.
BACKEND = """
import base64, hashlib, os, tarfile, zipfile

INFO = "own_name-1.0.dist-info"

def build_wheel(directory, config_settings=None, metadata_directory=None):
    tag = open("tag").read().strip()
    files = {
        "own_name.py": open("own_name.py").read(),
        f"{INFO}/METADATA": "Metadata-Version: 2.1\\nName: Own.Name\\nVersion: 1.0\\n"
        "Requires-Dist: needed\\n",
        f"{INFO}/WHEEL": f"Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    files[f"{INFO}/RECORD"] = "\\n".join([*rows, f"{INFO}/RECORD,,", ""])
    name = f"own_name-1.0-{tag}.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return name

def build_sdist(directory, config_settings=None):
    name = "own_name-1.0"
    with tarfile.open(os.path.join(directory, f"{name}.tar.gz"), "w:gz") as archive:
        for file in ("pyproject.toml", "own_name.py", "tag", "PKG-INFO"):
            archive.add(file, f"{name}/{file}")
    return f"{name}.tar.gz"
"""


@pytest.fixture
def project(uv_index: Index, tmp_path: Path) -> Path:
    """A project that needs ``needed``; its backend is in the index."""
    make_wheel(uv_index.directory, "backend", module=BACKEND.encode())
    make_wheel(uv_index.directory, "needed")
    return make_project(tmp_path / "a project")


def make_project(place: Path) -> Path:
    """A project that is built with ``backend`` and needs ``needed``."""
    place.mkdir(parents=True)
    (place / "pyproject.toml").write_text(PYPROJECT)
    (place / "own_name.py").write_text("VALUE = 1\n")
    (place / "tag").write_text("py3-none-any\n")
    (place / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Own.Name\nVersion: 1.0\n")
    return place


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "house")


def git(*arguments: str, cwd: Path) -> str:
    identity = ["-c", "user.name=Me", "-c", "user.email=me@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(project: Path, tmp_path: Path) -> Path:
    """A repository with the project in ``sub``; what comes after the tag ``v1`` does not build."""
    place = tmp_path / "repository"
    shutil.copytree(project, place / "sub")
    git("init", "-q", cwd=place)
    git("add", ".", cwd=place)
    git("commit", "-qm", "first", cwd=place)
    git("tag", "v1", cwd=place)
    git("rm", "-qr", "sub", cwd=place)
    git("commit", "-qm", "second", cwd=place)
    return place


def sdist(project: Path, into: Path) -> Path:
    command = [uv.find_uv_bin(), "build", "-q", "--sdist", "--out-dir", str(into), str(project)]
    subprocess.run(command, check=True, timeout=60)
    (found,) = into.glob("own_name*.tar.gz")
    return found


def names(house: Wheelhouse) -> list[str]:
    return [wheel.name.split("-py3")[0] for wheel in house.wheels()]


def built(house: Wheelhouse) -> dict[str, str]:
    manifest = json.loads((house.directory / "wheelmount.json").read_text())
    return manifest["built"]  # type: ignore[no-any-return]


def refused(house: Wheelhouse, *texts: str, target: Target = HERE) -> WheelmountError:
    with pytest.raises(WheelmountError) as caught:
        house.add(Wanted.of(texts), targets=[target])
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert house.wheels() == []
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_a_source_that_is_pinned_is_compared(
    right: bool, project: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    source = sdist(project, tmp_path)
    digest = sha256(source) if right else "0" * 64
    (tmp_path / "pins.txt").write_text(f"own-name --hash=sha256:{digest}\n")
    wanted = Wanted.of([f"own-name @ {source.as_uri()}"], constraints=[tmp_path / "pins.txt"])
    if right:
        house.add(wanted, targets=[HERE])
        house.check().raise_if_any()
        return
    with pytest.raises(WheelError, match=digest):
        house.add(wanted, targets=[HERE])
    assert house.wheels() == []


@pytest.mark.slow
def test_a_wheel_that_is_built_for_one_request_is_not_for_a_pinned_other(
    project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    wheel = make_wheel(uv_index.directory, "own_name", requires=["needed"])
    (tmp_path / "pinned.txt").write_text(f"own-name==1.0 --hash=sha256:{sha256(wheel)}\n")
    pinned = Wanted.of(files=[tmp_path / "pinned.txt"])
    house.add(pinned, targets=[HERE])
    house.add(Wanted.of([str(project)]), targets=[HERE])
    assert sha256(house.directory / wheel.name) != sha256(wheel)
    assert [one.wheel for one in house.check(pinned).unsound] == [wheel.name]
    assert [one.wheel for one in house.check().unsound] == [wheel.name]
    report = house.add(pinned, targets=[HERE])
    assert report.fetched == (wheel.name,)
    assert sha256(wheel) in (house.directory / report.requests[0]).read_text()
    house.check(pinned).raise_if_any()
    house.check().raise_if_any()
    assert built(house) == {}
    house.add(Wanted.of([str(project)]), targets=[HERE])
    wheel.unlink()
    with pytest.raises(WheelmountError) as caught:
        house.add(pinned, targets=[HERE])
    assert caught.value.exit_code == 65


@pytest.mark.slow
def test_built_wheels_that_an_old_version_noted(
    project: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    source = sdist(project, tmp_path)
    (tmp_path / "pins.txt").write_text(f"own-name --hash=sha256:{sha256(source)}\n")
    (tmp_path / "r.txt").write_text(f"own-name @ {source.as_uri()}\n")
    wanted = Wanted.of(files=[tmp_path / "r.txt"], constraints=[tmp_path / "pins.txt"])
    house.add(wanted, targets=[HERE])
    manifest = json.loads((house.directory / "wheelmount.json").read_text())
    del manifest["requests"][0]["built"]
    (house.directory / "wheelmount.json").write_text(json.dumps(manifest))
    house.check().raise_if_any()
    house.check(wanted).raise_if_any()
    house.add(wanted, targets=[HERE])
    house.check(wanted).raise_if_any()
    assert built(house)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["argument", "file", "constraint", "unnamed", "project", "dependency", "extra", "group"]
)
def test_git_is_told_a_password_by_no_argument(
    repository: Path, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    served = tmp_path / "served"
    git("clone", "-q", "--bare", str(repository), str(served / "own.git"), cwd=tmp_path)
    git("update-server-info", cwd=served / "own.git")
    token = base64.b64encode(b"me:it's@secret").decode()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.headers.get("Authorization") == f"Basic {token}":
                super().do_GET()
            else:
                self.send_error(401)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(served)))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    place = f"127.0.0.1:{server.server_port}/own.git@v1#subdirectory=sub"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        line = f"own.name @ git+http://me:it's@secret@{place}"
        inner, outer = tmp_path / "inner.txt", tmp_path / "outer.txt"
        inner.write_text(f"{line.removeprefix('own.name @ ') if how == 'unnamed' else line}\n")
        outer.write_text("-r inner.txt\nneeded\n")
        if how == "argument":
            house.add(Wanted.of([line]), targets=[HERE])
        elif how == "project":
            other = tmp_path / "other" / "pyproject.toml"
            other.parent.mkdir()
            url, _, inside = line.removeprefix("own.name @ git+").partition("#subdirectory=")
            source = f'{{git = "{url.removesuffix("@v1")}", tag = "v1", subdirectory = "{inside}"}}'
            other.write_text(
                '[project]\nname = "other"\nversion = "1"\ndependencies = ["own-name"]\n'
                f'[tool.uv.sources]\n"Own.Name" = {source}\nneeded = {{git = "http://no"}}\n'
            )
            wanted = Wanted.of(files=[other])
            house.add(wanted, targets=[HERE])
            house.check(wanted, targets=[HERE]).raise_if_any()
            house.check().raise_if_any()
        elif how in ("dependency", "extra", "group"):
            other = tmp_path / "other" / "pyproject.toml"
            other.parent.mkdir()
            table: dict[str, Any] = {"project": {"name": "other", "version": "1"}}
            table["dependency-groups"] = {"no": ["no @ git+http://no"]}
            if how == "dependency":
                table["project"]["dependencies"] = [line]
            elif how == "extra":
                extras = {"All": ["other[some]"], "some": [line], "no": ["no @ git+http://no"]}
                table["project"]["optional-dependencies"] = extras
            else:
                table["dependency-groups"] |= {"All": [{"include-group": "some"}], "some": [line]}
            other.write_text(tomli_w.dumps(table))
            extra, group = ["all"] if how == "extra" else [], ["all"] if how == "group" else []
            wanted = Wanted.of(files=[other], extras=extra, groups=group)
            house.add(wanted, targets=[HERE])
            house.check(wanted, targets=[HERE]).raise_if_any()
            house.check().raise_if_any()
        elif how == "constraint":
            house.add(Wanted.of(["own-name"], constraints=[inner]), targets=[HERE])
        else:
            house.add(Wanted.of(files=[outer]), targets=[HERE])
        error = refused_again(house, f"own.name @ git+http://me:other-secret@{place}")
    finally:
        server.shutdown()
        server.server_close()
    assert "remote-http" in (tmp_path / "trace").read_text()
    made = [path for path in (*house.directory.rglob("*"), tmp_path / "trace") if path.is_file()]
    assert [path for path in made if b"secret" in path.read_bytes()] == []
    assert "secret" not in f"{error.message} {error.hint}"
    assert built(house)["own_name-1.0-py3-none-any.whl"].startswith("git+http://127.0.0.1:")


def refused_again(house: Wheelhouse, text: str) -> WheelmountError:
    with pytest.raises(WheelmountError) as caught:
        house.add(Wanted.of([text]), targets=[HERE], upgrade=True)
    return caught.value


@pytest.mark.slow
def test_a_project(project: Path, house: Wheelhouse) -> None:
    wanted = Wanted.of(["./a project"])
    report = house.add(wanted, targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    assert len(report.wheels) == 2
    assert built(house) == {"own_name-1.0-py3-none-any.whl": project.as_uri()}
    house.check().raise_if_any()
    house.check(wanted, targets=[HERE]).raise_if_any()
    house.check(Wanted.of(["own-name"]), targets=[HERE]).raise_if_any()
    lock = (house.directory / "pylock.toml").read_text()
    assert str(house.directory) not in lock
    assert str(project) not in lock


@pytest.mark.slow
def test_a_project_that_changed(project: Path, house: Wheelhouse) -> None:
    house.add(Wanted.of([str(project)]), targets=[HERE])
    before = house.wheels()[1].read_bytes()
    (project / "own_name.py").write_text("VALUE = 2\n")
    house.add(Wanted.of([str(project)]), targets=[HERE])
    assert house.wheels()[1].read_bytes() != before
    house.check().raise_if_any()
    manifest = json.loads((house.directory / "wheelmount.json").read_text())
    assert len(manifest["requests"]) == 1


@pytest.mark.slow
def test_a_source_distribution(project: Path, house: Wheelhouse, tmp_path: Path) -> None:
    archive = sdist(project, tmp_path / "dist")
    house.add(Wanted.of([f"./dist/{archive.name}"]), targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    assert built(house) == {"own_name-1.0-py3-none-any.whl": archive.as_uri()}


@pytest.mark.slow
def test_of_the_index(project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path) -> None:
    archive = sdist(project, uv_index.directory)
    error = refused(house, "own-name")
    assert "--build own-name" in (error.hint or "")
    wanted = Wanted.of(["needed"], builds=["Own.Name>=1"])
    house.add(wanted, targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    assert built(house) == {"own_name-1.0-py3-none-any.whl": uv_index.file_url(archive)}
    house.check(wanted, targets=[HERE]).raise_if_any()
    uv_index.requests.clear()
    assert house.add(wanted, targets=[HERE]).fetched == ()
    assert uv_index.requests == []


@pytest.mark.slow
def test_bounds_count_for_source_distributions_too(
    project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    archive = sdist(project, uv_index.directory)
    newer = archive.with_name("own_name-2.0.tar.gz")
    shutil.copy(archive, newer)
    uv_index.sizes = True
    for file in uv_index.directory.iterdir():
        uv_index.uploaded[file.name] = f"{2026 if file == newer else 2025}-01-01T00:00:00Z"
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("own-name<2\n")
    for wanted in (
        Wanted.of(builds=["own-name"], constraints=[constraints]),
        Wanted.of(builds=["own-name"], flags=["--exclude-newer=2025-06-01"]),
        Wanted.of(builds=["own-name"], flags=["--no-deps"], override_files=[constraints]),
    ):
        house.add(wanted, targets=[HERE])
        assert built(house) == {"own_name-1.0-py3-none-any.whl": uv_index.file_url(archive)}
        assert uv_index.asked(newer) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--extra-index-url", "--find-links"])
def test_of_the_index_of_a_file(
    project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path, how: str
) -> None:
    archive = sdist(project, tmp_path / "private")
    with Index(archive.parent) as index:
        index.password = "secret"  # noqa: S105
        if how == "--find-links":
            place, origin = "private", archive.as_uri()
        else:
            place, origin = index.url.replace("://", "://me:secret@"), index.file_url(archive)
            shutil.copy(archive, uv_index.directory / "own_name-1.1.tar.gz")  # a namesake
        (tmp_path / "needs.txt").write_text(f"{how} {place}\nneeded\n")
        wanted = Wanted.of(files=[tmp_path / "needs.txt"], builds=["own-name"])
        house.add(wanted, targets=[HERE])
    assert built(house) == {"own_name-1.0-py3-none-any.whl": origin}


@pytest.mark.slow
def test_by_url(project: Path, house: Wheelhouse, uv_index: Index) -> None:
    archive = sdist(project, uv_index.directory)
    url = uv_index.file_url(archive)
    house.add(Wanted.of([f"own.name @ {url.replace('://', '://me:secret@')}"]), targets=[HERE])
    assert built(house) == {"own_name-1.0-py3-none-any.whl": url}
    assert not [f for f in house.directory.glob("*.*") if b"secret" in f.read_bytes()]


@pytest.mark.slow
def test_a_repository(repository: Path, house: Wheelhouse) -> None:
    url = f"git+{repository.as_uri()}"
    house.add(Wanted.of([f"own-name @ {url}@v1#subdirectory=sub"]), targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    commit = git("rev-parse", "v1", cwd=repository).strip()
    assert built(house) == {"own_name-1.0-py3-none-any.whl": f"{url}@{commit}"}
    house.check().raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["branch", "other branch", "tag", "note", "pull", "commit", "short", "tilde"]
)
def test_revisions_of_a_repository(tmp_path: Path, how: str) -> None:
    place, copy = tmp_path / "repository", tmp_path / "copy"
    git("init", "-qb", "main", str(place), cwd=tmp_path)
    commits = {}
    for name in ("other branch", "pull", "branch"):
        git("checkout", "-q", "--orphan", name.replace(" ", "/"), cwd=place)
        git("commit", "-q", "--allow-empty", "-m", name, cwd=place)
        commits[name] = git("rev-parse", "HEAD", cwd=place).strip()
    git("update-ref", "refs/pull/1/head", "pull", cwd=place)
    git("branch", "-qD", "pull", cwd=place)
    git("tag", "v1", "other/branch", cwd=place)
    git("tag", "-a", "v2", "-m", "note", "other/branch", cwd=place)
    other = commits["other branch"]
    revision, commit = {
        "branch": ("branch", commits["branch"]),
        "other branch": ("other/branch", other),
        "tag": ("v1", other),
        "note": ("v2", other),
        "pull": ("refs/pull/1/head", commits["pull"]),
        "commit": (other, other),
        "short": (other[:8], other),
        "tilde": ("v1~0", other),
    }[how]
    url = f"git+{place.as_uri()}"
    assert clone(f"{url}@{revision}", copy) == (copy, f"{url}@{commit}")
    assert git("rev-parse", "HEAD", cwd=copy).strip() == commit


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("@v9#subdirectory=sub", "v9"),
        ("#subdirectory=sub", "does not exist"),
        ("@v1#subdirectory=../..", "is not in the repository"),
        ("/no", "no repository to build from"),
        ("@--help", "--help is no revision"),
        ("@v1:v2#subdirectory=sub", "v1:v2"),
    ],
)
def test_bad_repositories(repository: Path, house: Wheelhouse, rest: str, reason: str) -> None:
    error = refused(house, f"own-name @ git+{repository.as_uri()}{rest}")
    assert type(error) is SourceError
    assert reason in error.message


def test_what_does_not_build(project: Path, house: Wheelhouse) -> None:
    (project / "tag").unlink()
    error = refused(house, str(project))
    assert type(error) is ResolveError
    assert "a project does not build" in error.message
    assert "uv build" in (error.hint or "")
    assert type(refused(house, "./nowhere")) is SourceError
    (project / "pyproject.toml").unlink()
    error = refused(house, str(project))
    assert type(error) is SourceError
    assert "is not a project" in error.message


@pytest.mark.slow
def test_what_does_not_build_is_named_by_where_it_is_from(
    repository: Path, house: Wheelhouse, uv_index: Index
) -> None:
    (repository / "pyproject.toml").write_text(PYPROJECT)
    git("add", ".", cwd=repository)
    git("commit", "-qm", "third", cwd=repository)
    commit = git("rev-parse", "HEAD", cwd=repository).strip()
    origin = f"git+{repository.as_uri()}"
    error = refused(house, f"own-name @ {origin}")
    assert f"uv build --wheel, in a copy of {origin}@{commit}" in (error.hint or "")
    error = refused(house, f"own-name @ {origin}#subdirectory=sub")
    assert error.message == f"sub of {origin}@{commit} does not exist"
    archive = packed(repository, uv_index.directory)
    error = refused(house, f"own-name @ {uv_index.file_url(archive)}")
    assert f"uv build --wheel, in a copy of {uv_index.file_url(archive)}" in (error.hint or "")


@pytest.mark.slow
def test_an_archive_that_cannot_be_read(house: Wheelhouse, tmp_path: Path) -> None:
    archive = tmp_path / "own_name-1.0.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("own_name-1.0/pyproject.toml", "[build-system]\nrequires = []\n")
    data = bytearray(archive.read_bytes())
    data[data.index(b".toml") + len(".toml")] = 0x07  # a kind of block that does not exist
    archive.write_bytes(data)
    error = refused(house, str(archive))
    assert type(error) is ResolveError
    assert "does not build" in error.message


@pytest.mark.slow
def test_a_project_file_that_is_nested_too_deeply(house: Wheelhouse, tmp_path: Path) -> None:
    archive = tmp_path / "own_name-1.0.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("own_name-1.0/pyproject.toml", f"a = {'[' * 900}{']' * 900}\n")
    error = refused(house, str(archive))
    assert type(error) is ResolveError
    assert "does not build" in error.message


ENDLESS = """
def build_wheel(directory, config_settings=None, metadata_directory=None):
    import json, os
    with open("told", "w") as file:
        json.dump(dict(os.environ), file)
    for _ in range(300):
        os.write(1, b"x" * 1_000_000)
    raise SystemExit(1)
"""

CLIENT = """
import atexit, sys
from pathlib import Path
from wheelmount.cli.main import main
@atexit.register
def tell():
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if "VmHWM" in line]
    print(int(peak) >> 10)
sys.argv[1:] = ["download", sys.argv[1], "-d", sys.argv[2]]
sys.exit(main())
"""


def packed(project: Path, into: Path) -> Path:
    """A source distribution, as it is packed without a backend."""
    file = into / "own_name-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.add(project, "own_name-1.0")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own", "another's"])
def test_a_build_that_prints_without_end_takes_no_memory(
    project: Path, uv_index: Index, tmp_path: Path, how: str
) -> None:
    make_wheel(uv_index.directory, "backend", module=ENDLESS.encode())
    source = project if how == "own" else packed(project, tmp_path)
    client = [sys.executable, "-c", CLIENT, str(source), str(tmp_path / "house")]
    environment = {**os.environ, "WHEELMOUNT_CREDENTIALS": "secret"}
    done = subprocess.run(client, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == ResolveError.exit_code, done.stderr
    assert "does not build" in done.stderr
    if how == "own":  # the other's directory is gone
        assert "WHEELMOUNT_CREDENTIALS" not in json.loads((project / "told").read_text())
    assert len(done.stderr) < 200_000
    assert int(done.stdout) < 200, "MiB"


HANGING = """
def build_wheel(directory, config_settings=None, metadata_directory=None):
    import subprocess
    subprocess.run(["sleep", "{seconds}"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["own", "another's"])
def test_a_build_that_does_not_end_is_killed_with_all_that_it_started(
    project: Path, uv_index: Index, house: Wheelhouse, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    seconds = f"86400.{os.getpid()}"  # which no other process sleeps
    backend = HANGING.format(seconds=seconds).encode()
    make_wheel(uv_index.directory, "backend", module=backend)
    source = project if how == "own" else packed(project, house.directory.parent)
    monkeypatch.setattr(compiler, "TIMEOUT", 8.0)
    with pytest.raises(WaitError, match=f"build of {source.name} did not end within 8 s"):
        house.add(Wanted.of([str(source)]), targets=[HERE])
    deadline = time.monotonic() + 60
    while [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or [])]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert house.wheels() == []


@pytest.mark.slow
def test_git_is_not_told_what_is_monarchs(
    repository: Path, house: Wheelhouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    hook = template / "hooks" / "post-checkout"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\nenv >>{tmp_path}/told\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(template))
    monkeypatch.setenv("WHEELMOUNT_CREDENTIALS", "secret")
    monkeypatch.setenv("HYPERACTOR_TLS_KEY", "secret")
    url = f"own_name @ git+{repository.as_uri()}@v1#subdirectory=sub"
    house.add(Wanted.of([url]), targets=[HERE])
    told = (tmp_path / "told").read_text()
    assert "GIT_TEMPLATE_DIR" in told
    assert "secret" not in told


@pytest.mark.slow
def test_another_name_than_asked_for(repository: Path, house: Wheelhouse) -> None:
    with pytest.raises(ResolveError, match=r"builds own_name-1\.0"):
        house.add(
            Wanted.of([f"other @ git+{repository.as_uri()}@v1#subdirectory=sub"]), targets=[HERE]
        )
    assert house.wheels() == []


def test_what_is_not_meant_for_the_target(project: Path, house: Wheelhouse) -> None:
    url = f"own-name @ {project.as_uri()} ; python_version < '3'"
    house.add(
        Wanted.of(["needed", url], builds=["nosuch; sys_platform == 'win32'"]), targets=[HERE]
    )
    assert names(house) == ["needed-1.0"]
    house.check().raise_if_any()


@pytest.mark.slow
def test_wheels_of_this_machine_are_for_it(project: Path, house: Wheelhouse) -> None:
    minor = HERE.python_version.partition(".")[2]
    (project / "tag").write_text(f"cp3{minor}-cp3{minor}-linux_{HERE.machine}\n")
    error = refused(house, str(project), target=ARM)
    assert type(error) is ResolveError
    assert "was built for this machine" in error.message
    other = Target(HERE.python_version, f"{HERE.machine}-manylinux_2_17")
    assert "was built for this machine" in refused(house, str(project), target=other).message
    house.add(Wanted.of([str(project)]), targets=[HERE])
    house.check().raise_if_any()


@pytest.mark.slow
def test_pure_ones_are_for_all(project: Path, house: Wheelhouse) -> None:
    house.add(Wanted.of([str(project)]), targets=[ARM, HERE])
    house.check().raise_if_any()


def test_wheels_by_path(house: Wheelhouse, uv_index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "near", "own", requires=["needed"])
    make_wheel(uv_index.directory, "needed")
    house.add(Wanted.of([f"./near/{wheel.name}"]), targets=[HERE])
    assert names(house) == ["needed-1.0", "own-1.0"]
    assert built(house) == {}
    wheel.rename(tmp_path / "odd.whl")
    with pytest.raises(InputError, match="Invalid wheel filename"):
        Wanted.of(["./odd.whl"])


def test_not_built_yet(project: Path, house: Wheelhouse) -> None:
    house.add(Wanted.of(["needed"]), targets=[HERE])
    with pytest.raises(WheelError, match="no wheel was built of"):
        house.check(Wanted.of([str(project)]), targets=[HERE])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["repository", "project", "archive"])
def test_of_a_file_of_requirements(
    repository: Path, project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path, how: str
) -> None:
    url = f"git+{repository.as_uri()}"
    commit = git("rev-parse", "v1", cwd=repository).strip()
    archive = uv_index.file_url(sdist(project, uv_index.directory))
    line, origin = {
        "repository": (f"own-name @ {url}@v1#subdirectory=sub", f"{url}@{commit}"),
        "project": (f"own-name @ {project.as_uri()}", project.as_uri()),
        "archive": (f"own-name @ {archive.replace('://', '://me:secret@')}", archive),
    }[how]
    (tmp_path / "needs.txt").write_text(f"needed\n{line}\n")
    wanted = Wanted.of(files=[tmp_path / "needs.txt"])
    house.add(wanted, targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    assert built(house) == {"own_name-1.0-py3-none-any.whl": origin}
    assert not [f for f in house.directory.glob("*.*") if b"secret" in f.read_bytes()]
    house.check().raise_if_any()
    house.check(wanted, targets=[HERE]).raise_if_any()
    next(house.directory.glob("needed-*")).unlink()
    (gap,) = house.check(wanted, targets=[HERE]).gaps
    assert "needed" in str(gap.missing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", ["git = '{repository}', subdirectory = 'sub', tag = 'v1'", "path = '{project}'"]
)
def test_of_a_lock(
    repository: Path, project: Path, house: Wheelhouse, tmp_path: Path, source: str
) -> None:
    source = source.format(repository=repository.as_uri(), project=project)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\n'
        f'dependencies = ["own-name"]\n[tool.uv.sources]\nown-name = {{ {source} }}\n'
    )
    subprocess.run([uv.find_uv_bin(), "lock", "-q"], cwd=mine, check=True, timeout=60)
    wanted = Wanted.of(files=[mine / "uv.lock"])
    house.add(wanted, targets=[HERE])
    assert names(house) == ["needed-1.0", "own_name-1.0"]
    assert list(built(house)) == ["own_name-1.0-py3-none-any.whl"]
    house.check().raise_if_any()
    house.check(wanted, targets=[HERE]).raise_if_any()


@pytest.mark.slow
def test_a_lock_with_source_distributions(
    project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path
) -> None:
    archive = sdist(project, uv_index.directory)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\n'
        'dependencies = ["own-name"]\n'
    )
    subprocess.run([uv.find_uv_bin(), "lock", "-q"], cwd=mine, check=True, timeout=60)
    with pytest.raises(ResolveError) as caught:
        house.add(Wanted.of(files=[mine / "uv.lock"]), targets=[HERE])
    assert "--build own-name" in (caught.value.hint or "")
    assert house.wheels() == []
    wanted = Wanted.of(files=[mine / "uv.lock"], builds=["Own.Name"])
    house.add(wanted, targets=[HERE])
    assert built(house) == {"own_name-1.0-py3-none-any.whl": uv_index.file_url(archive)}
    house.check(wanted, targets=[HERE]).raise_if_any()


@pytest.mark.slow
def test_a_failed_download_keeps_the_wheel_that_was_built_before(
    project: Path, house: Wheelhouse, uv_index: Index
) -> None:
    house.add(Wanted.of([str(project)]), targets=[HERE])
    (wheel,) = house.directory.glob("own_name-*.whl")
    before = wheel.read_bytes()
    (project / "own_name.py").write_text("VALUE = 2\n")
    # The next build is whole, and what else is needed cannot be resolved, or does not arrive.
    with pytest.raises(ResolveError):
        house.add(Wanted.of([str(project), "nosuch"]), targets=[HERE])
    other = make_wheel(uv_index.directory, "other")
    uv_index.faults[other.name] = [Fault(status=404, agent="python-httpx")]
    with pytest.raises(TransferError):
        house.add(Wanted.of([str(project), "other"]), targets=[HERE])
    assert wheel.read_bytes() == before
    house.check().raise_if_any()


@pytest.mark.slow
def test_a_wheel_that_another_request_replaces_is_not_taken(
    project: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    first = house.add(Wanted.of([str(project)]), targets=[HERE])
    namesake = make_project(tmp_path / "other" / "project")
    (namesake / "own_name.py").write_text("VALUE = 2\n")
    second = house.add(Wanted.of([str(namesake)]), targets=[HERE])
    assert first.wheels == second.wheels
    with pytest.raises(WheelError, match="and had"):
        prepare(house.directory, first.answers[0], HERE, tmp_path / "cache")
    prepare(house.directory, second.answers[0], HERE, tmp_path / "cache")
    # Once unpacked, each has its own bytes, whichever the wheelhouse has now.
    third = house.add(Wanted.of([str(project)]), targets=[HERE])
    prepare(house.directory, third.answers[0], HERE, tmp_path / "cache")
    shipment = prepare(house.directory, second.answers[0], HERE, tmp_path / "cache")
    assert {file.read_text() for file in shipment.tree.rglob("own_name.py")} == {"VALUE = 2\n"}


@pytest.mark.slow
def test_pruning_meanwhile_leaves_what_was_built(
    project: Path, house: Wheelhouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.add(Wanted.of(["needed"]), targets=[HERE])

    def resolve_and_prune(*arguments: Any, **options: Any) -> Pylock:
        house.prune()  # as another process does at this moment
        return resolve(*arguments, **options)

    monkeypatch.setattr(wheelhouse, "resolve", resolve_and_prune)
    house.add(Wanted.of([str(project)]), targets=[HERE])
    house.check().raise_if_any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["helper", "own-name"])
def test_a_source_of_a_lock_that_builds_another_package_or_version(
    project: Path, house: Wheelhouse, uv_index: Index, tmp_path: Path, name: str
) -> None:
    before = make_wheel(uv_index.directory, "own_name", requires=["needed"])
    house.add(Wanted.of(["own-name"]), targets=[HERE])
    archive = packed(project, tmp_path)
    version = "1.0" if name == "helper" else "2.0"
    (tmp_path / "pylock.toml").write_text(
        tomli_w.dumps(
            {
                "lock-version": "1.0",
                "created-by": "me",
                "packages": [
                    {
                        "name": name,
                        "version": version,
                        "sdist": {
                            "name": f"{name}-{version}.tar.gz",
                            "url": archive.as_uri(),
                            "hashes": {"sha256": sha256(archive)},
                        },
                    }
                ],
            }
        )
    )
    wanted = Wanted.of(files=[tmp_path / "pylock.toml"], builds=[name])
    with pytest.raises(ResolveError, match=rf"{name} {version} builds own_name-1\.0"):
        house.add(wanted, targets=[HERE])
    assert sha256(house.directory / before.name) == sha256(before)
    house.check().raise_if_any()


@pytest.mark.slow
def test_a_commit_of_a_lock_may_call_its_version_otherwise(
    repository: Path, house: Wheelhouse, tmp_path: Path
) -> None:
    command = ["git", "-C", str(repository), "rev-parse", "v1"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    vcs = {"type": "git", "url": repository.as_uri(), "commit-id": commit, "subdirectory": "sub"}
    package = {"name": "own-name", "version": "1.1.dev3+gabc", "vcs": vcs}
    lock = {"lock-version": "1.0", "created-by": "me", "packages": [package]}
    (tmp_path / "pylock.toml").write_text(tomli_w.dumps(lock))
    house.add(Wanted.of(files=[tmp_path / "pylock.toml"]), targets=[HERE])
    assert names(house) == ["own_name-1.0"]


@pytest.mark.slow
def test_a_lock_beside_the_wheels_names_those_that_were_built(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    house = Wheelhouse(Path("../beside"))
    house.add(Wanted.of([str(project)]), targets=[HERE])
    text = (house.directory / "pylock.toml").read_text()
    (own,) = (one for one in Pylock.from_dict(toml.loads(text)).packages if one.name == "own-name")
    assert own.archive is not None
    assert own.archive.path == "own_name-1.0-py3-none-any.whl"


def test_what_a_project_would_have_git_fetch_is_not_foretold(
    house: Wheelhouse, tmp_path: Path
) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "mine"\nversion = "1"\n'
        'dependencies = ["own @ git+https://user:secret@host.invalid/own"]\n'
    )
    with pytest.raises(InputError, match="is not known before"):
        house.preview(Wanted.of(files=[file]), HERE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["project", "repository"])
def test_a_request_for_a_source_is_forgotten_in_its_original_form(
    project: Path, repository: Path, house: Wheelhouse, how: str
) -> None:
    text = f"own-name @ git+{repository.as_uri()}@v1#subdirectory=sub"
    wanted = Wanted.of(["./a project" if how == "project" else text])
    for _ in range(2):
        house.add(wanted, targets=[HERE])
    with pytest.raises(InputError) as caught:
        house.forget(Wanted.of(["own-name"]))
    assert (str(project) if how == "project" else "@v1#sub") in (caught.value.hint or "")
    assert house.forget(wanted) == 1
    house.prune()
    assert house.wheels() == []
