"""Commands in environments that are mounted: ``run --with``, ``exec --with`` and ``env``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uv

from tests.conftest import NOBODY, Cli
from tests.containers.test_ordinary_user import as_user
from tests.wheels.support import Index, make_wheel

pytestmark = [pytest.mark.hosts, pytest.mark.fuse]

TOOL = b"def main():\n    import sys\n    print('tool', sys.prefix, *sys.argv[1:])\n"


@pytest.fixture
def index(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index of ``small``, ``other`` that needs it, and ``large``, which uv takes alone."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    place = workplace / "index"
    make_wheel(place, "small")
    make_wheel(place, "other", requires=["small"], module=TOOL)
    make_wheel(place, "large", padding=2 << 20)
    with Index(place) as index:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
        monkeypatch.setenv("UV_NO_CONFIG", "1")
        monkeypatch.setenv("UV_CACHE_DIR", str(workplace / "uv"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield index


def script(workplace: Path, name: str, text: str) -> str:
    (workplace / "work" / name).write_text(text)
    return name


@pytest.mark.costly
@pytest.mark.usefixtures("index")
def test_an_environment_on_hosts_of_a_session(cli: Cli, workplace: Path) -> None:
    name = script(workplace, "s.py", "import sys, large\nprint(sys.prefix, *sys.argv[1:])\n")
    assert cli("up", "--hosts", "local:2", "--name", "env").returncode == 0
    try:
        run = ["run", "--with", "large", "--hosts", "session:env"]
        done = cli(*run, name, "--epochs", "3", "-q")
        assert done.returncode == 0, done.stderr
        first, second = (line for line in done.stdout.splitlines() if not line.startswith("=="))
        assert first == second
        assert first.endswith(" --epochs 3 -q")
        assert "environment: 1 package" in done.stderr
        assert "scan" not in done.stderr, "what was just made is known"
        # Nothing is made or sent a second time.
        done = cli(*run, name)
        assert done.returncode == 0, done.stderr
        for step in ("environment:", "resolve", "unpack", "scan", "send"):
            assert step not in done.stderr
        # It is made again if it is gone, although the session still has it mounted.
        listed = json.loads(cli("env", "ls", "--json").stdout)
        cached = workplace / "cache" / "environments" / listed[0]["name"]
        shutil.rmtree(cached)
        done = cli(*run, name)
        assert done.stdout.count(first.split()[0]) == 2, done.stderr
        assert (cached / "bin" / "python").exists()
        assert "send" not in done.stderr
        # One package more: that travels alone.
        done = cli(*run, "--with", "small", name)
        assert done.returncode == 0, done.stderr
        mounts = json.loads(cli("status", "--json").stdout)["mounts"]
        new = [mount for mount in mounts if mount["mntpoint"] != first.split()[0]]
        assert (len(mounts), len(new)) == (4, 2)
        for mount in new:
            assert mount["delivery"]["reused"] > 1 << 20
            assert sum(mount["delivery"]["received"].values()) < 1 << 20
        listed = json.loads(cli("env", "ls", "--json").stdout)
        assert sorted(len(one["packages"]) for one in listed) == [1, 2]
        held = listed[0]["name"]
        refused = cli("env", "rm", held)
        assert refused.returncode != 0
        assert "hint: wheelmount umount" in refused.stderr
        assert "removed environment " not in cli("cache", "clean").stdout
    finally:
        assert cli("down", "env").returncode == 0
    assert cli("env", "rm", held).stdout == f"{held} removed\n"
    assert "removed environment " in cli("cache", "clean").stdout
    assert cli("env", "ls").stdout == ""
    assert cli("env", "rm", held).returncode == 64


@pytest.mark.costly
@pytest.mark.usefixtures("index")
def test_what_runs_in_an_environment(cli: Cli, workplace: Path) -> None:
    inline = "# /// script\n# requires-python = '>=3.9'\n# dependencies = ['other']\n# ///\n"
    name = script(workplace, "s.py", f"{inline}import small, other; print(small.VALUE)\n")
    done = cli("run", name)
    assert done.stdout == "1.0\n", done.stderr
    # A directory beside it, a shell script, standard input, a command.
    done = cli("run", ".", name)
    assert done.stdout == "1.0\n", done.stderr
    name = script(workplace, "s.sh", "python -c 'import small; print(small.VALUE)'; pwd\n")
    done = cli("run", "--with", "small", ".", name)
    assert done.stdout == f"1.0\n{workplace}/work\n", done.stderr
    done = cli("run", "--with", "small", "-", input="import small; print(2)", stdin=None)
    assert done.stdout == "2\n", done.stderr
    (workplace / "work" / "r.txt").write_text("small\n")
    done = cli("run", "-r", "r.txt", "python", "-c", "import small; print(3)")
    assert done.stdout == "3\n", done.stderr
    name = script(workplace, "s.py", "# /// script\n# requires-python = '<3'\n# ///\n")
    done = cli("run", name)
    assert done.returncode == 64
    assert "requires Python <3" in done.stderr


def _own_python() -> Path | None:
    """Return the prefix of a Python of this version on PATH that is not the system's."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for directory in os.get_exec_path():
        program = Path(directory, name)
        if program.is_file():
            code = "import sys; print(sys.base_prefix)"
            prefix = subprocess.run(
                [program, "-c", code], capture_output=True, text=True, check=False
            ).stdout.strip()
            if prefix not in ("", "/usr", "/usr/local"):
                return Path(prefix)
    return None


