"""``wheelmount up | down``."""

from __future__ import annotations

import json
from functools import partial

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import InputError
from wheelmount.hosts.session import DEFAULT, Session
from wheelmount.hosts.spec import HostSpec


@click.command()
@options.new_hosts
@options.session
@options.as_json
@options.quiet
def up(spec: HostSpec, name: str, as_json: bool, quiet: bool) -> None:
    """Have hosts that stay, with what is mounted on them, until `wheelmount down`.

    Commands that follow take the session `default` by themselves, others by `--hosts
    session:NAME`; they begin within a second, and mounts of the same directory are refreshed
    instead of made. A session whose hosts died is made anew.
    """
    if spec.session is not None:
        raise InputError("a session cannot be made of another", hint="give hosts of another kind")
    from wheelmount.operations import sessions  # with Monarch, which other commands do without

    session = Session(name, config.load())
    record, made = sessions.up(spec, session, ConsoleProgress(quiet=quiet))
    if as_json:
        print(json.dumps({"session": name, "hosts": record.names, "made": made}))
        return
    print(f"session {name} is up: {', '.join(record.names)}" if made else f"session {name} is up")


@click.command()
@click.argument("names", nargs=-1, shell_complete=completion.sessions)
@click.option("--all", "everything", is_flag=True, help="All that status shows.")
@options.as_json
@options.quiet
def down(names: tuple[str, ...], everything: bool, as_json: bool, quiet: bool) -> None:
    """End sessions with their mounts and hosts: NAMES, or the session `default`."""
    from wheelmount.operations import apart, sessions

    settings = config.load()
    found = [Session(name, settings) for name in names or (DEFAULT,)]
    chosen = Session.all(settings) if everything else found
    works = [partial(sessions.down, session) for session in chosen]
    apart.raise_first(apart.each(works, ConsoleProgress(quiet=quiet), "stop"))
    if as_json:
        print(json.dumps([session.name for session in chosen]))
