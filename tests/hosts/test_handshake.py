"""Hosts that have another wheelmount than their client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import wheelmount
from tests.conftest import Cli
from wheelmount import remotemount
from wheelmount.config import Settings
from wheelmount.errors import HostError
from wheelmount.hosts import handshake
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands
from wheelmount.hosts.local import LocalHosts

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]


def _newer(package: Path) -> None:
    init = package / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    # As a later one may have it: with settings of which this one knows nothing.
    config = package / "config.py"
    config.write_text(config.read_text().replace('    hosts: str = ""', '    addresses: str = ""'))
    agent = package / "mount" / "host" / "agent.py"
    agent.write_text(agent.read_text().replace("class Agent(", "class Hand("))


def _edited(package: Path) -> None:
    with (package / "errors.py").open("a") as file:
        file.write("# other\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_newer, r"it has wheelmount 9\.\S+, and this client"),
        (_edited, "it has other code of wheelmount"),
    ],
)
def test_is_refused_by_name(
    source: Path,
    workplace: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    said: str,
) -> None:
    other = workplace / "other"
    shutil.copytree(Path(wheelmount.__file__).parent, other / "wheelmount")
    change(other / "wheelmount")
    with LocalHosts(1, settings, namespaces=False) as same:
        monkeypatch.setenv("PYTHONPATH", str(other))
        with LocalHosts(1, settings, namespaces=False) as hosts:
            monkeypatch.delenv("PYTHONPATH")
            with pytest.raises(HostError, match=f"host0: {said}") as error:
                remotemount(hosts, source, str(workplace / "w"), settings=settings).open()
            assert "install the same wheelmount" in str(error.value.hint)
            with Commands(list(hosts), settings.start_timeout) as commands:
                (result,) = commands.run({"host0": Command(("true",))}).values()
            assert isinstance(result, HostError)
            assert result.hint == error.value.hint
        with remotemount(same, source, str(workplace / "w"), settings=settings) as mount:
            mount.wait(60)


def test_a_session_of_another_version_is_refused(cli: Cli, source: Path, workplace: Path) -> None:
    assert cli("up", "--hosts", "local:1").returncode == 0
    try:
        (file,) = workplace.glob("runtime/*/sessions/default/*.json")
        record = json.loads(file.read_text())
        assert record["notes"]["versions"] == handshake.here()
        record["notes"]["versions"]["wheelmount"] = "9.9"
        file.write_text(json.dumps(record))
        done = cli("run", source, "-", stdin=None, input="true")
        assert done.returncode == 68
        assert "session default has wheelmount 9.9, and this client" in done.stderr
        assert "hint: `wheelmount down default`, then `wheelmount up`" in done.stderr
    finally:
        assert cli("down").returncode == 0
