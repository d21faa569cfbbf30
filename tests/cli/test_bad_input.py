"""Bad input: one clear line, a hint, an exit code that means something, and nothing left behind."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli

HIDE_FUSE = """
mount -t tmpfs none /dev
for node in null:3 zero:5 urandom:9; do mknod -m 666 /dev/${node%:*} c 1 ${node#*:}; done
ln -s /proc/self/fd /dev/fd
exec "$@"
"""


def _assert_refused(
    done: subprocess.CompletedProcess[str], code: int, *words: str, out: str = ""
) -> None:
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert lines[-1].startswith("hint: "), done.stderr
    assert all(word in errors[0] for word in words), errors
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (code, out)


_CLOSED = (  # what each command does first with the path
    ("run", "{path}"),
    ("run", ".", "{path}"),
    ("exec", "--image", "{path}", "--", "true"),
    ("image", "build", "{path}"),
    ("check", "{path}"),
    ("download", "-d", "{path}", "six"),
    ("download", "-d", ".", "-r", "{path}"),
    ("mount", "{path}"),
)


@pytest.mark.slow
@pytest.mark.parametrize("words", _CLOSED, ids=" ".join)
@pytest.mark.parametrize("why", ["denied", "too long"])
def test_a_path_that_cannot_be_used(
    cli: Cli, workplace: Path, words: tuple[str, ...], why: str
) -> None:
    folder = workplace / "closed"
    folder.mkdir()
    path = folder / "file" if why == "denied" else folder / ("x" * 300)
    folder.chmod(0 if why == "denied" else 0o700)
    command = [sys.executable, "-m", "wheelmount.cli.main"]
    command += [word.format(path=path) for word in words]
    if os.getuid() == 0:  # root reads all by a capability
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", "--bounding-set", rights, "--inh-caps", rights, *command]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=workplace, timeout=90
    )
    errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == 1 and str(path)[:40] in errors[0], done.stderr
    assert "unexpected" not in done.stderr and "Traceback" not in done.stderr
    assert done.returncode in (2, 64, 65, 66, 73), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["mount", "run"])
@pytest.mark.parametrize("spec", ["nonsense", "local:0", "local:many", "slurm"])
def test_host_spec(cli: Cli, source: Path, command: str, spec: str) -> None:
    script = ["-"] if command == "run" else []
    _assert_refused(cli(command, source, "--hosts", spec, *script), 64, spec)


def test_host_spec_of_the_environment(cli: Cli, source: Path) -> None:
    environment = {**os.environ, "WHEELMOUNT_HOSTS": "nonsense"}
    _assert_refused(cli("mount", source, env=environment), 64, "nonsense")


def test_setting(cli: Cli, source: Path) -> None:
    environment = {**os.environ, "WHEELMOUNT_RING": "some"}
    _assert_refused(cli("mount", source, env=environment), 78, "WHEELMOUNT_RING")


@pytest.mark.hosts
def test_missing_source(cli: Cli, workplace: Path) -> None:
    done = cli("mount", workplace / "missing", workplace / "w")
    _assert_refused(done, 66, "missing")


@pytest.mark.slow
def test_missing_script(cli: Cli, source: Path) -> None:
    _assert_refused(cli("run", source, "missing.sh"), 66, "missing.sh")


@pytest.mark.hosts
def test_mount_point_not_empty(cli: Cli, source: Path, workplace: Path) -> None:
    (workplace / "full").mkdir()
    (workplace / "full" / "file").touch()
    _assert_refused(cli("mount", source, workplace / "full"), 73, "is not empty")


@pytest.mark.hosts
@pytest.mark.fuse
def test_mount_point_already_mounted(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("mount", source, workplace / "w").returncode == 0
    _assert_refused(cli("mount", source, workplace / "w"), 73, "is mounted at", "already")
    assert cli("umount", workplace / "w").returncode == 0


@pytest.mark.hosts
def test_mount_over_its_own_source(cli: Cli, source: Path) -> None:
    _assert_refused(cli("mount", source, "--hosts", "local:1"), 64, "hide its own source")


@pytest.mark.hosts
def test_no_dev_fuse(source: Path, workplace: Path) -> None:
    command = [
        "unshare",
        "-m",
        "--propagation",
        "slave",
        "sh",
        "-ec",
        HIDE_FUSE,
        "sh",
        sys.executable,
    ]
    done = subprocess.run(
        [*command, "-m", "wheelmount.cli.main", "mount", str(source), str(workplace / "w")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    _assert_refused(done, 69, "/dev/fuse")


@pytest.mark.slow
def test_umount_of_nothing(cli: Cli, workplace: Path) -> None:
    _assert_refused(cli("umount", workplace / "w"), 73, "nothing mounted")
    _assert_refused(cli("umount"), 64, "nothing to unmount")


@pytest.mark.slow
def test_an_environment_whose_python_is_broken(cli: Cli, workplace: Path) -> None:
    python = workplace / "work" / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    _assert_refused(cli("install", "idna", "--venv", "env"), 68, "env does not say what it is: it")


@pytest.mark.network
def test_unknown_package(cli: Cli, workplace: Path) -> None:
    name = "wheelmount-has-no-such-package"
    _assert_refused(cli("download", name, "-d", workplace / "wheels"), 65, name)
    assert list((workplace / "wheels").glob("*.whl")) == []


@pytest.mark.network
def test_no_wheel_for_the_target(cli: Cli, workplace: Path) -> None:
    arguments = ["numpy==2.0.0", "--python-version", "3.13", "-d", workplace / "wheels"]
    _assert_refused(cli("download", *arguments), 65, "numpy", "3.13")


@pytest.mark.parametrize("requirement", ["--index-url=http://x", "not a name!", "a\n--b"])
def test_requirement(cli: Cli, workplace: Path, requirement: str) -> None:
    done = cli("download", "-d", workplace / "wheels", "--", requirement)
    _assert_refused(done, 64)


@pytest.mark.parametrize("place", ["argument", "file", "constraint"])
@pytest.mark.parametrize(
    "requirement",
    ["a @ http://[x/a.whl", "a @ git+http://[x/a", "a; os_name ~= 'posix'", "a; 'x' in extras"],
)
def test_requirement_without_a_meaning(
    cli: Cli, workplace: Path, requirement: str, place: str
) -> None:
    (workplace / "work" / "r.txt").write_text(f"{requirement}\n")
    given = {"argument": [requirement], "file": ["-r", "r.txt"], "constraint": ["a", "-c", "r.txt"]}
    done = cli("download", "-d", workplace / "wheels", *given[place])
    _assert_refused(done, 64, "no meaning" if ";" in requirement else "http://[x/a")


@pytest.mark.parametrize(
    "text",
    [
        f"a = {'[' * 900}{']' * 900}",
        'lock-version = "1.0"\ncreated-by = "me"\n[[packages]]\nname = "a"\nversion = "1"\n'
        'archive = {url = "http://[x/a-1-py3-none-any.whl", hashes = {sha256 = "00"}}',
        'lock-version = "1.0"\ncreated-by = "me"\n[[packages]]\nname = "a"\nversion = "1"\n'
        'index = "http://[x"\nmarker = "os_name ~= \'posix\'"',
    ],
    ids=["nested", "URL", "index"],
)
def test_lock(cli: Cli, workplace: Path, text: str) -> None:
    (workplace / "work" / "pylock.toml").write_text(text)
    done = cli("download", "-d", workplace / "wheels", "-r", "pylock.toml")
    _assert_refused(done, 65, "pylock.toml is not a lock file")


@pytest.mark.slow
def test_nothing_required(cli: Cli, workplace: Path) -> None:
    _assert_refused(cli("install"), 64, "nothing to install")
    _assert_refused(cli("download", "-d", workplace / "wheels"), 64, "nothing to download")


@pytest.mark.parametrize(
    "options",
    [
        ["--require-hashes"],
        ["--override", "file"],
        ["--pre"],
        ["--no-deps"],
        ["--exclude-newer", "2024-01-01"],
    ],
    ids=" ".join,
)
def test_options_without_requirements(cli: Cli, workplace: Path, options: list[str]) -> None:
    (workplace / "work" / "file").touch()
    _assert_refused(cli("check", workplace / "work", *options), 64, options[0])


def test_missing_requirements_file(cli: Cli, workplace: Path) -> None:
    done = cli("download", "-r", "missing.txt", "-d", workplace / "wheels")
    _assert_refused(done, 66, "missing.txt")


def test_platform(cli: Cli, workplace: Path) -> None:
    done = cli("download", "x", "--platform", "amiga", "-d", workplace / "wheels")
    _assert_refused(done, 64, "amiga")


def test_check_of_no_directory(cli: Cli, workplace: Path) -> None:
    _assert_refused(cli("check", workplace / "missing", "requests"), 66, "missing")


@pytest.mark.slow
def test_no_image(cli: Cli, workplace: Path) -> None:
    _assert_refused(cli("exec", "--", "true"), 64, "no image")
    done = cli("install", "requests", "--image", workplace / "missing.sif")
    _assert_refused(done, 66, "missing.sif")
    both = cli("install", "requests", "--image", "x.sif", "--venv", "y")
    _assert_refused(both, 64, "exclude")


@pytest.mark.slow
def test_no_apptainer(cli: Cli, workplace: Path) -> None:
    (workplace / "image.sif").touch()
    environment = {**os.environ, "PATH": str(workplace)}
    done = cli("install", "requests", "--image", workplace / "image.sif", env=environment)
    _assert_refused(done, 69, "apptainer")


@pytest.mark.parametrize(
    "words",
    [
        ("mount", ""),
        ("mount", ".", ""),
        ("run", "", "job.sh"),
        ("run", "--mntpoint", "", ".", "job.sh"),
        ("run", "--collect", "x", "", ".", "job.sh"),
        ("umount", ""),
        ("umount", "--force", "", "/mnt"),
        ("refresh", ""),
        ("verify", ""),
        ("exec", "--image", "", "--", "true"),
        ("exec", "--packages", "", "--", "true"),
        ("install", "--venv", "", "six"),
        ("download", "-d", "", "six"),
        ("check", ""),
        ("image", "ls", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path(cli: Cli, workplace: Path, words: tuple[str, ...]) -> None:
    """It is the value of an unset variable, and stands for nothing."""
    (workplace / "work" / "job.sh").write_text("true")
    done = cli(*words)
    assert done.returncode in (2, 64), done.stderr
    assert done.stdout == ""
    assert "rror: " in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("umount", "0123abcd"), 73),
        (("umount", "--all"), 0),
        (("umount", "relative"), 73),
        (("logs", "work"), 64),
        (("status",), 0),
        (("install", "six"), 66),
        (("download", "-d", "house", "six"), 66),
    ],
    ids=str,
)
def test_a_working_directory_that_was_deleted(
    cli: Cli, workplace: Path, words: tuple[str, ...], code: int
) -> None:
    gone = workplace / "gone"
    gone.mkdir()
    command = shlex.join([sys.executable, "-m", "wheelmount.cli.main", *words])
    script = f"cd {gone} && rmdir {gone} && exec {command}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    if code:
        _assert_refused(done, code)
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_a_user_without_a_home(workplace: Path) -> None:
    command = [sys.executable, "-m", "wheelmount.cli.main", "status"]
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        command, env=environment, user=54321, capture_output=True, text=True, check=False
    )
    _assert_refused(done, 78, "home directory of user 54321")


def test_images_that_are_none(cli: Cli, workplace: Path) -> None:
    (workplace / "work" / "gone.sif").symlink_to("nowhere")
    done = cli("image", "ls")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    _assert_refused(cli("image", "ls", "nowhere"), 66, "nowhere is no directory")
