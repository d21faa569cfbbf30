"""``wheelmount logs``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.operations import logbooks
from wheelmount.operations.logbooks import Logbook


@click.command()
@click.argument("target", default="", shell_complete=completion.logged)
@click.option("--follow", "-f", is_flag=True, help="Go on with what is logged from now on.")
@options.as_json
def logs(target: str, follow: bool, as_json: bool) -> None:
    """Show what mounts, instances and hosts of this machine have logged.

    TARGET is a mount point, source or identity that status shows, or the name of an instance;
    default all.
    """
    show(logbooks.find(config.load(), target), follow=follow, as_json=as_json)


def show(books: Sequence[Logbook], *, follow: bool, as_json: bool) -> None:
    """Print logs, each line with its owner's name, and maybe what they come to say."""
    for book, lines in logbooks.read(books, follow=follow):
        for line in lines:
            record = {"owner": book.owner, "path": str(book.path), "line": line}
            print(json.dumps(record) if as_json else f"{book.owner}: {line}", flush=follow)