@pytest.mark.costly
@pytest.mark.usefixtures("index")
def test_a_python_that_comes_along(cli: Cli, workplace: Path) -> None:
    if (prefix := _own_python()) is None:
        pytest.skip("there is only the system's Python")
    code = "import small, sys, ssl; print(small.VALUE, sys.prefix == sys.base_prefix, sys.prefix)"
    python = workplace / "python"  # that hosts find nowhere else
    shutil.copytree(
        prefix,
        python,
        symlinks=True,
        ignore=shutil.ignore_patterns("test", "site-packages", "*.a", "__pycache__"),
    )
    path = python / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    run = ["run", "--python", path, "--with", "small", "--hosts", "local:1"]
    done = cli(*run, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.0 True ")
    assert "/environment-" in done.stdout
    done = cli("run", "--python", "/usr/bin/python3", "--with", "small", "python", "-V")
    assert done.returncode in (64, 69)
    assert "hint: give a version" in done.stderr


@pytest.mark.costly
def test_a_project(cli: Cli, workplace: Path, index: Index) -> None:
    project = workplace / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.9"\n'
        'dependencies = ["small"]\n'
    )
    command = ["python", "-c", "import small; print(small.VALUE)"]
    done = cli("run", "--project", project, *command)
    assert done.stdout == "1.0\n", done.stderr
    lock = [uv.find_uv_bin(), "lock", "-q"]
    subprocess.run(lock, cwd=project, check=True, timeout=120)
    make_wheel(index.directory, "small", "2.0")
    done = cli("run", "--project", project, *command)
    assert done.stdout == "1.0\n", done.stderr  # as it is locked
    (project / "uv.lock").unlink()
    done = cli("run", "--project", project, "--upgrade", *command)
    assert done.stdout == "2.0\n", done.stderr


def test_words_that_mean_another_thing(cli: Cli, workplace: Path) -> None:
    done = cli("install", "--with", "pip", "requests")
    assert done.returncode == 64
    assert "hint: the tool that installs: --tool" in done.stderr
    name = script(workplace, "s.py", "print(1)\n")
    done = cli("run", name)
    assert done.returncode == 64
    assert f"hint: wheelmount run . {name}" in done.stderr
    done = cli("run", ".", "nothing.py")
    assert done.returncode == 66
    assert "cannot read the script nothing.py" in done.stderr


@pytest.mark.costly
@pytest.mark.containers
@pytest.mark.usefixtures("index")
def test_an_environment_in_containers(cli: Cli, sif: Path) -> None:
    command = ["python", "-c", "import small, sys; print(small.VALUE, sys.prefix)"]
    done = cli("exec", "--with", "small", "--image", sif, "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1.0 /")
    assert "/environment-" in done.stdout
    # With a wheelhouse too, from which the image's own Python gets packages.
    assert cli("download", "large", "-d", "house").returncode == 0
    own = "python3 -c 'import small, sys; print(small.VALUE, sys.prefix)'"
    system = "pip install -q large && /usr/bin/python3 -c 'import large; print(large.VALUE)'"
    both = ["--with", "small", "--packages", "house", "--image", sif]
    done = cli("exec", *both, "--", "sh", "-c", f"ls /packages/*.whl && {own} && {system}")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "/packages/large-1.0-py3-none-any.whl"
    assert second.startswith("1.0 /")
    assert "/environment-" in second
    assert third == "1.0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user; this is one")
def test_an_environment_of_an_ordinary_user() -> None:
    def work(place: Path) -> None:
        for name in ("runtime", "store", "cache", "state"):
            (place / name).mkdir(mode=0o700)
            variable = f"WHEELMOUNT_{name.upper()}" + ("_DIR" if name != "store" else "")
            os.environ[variable] = str(place / name)
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            del os.environ[name]
        os.environ |= {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(place / "uv")}
        make_wheel(place / "wheels", "small")
        code = "import os, small, sys; print(small.VALUE, sys.prefix, os.getuid())"
        command = [sys.executable, "-m", "wheelmount.cli.main", "run", "--with", "small"]
        command += ["--find-links", str(place / "wheels"), "--hosts", "local:2"]
        done = subprocess.run(
            [*command, "python", "-c", code],
            capture_output=True,
            text=True,
            timeout=180,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = {line for line in done.stdout.splitlines() if line.startswith("1.0 ")}
        assert len(said) == 1, done.stdout
        (line,) = said
        assert "/environment-" in line
        assert line.endswith(f" {NOBODY}")

    as_user(work)
