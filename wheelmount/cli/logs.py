"""``wheelmount logs``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from wheelmount import config
from wheelmount.cli import completion, options, output
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import logbooks
from wheelmount.operations.logbooks import Logbook


@click.command()
@click.argument("target", default="", shell_complete=completion.logged)
@click.option("--follow", "-f", is_flag=True, help="Keep showing new lines.")
@options.some_hosts
@options.as_json
def logs(target: str, follow: bool, spec: HostSpec | None, as_json: bool) -> int:
    """Show the logs of mounts, instances and hosts, of this machine or of --hosts.

    TARGET is a mount point, source or identity that status shows, or the name of an instance;
    default all.
    """
    if spec is not None:
        return elsewhere(spec, ("logs",), target, follow=follow, as_json=as_json)
    show(logbooks.find(config.load(), target), follow=follow, as_json=as_json)
    return 0


def elsewhere(
    spec: HostSpec, command: Sequence[str], target: str, *, follow: bool, as_json: bool
) -> int:
    """Show the logs of other machines.

    Args:
        spec: the hosts.
        command: that shows them there.
        target: its argument; empty for none.
        follow: go on with what is logged from now on.
        as_json: print JSON.

    Raises:
        InputError: JSON is printed at the end, and there is none.
    """
    if follow and as_json:
        raise InputError("--follow with --json is for this machine", hint="omit --json, or --hosts")
    words = [*(["--follow"] if follow else []), *(["--", target] if target else [])]
    return output.of_each_host(spec, command, *words, as_json=as_json, live=follow)


def show(books: Sequence[Logbook], *, follow: bool, as_json: bool) -> None:
    """Print logs, each line with its owner's name, and maybe what they come to say."""
    for book, lines in logbooks.read(books, follow=follow):
        for line in lines:
            record = {"owner": book.owner, "path": str(book.path), "line": line}
            print(json.dumps(record) if as_json else f"{book.owner}: {line}", flush=follow)
