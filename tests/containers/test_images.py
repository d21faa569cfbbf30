"""The project's definitions, built and used. Each image is kept for the next run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from wheelmount.containers import image
from wheelmount.containers.container import Container

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


def built(name: str, sif: Path, **build_args: str) -> Path:
    """The image of ``images/NAME.def``, on top of that of ``python.def``."""
    made = sif.with_name(f"{name}.sif")
    definition = CHECKOUT / "images" / f"{name}.def"
    image.build(definition, made, build_args={"base": str(sif), **build_args})
    assert image.inspect(made).labels["wheelmount.image"] == name
    return made


def run(made: Path, place: Path, script: str) -> str:
    with Container(made, place / "work") as container, (place / "said").open("w+") as said:
        code = container.run(["sh", "-ec", script], stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        text = said.read()
    assert code == 0, text
    return text


@pytest.fixture(scope="session")
def ci(sif: Path) -> Path:
    return built("ci", sif)


def test_gpu(sif: Path, tmp_path: Path) -> None:
    made = built("gpu", sif)
    assert (
        run(made, tmp_path, "echo $CUDA_DEVICE_ORDER; touch $CUDA_CACHE_PATH/x") == "PCI_BUS_ID\n"
    )


def test_baked(sif: Path, wheels: Path, tmp_path: Path) -> None:
    mine = tmp_path / "wheels"
    shutil.copytree(wheels, mine)
    made = tmp_path / "baked.sif"
    definition = CHECKOUT / "images" / "baked.def"
    arguments = {"base": str(sif), "wheels": str(mine), "install": "greeting"}
    assert image.build(definition, made, build_args=arguments)
    assert not image.build(definition, made, build_args=arguments)
    said = run(
        made, tmp_path, "python -c 'import greeting, hello; print(hello.version)'; ls /packages"
    )
    assert said == "1.0\n"
    (mine / "hello-1.0-py3-none-any.whl").unlink()
    assert image.state(made) == image.OUTDATED


def test_ci(ci: Path, tmp_path: Path) -> None:
    extension = (
        "cd /tmp; git init -q p; cd p; cat >hi.c <<'C'\n"
        "#include <Python.h>\n"
        'static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "hi", 0, -1, 0};\n'
        "PyMODINIT_FUNC PyInit_hi(void) { return PyModule_Create(&d); }\n"
        "C\n"
        "gcc -shared -fPIC $(pkg-config --cflags python3) hi.c -o hi.so; python -c 'import hi'\n"
        "echo 'all:; @g++ --version >/dev/null' >Makefile; make; git add .; git status -s | wc -l"
    )
    assert run(ci, tmp_path, extension) == "3\n"


@pytest.mark.network
@pytest.mark.hosts
@pytest.mark.fuse
def test_a_project_is_tested_offline(ci: Path, workplace: Path) -> None:
    """The example, as it stands: pluggy's own tests, with everything they need from the mount."""
    script = CHECKOUT / "examples" / "ci" / "run.sh"
    environment = {**os.environ, "IMAGE": str(ci), "JOB": str(workplace / "job")}
    done = subprocess.run(
        [script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 100
    assert "failed" not in done.stdout
    # As that of a CI, its code tells.
    (workplace / "work" / "broken").write_text("exec python -m pytest -q /nowhere")
    image = ["--image", str(workplace / "job" / "img.sif"), "--overlay", "broken"]
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "run", workplace / "job",
         workplace / "work" / "broken", *image],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 1, "there is no pytest in a new overlay"


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml", "slurm.sh"])
def test_examples_name_what_is_there(name: str) -> None:
    folder = CHECKOUT / "examples" / "ci"
    text = (folder / name).read_text()
    scripts = set(re.findall(r"examples/[\w/-]+\.sh", text))
    assert f"examples/ci/{'test' if name == 'slurm.sh' else 'prepare'}.sh" in scripts
    for script in scripts:
        assert (CHECKOUT / script).is_file()
        subprocess.run(["bash", "-n", CHECKOUT / script], check=True)
    (run,) = re.findall(r"wheelmount run (.*)", text)
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "run", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for option in re.findall(r"--[\w-]+", run):
        assert option in done.stdout


def test_wheels_and_settings_written_into_an_image(sif: Path, wheels: Path, tmp_path: Path) -> None:
    # The way to do without a mount: wheels by %files, a pip.conf, and variables.
    folder = tmp_path / "packages"
    shutil.copytree(wheels, folder)
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    definition = tmp_path / "img.def"
    definition.write_text(
        f"Bootstrap: localimage\nFrom: {sif}\n"
        "%files\n    packages /wheels\n    pip.conf /etc/pip.conf\n"
        "%environment\n    export PIP_NO_CACHE_DIR=1\n    export BAKED=yes\n"
    )
    image.build(definition, tmp_path / "img.sif")
    said = run(tmp_path / "img.sif", tmp_path, "pip install -q greeting; pip list; echo $BAKED")
    assert "greeting" in said
    assert "yes" in said
