"""Whatever a user's umask is, other users cannot write to what wheelmount makes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.test_ordinary_user import as_user
from tests.wheels.support import make_wheel

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.fuse,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user; this is one"),
]


def as_root(work: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        work(Path(place))


EXTREMES = [(0o000, as_root), (0o077, as_user)]

extremes = pytest.mark.parametrize(("umask", "run_as"), EXTREMES)

umasks = pytest.mark.parametrize(
    ("umask", "run_as"), [*EXTREMES, (0o000, as_user), (0o002, as_root)]
)


def writable(place: Path) -> Iterator[str]:
    """All paths below a place that group or others may write to, as far as they can get."""
    for path in place.iterdir():
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            continue
        if status.st_mode & 0o022:
            yield f"{stat.filemode(status.st_mode)} {path}"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o011:
            yield from writable(path)


class Home:
    """A user's home directory, with wheels, in which commands run with a umask."""

    def __init__(self, place: Path, umask: int) -> None:
        self.place = place
        self.umask = umask
        place.chmod(0o755)  # so that others get as far as each path's own mode lets them
        passed = ("PIP_", "UV_", "XDG_", "WHEELMOUNT_")
        self.environ = {n: value for n, value in os.environ.items() if not n.startswith(passed)}
        for name in ("runtime", "store", "cache", "state"):
            variable = f"WHEELMOUNT_{name.upper()}" + ("_DIR" if name != "store" else "")
            self.environ[variable] = str(place / "var" / name / "inner")
        self.environ |= {
            "HOME": str(place),
            "UV_OFFLINE": "1",
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(place / "var" / "uv"),
        }
        wheels = place / "wheels"
        make_wheel(wheels, "small")
        make_wheel(wheels, "other", requires=["small"])
        (place / "work").mkdir()
        subprocess.run(["chmod", "-R", "go-w", place], check=True)
        self.given = "--find-links", str(wheels)

    def run(self, *words: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)],
            cwd=self.place / "work",
            env=self.environ,
            umask=self.umask,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout

    def check(self) -> None:
        """Assert that no other user may write to any file or directory that was made."""
        assert list(writable(self.place)) == []


@pytest.mark.costly
@extremes
def test_wheels_and_environments(umask: int, run_as: Callable[..., None]) -> None:
    def work(place: Path) -> None:
        home = Home(place, umask)
        home.run("download", "other", *home.given, "-d", "new/house")
        home.check()
        code = "import other, small; print(small.VALUE)"
        run = ["run", "--hosts", "local:1", "--with", "other", *home.given]
        assert home.run(*run, "python", "-c", code) == "1.0\n"
        home.check()
        install = ["install", "other", *home.given, "--hosts", "local:1", "--venv"]
        for number, more in enumerate([[], ["--tool", "pip"], ["--link-mode", "copy"]]):
            venv = place / "work" / f"made{number}" / "venv"
            home.run(*install, venv, *more)
            home.check()
            done = subprocess.run([venv / "bin" / "python", "-c", code], check=False)
            assert done.returncode == 0

    run_as(work)


@pytest.mark.costly
@umasks
def test_mounts_and_sessions(umask: int, run_as: Callable[..., None]) -> None:
    def work(place: Path) -> None:
        home = Home(place, umask)
        point = place / "above" / "mounts" / "{host}"
        home.run("mount", place / "wheels", point, "--hosts", "local:1")
        try:
            above = place / "above"
            for path in (above, above / "mounts"):
                assert not path.stat().st_mode & 0o022
            assert (above / "mounts" / "host0" / "small-1.0-py3-none-any.whl").exists()
            home.check()
        finally:
            home.run("umount", place / "wheels")
        home.check()
        home.run("up", "--hosts", "local:1")
        try:
            # The script has the user's own umask.
            script = 'umask; mkdir -p "$WHEELMOUNT_OUTPUT/a/b"; touch "$WHEELMOUNT_OUTPUT/a/b/c"\n'
            (place / "work" / "script.sh").write_text(script)
            collect = ["--collect", "$WHEELMOUNT_OUTPUT", "results", "--output-dir", "logs/of"]
            home.run("run", *collect, place / "wheels", "script.sh")
            said = (place / "work" / "logs" / "of" / "host0.out").read_text()
        finally:
            home.run("down")
        assert said.strip() == f"{umask:04o}"
        home.check()

    run_as(work)


@pytest.mark.costly
@pytest.mark.containers
@extremes
def test_containers(umask: int, run_as: Callable[..., None], sif: Path) -> None:
    def work(place: Path) -> None:
        home = Home(place, umask)
        where = "--hosts", "local:1", "--image", str(sif)
        home.run("install", "other", *home.given, *where)
        home.check()
        assert home.run("exec", *where, "--", "python", "-c", "import other; print(1)") == "1\n"
        home.check()
        home.run("image", "init", "python", "definitions/mine")
        home.check()
        if os.geteuid() == 0:
            definition = place / "work" / "small.def"
            definition.write_text(f"Bootstrap: localimage\nFrom: {sif}\n")
            home.run("image", "build", definition, place / "images" / "small.sif")
            home.check()

    run_as(work)
