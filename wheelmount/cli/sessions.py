"""``wheelmount up | down``."""

from __future__ import annotations

import json
from functools import partial

import click

from wheelmount import config
from wheelmount.cli import completion, options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import InputError, among
from wheelmount.hosts.session import DEFAULT, Session
from wheelmount.hosts.spec import HostSpec


@click.command()
@options.new_hosts
@options.session
@options.as_json
@options.quiet
def up(spec: HostSpec, name: str, as_json: bool, quiet: bool) -> None:
    """Start a session: hosts that stay, with their mounts, until `wheelmount down`.

    Later commands use the session `default` unless told otherwise, and others by `--hosts
    session:NAME`. They begin within a second, and refresh a mount of the same directory instead
    of making it. A session whose hosts died is started again.
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
@click.option("--all", "everything", is_flag=True, help="All sessions that status shows.")
@options.as_json
@options.quiet
def down(names: tuple[str, ...], everything: bool, as_json: bool, quiet: bool) -> None:
    """End the sessions NAMES, default `default`, with their mounts and hosts."""
    from wheelmount.operations import apart, sessions

    settings = config.load()
    found = [Session(name, settings) for name in names or (DEFAULT,)]
    chosen = Session.all(settings) if everything else found
    works = [partial(sessions.down, session) for session in chosen]
    progress = ConsoleProgress(quiet=quiet)
    ends = apart.each(works, progress, "stop")
    failed = among(ends)
    if as_json and (not failed or len(failed) < len(ends)):
        ended = (each for each, end in zip(chosen, ends, strict=True) if end is None)
        print(json.dumps([session.name for session in ended]))
    progress.raise_first(failed)
