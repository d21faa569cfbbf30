"""``wheelmount config``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from wheelmount.errors import SourceError


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
