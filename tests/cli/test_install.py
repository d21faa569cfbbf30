"""The main job: ``wheelmount install`` on two hosts, into containers and virtual environments."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Cli

PACKAGES = ("requests", "numpy", "pandas")
VERSION = "import pandas, numpy, requests; print(pandas.__version__)"

pytestmark = [pytest.mark.network, pytest.mark.hosts, pytest.mark.fuse]


@pytest.mark.costly
@pytest.mark.containers
def test_packages_install_offline_in_a_container_on_each_host(
    cli: Cli, sif: Path, workplace: Path
) -> None:
    done = cli("install", *PACKAGES, "--hosts", "local:2", "--image", sif, "-d", "wheels")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("+ pandas==") == 2
    house = workplace / "work" / "wheels"
    (pandas,) = house.glob("pandas-*.whl")
    version = pandas.name.split("-")[1]

    host = ["exec", "--hosts", "local:2", "--image", sif]
    done = cli(*host, "--", "python", "-c", VERSION)
    assert done.stdout == f"== host0 ==\n{version}\n== host1 ==\n{version}\n", done.stderr

    # Plain commands, no flags: what points them at the mount is bound, with the packages.
    for tool in (["pip"], ["uv", "pip"]):
        overlay = ["--overlay", f"plain-{len(tool)}"]
        done = cli(*host, *overlay, "--packages", house, "--", *tool, "install", "requests")
        assert done.returncode == 0, done.stderr
        done = cli(*host, *overlay, "--json", "--", "python", "-c", "import requests")
        assert [record["code"] for record in json.loads(done.stdout)] == [0, 0]
        missing = cli(*host, *overlay, "--packages", house, "--", *tool, "install", "flask")
        assert missing.returncode == 1
        assert f"hint: wheelmount download flask -d {house}" in missing.stderr

    done = cli(*host, "--json", "--", "cat", "/proc/net/dev")
    for record in json.loads(done.stdout):
        names = [line.split(":")[0].strip() for line in record["stdout"].splitlines()[2:]]
        assert names == ["lo"]


@pytest.mark.costly
@pytest.mark.parametrize("tool", ["uv", "pip", "wheelmount"])
def test_packages_install_into_a_virtual_environment_on_each_host(
    cli: Cli, workplace: Path, tool: str
) -> None:
    # Whatever the user's own settings say, hosts ask no index.
    environment = {
        **os.environ,
        "PIP_INDEX_URL": "http://127.0.0.1:1/simple",
        "PIP_NO_INDEX": "0",
    }
    arguments = ["install", "requests", "--tool", tool, "--hosts", "local:2", "--venv", "env"]
    done = cli(*arguments, env=environment)
    assert done.returncode == 0, done.stderr
    for name in ("host0", "host1"):
        venv = workplace / "work" / f"env-{name}"
        code = "import requests, sys; print(sys.prefix)"
        run = subprocess.run(
            [venv / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
        )
        assert run.stdout == f"{venv}\n"
        assert not (venv / ".wheelmount-cache").exists()


@pytest.mark.costly
def test_links_into_a_mount_that_stays(cli: Cli, workplace: Path) -> None:
    install = ["install", "requests", "--hosts", "local:2", "--venv", "env"]
    for said in ("linked 5 packages", "linked 0 packages"):  # the second time it is mounted already
        done = cli(*install, "--link-mode", "symlink")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(said) == 2
    mounted = json.loads(cli("status", "--json").stdout)["mounts"]
    assert [mount["host"] for mount in mounted] == ["host0", "host1"]
    venv = workplace / "work" / "env-host1"
    script = "import os, requests; print(os.path.realpath(requests.__file__))"
    run = [str(venv / "bin" / "python"), "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(mounted[1]["mntpoint"])
    assert cli("umount", "--all").returncode == 0
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "which is not mounted\nhint: " in done.stderr
    assert cli(*install, "--link-mode", "copy").returncode == 0
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(venv))
    assert done.stderr == ""


@pytest.mark.costly
@pytest.mark.parametrize("how", [["--link-mode", "symlink"], ["--tool", "uv"]], ids=" ".join)
def test_what_a_session_gets_later_joins_what_it_has(cli: Cli, how: list[str]) -> None:
    assert cli("up", "--hosts", "local:1", "--name", "later").returncode == 0
    try:
        install = ["install", "--hosts", "session:later", "--venv", "env", *how]
        for name in ("idna", "six"):
            done = cli(*install, name)
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("\n + ") == 1
        # Both through one mount, which was refreshed: nothing of the first was sent again.
        mounted = json.loads(cli("status", "--json").stdout)["mounts"]
        assert len(mounted) == 1
        script = "env/bin/python -c 'import idna, six'"
        done = cli("run", ".", "--hosts", "session:later", "-", input=script, stdin=None)
        assert done.returncode == 0, done.stderr
    finally:
        assert cli("down", "later").returncode == 0


@pytest.mark.network
@pytest.mark.hosts
def test_a_directory_by_two_names_in_a_session(cli: Cli, workplace: Path) -> None:
    (workplace / "work" / "real").mkdir()
    (workplace / "work" / "link").symlink_to("real")
    assert cli("up", "--hosts", "local:1", "--name", "names").returncode == 0
    try:
        for name in ("real", "link", "real"):
            done = cli("install", "--hosts", "session:names", "-d", f"{name}/house", "six")
            assert done.returncode == 0, done.stderr
    finally:
        assert cli("down", "names").returncode == 0


def test_links_are_not_for_uv_and_pip(cli: Cli) -> None:
    done = cli("install", "requests", "--tool", "uv", "--link-mode", "symlink")
    assert done.returncode == 64
    assert "hint: " in done.stderr


@pytest.mark.costly
@pytest.mark.containers
@pytest.mark.parametrize("mode", ["copy", "symlink"])
def test_unpacked_packages_in_a_container(cli: Cli, sif: Path, workplace: Path, mode: str) -> None:
    for name in ("requests", "six"):
        done = cli("install", name, "--image", sif, "--link-mode", mode)
        assert done.returncode == 0, done.stderr
    tree = done.stderr.partition("--packages ")[2].split("\n")[0]
    packages = ["--packages", tree] if mode == "symlink" else []
    code = "import requests, six, sys; print(requests.__file__); print(six.__spec__.cached)"
    done = cli("exec", "--image", sif, *packages, "--", "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "/usr/local/lib/python3" in done.stdout
    if mode == "symlink":  # without what it needs it says so, and imports nothing empty silently
        done = cli("exec", "--image", sif, "--", "python3", "-c", "import requests")
        assert "are links into /packages, which is not mounted\nhint: " in done.stderr
        assert "--packages" in done.stderr
    done = cli("exec", "--image", sif, *packages, "--", "pip", "uninstall", "-y", "requests")
    assert "Successfully uninstalled requests" in done.stdout
    done = cli("exec", "--image", sif, *packages, "--", "pip", "list")
    assert "six" in done.stdout
    assert "requests" not in done.stdout


@pytest.mark.costly
@pytest.mark.containers
def test_plain_uv_in_a_container_links_what_is_unpacked(cli: Cli, sif: Path) -> None:
    done = cli("install", "idna", "--image", sif, "--link-mode", "symlink", "--overlay", "first")
    tree = done.stderr.partition("--packages ")[2].split("\n")[0]
    script = """
