"""Commands about a machine, carried out on every host about itself."""

from __future__ import annotations

from collections.abc import Sequence

from wheelmount.config import Settings
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Output, Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import pools
from wheelmount.operations.launch import Launch
from wheelmount.progress import Progress


def run(
    spec: HostSpec,
    argv: Sequence[str],
    settings: Settings,
    progress: Progress,
    output: Output | None = None,
) -> Results:
    """Run the command line on every host.

    Args:
        spec: the hosts.
        argv: its arguments there.
        settings: in force here.
        progress: told about each step.
        output: told of what they print as it comes; else the results hold it.
    """
    command = Command(("python", "-m", "wheelmount.cli.main", *argv))
    with pools.at(spec, settings, progress, namespaces=False) as pool:
        commands = {host.name: command for host in pool.hosts}
        return pool.run(commands, "ask", Launch(output=output))
