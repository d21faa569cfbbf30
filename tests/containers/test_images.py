"""The project's definitions, built and used. Each image is kept for the next run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT
from tests.containers.conftest import built
from wheelmount.containers import image
from wheelmount.containers.container import Container

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


def run(made: Path, place: Path, script: str) -> str:
    with Container(made, place / "work") as container, (place / "said").open("w+") as said:
        code = container.run(["sh", "-ec", script], stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        text = said.read()
    assert code == 0, text
    return text


@pytest.mark.costly
def test_gpu(sif: Path, tmp_path: Path) -> None:
    made = built("gpu", sif)
    assert (
        run(made, tmp_path, "echo $CUDA_DEVICE_ORDER; touch $CUDA_CACHE_PATH/x") == "PCI_BUS_ID\n"
    )


@pytest.mark.costly
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


@pytest.mark.costly
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