eval "$(python3 -I /packages/install /packages/plans/*.json uv /usr/local/linked)"
uv pip install idna && python3 -c 'import idna, os; print(os.path.realpath(idna.__file__))'
"""
    container = ["exec", "--image", sif, "--overlay", "other", "--packages", tree]
    done = cli(*container, "--", "sh", "-c", script)
    assert done.stdout.startswith("/packages/idna-"), done.stderr


def test_a_file_of_requirements_installs_what_it_pins(cli: Cli, workplace: Path) -> None:
    (workplace / "work" / "wanted.txt").write_text("idna<3.8  # old\n")
    done = cli("install", "-r", "wanted.txt", "--venv", "env")
    assert done.returncode == 0, done.stderr
    code = "import idna; print(idna.__version__)"
    run = [str(workplace / "work" / "env" / "bin" / "python"), "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "3.7\n"


def test_download_and_check_for_another_target(cli: Cli, workplace: Path) -> None:
    target = ["--python-version", "3.12", "--platform", "manylinux_2_28_aarch64"]
    done = cli("download", "numpy", "-d", "wheels", *target, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert any("cp312" in wheel and "aarch64" in wheel for wheel in report["wheels"])
    assert (workplace / "work" / "wheels" / "pylock.toml").is_file()
    assert cli("check", "wheels", "numpy", *target).returncode == 0
    here = cli("check", "wheels", "numpy", "--python-version", "3.11")
    assert here.returncode == 65
    assert "numpy" in here.stderr
    again = json.loads(cli("download", "numpy", "-d", "wheels", *target, "--json").stdout)
    assert again["fetched"] == []
