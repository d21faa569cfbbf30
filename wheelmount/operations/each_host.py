"""Run a command of wheelmount about a machine on every host."""

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
        argv: arguments of the command line on hosts.
        settings: the settings in force here.
        progress: informed of each step.
        output: receives output as it arrives; None to keep it in the results.
    """
    command = Command(("python", "-m", "wheelmount.cli.main", *argv))
    with pools.at(spec, settings, progress, namespaces=False, visible=True) as pool:
        commands = {host.name: command for host in pool.hosts}
        return pool.run(commands, "ask", Launch(output=output))
