"""``wheelmount config``."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from tests.conftest import Cli
from wheelmount.cli.main import cli as cli_group
from wheelmount.errors import SourceError
from wheelmount.hosts import slurm


@pytest.mark.slow
def test_a_project_is_passed_over_aloud_until_it_is_trusted(cli: Cli, workplace: Path) -> None:
    file = workplace / "work" / "wheelmount.toml"
    file.write_text('hosts = "ssh:nowhere.invalid"\nring = 8\n')

    def shown() -> dict[str, tuple[object, str]]:
        records = json.loads(cli("config", "--json").stdout)
        return {each["name"]: (each["value"], each["from"]) for each in records}

    assert shown()["hosts"] == ("", "default")
    assert shown()["ring"] == (8, str(file))
    (line,) = cli("status").stderr.splitlines()
    assert f"settings: {file} may not set hosts, which is passed over; if you trust it, run" in line
    assert f"`wheelmount config trust {file.parent}`" in line

    trusted = cli("config", "trust")
    assert trusted.returncode == 0
    assert trusted.stdout == f"{file} is trusted\nhosts = 'ssh:nowhere.invalid'\nring = 8\n"
    assert shown()["hosts"] == ("ssh:nowhere.invalid", str(file))
    assert cli("config").stderr == ""

    assert cli("config", "trust", "--remove", ".").returncode == 0
    assert shown()["hosts"] == ("", "default")
    assert cli("config", "trust", workplace / "state").returncode == SourceError.exit_code


@pytest.mark.parametrize("command", ["up", "mount"])
def test_commands_in_an_allocation_use_its_nodes(
    command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    found = cli_group.get_command(click.Context(cli_group), command)
    assert found is not None
    (spec,) = (each for each in found.params if each.name == "spec")
    default = spec.default
    assert callable(default)
    for name in ("WHEELMOUNT_HOSTS", "WHEELMOUNT_HOST", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert default() == "local:1"
    monkeypatch.setattr(slurm, "expand", lambda nodes: nodes.split(","))  # without Slurm
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1,node2,node3,node4")
    assert default() == "slurm:4"
    monkeypatch.setenv("WHEELMOUNT_HOSTS", "local:2")
    assert default() == "local:2"
    monkeypatch.setenv("WHEELMOUNT_HOSTS", "")
    monkeypatch.setenv("WHEELMOUNT_HOST", "node1")  # on a host
    assert default() == "local:1"
