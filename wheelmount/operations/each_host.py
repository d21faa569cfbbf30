"""Run a command of wheelmount about a machine on every host."""

from __future__ import annotations

from collections.abc import Sequence

from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Output, Results
from wheelmount.operations import pools
from wheelmount.operations.launch import Launch
from wheelmount.operations.site import Site


def run(site: Site, argv: Sequence[str], output: Output | None = None) -> Results:
    """Run the command line on every host.

    Args:
        site: the hosts.
        argv: arguments of the command line on hosts.
        output: receives output as it arrives; None to keep it in the results.
    """
    line = "python", "-m", "wheelmount.cli.main", *argv
    command = Command(line, environment=site.settings.chosen("runtime_dir", "state_dir"))
    with pools.at(site, namespaces=False, visible=True) as pool:
        commands = {host.name: command for host in pool.hosts}
        return pool.run(commands, "ask", Launch(output=output))
