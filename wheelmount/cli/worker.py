"""``wheelmount worker``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from wheelmount import config, disk
from wheelmount.cli.options import INSECURE, GivenPath, check_insecure, insecure
from wheelmount.errors import InputError
from wheelmount.hosts.address import OPEN, Address


@click.command()
@click.argument("address")
@click.option(
    "--credentials",
    type=GivenPath(exists=True, dir_okay=False, path_type=Path),
    help="File that `--issue` made, which only you can read. Default: a certificate of the user's "
    "own authority.",
)
@click.option(
    "--issue",
    is_flag=True,
    help="Print credentials for a host with another home directory, valid for 90 days, and exit. "
    "They are secret.",
)
@click.option(
    "--output",
    type=GivenPath(dir_okay=False, path_type=Path),
    help="With `--issue`: file for the credentials, which only you can read.",
)
@click.option(
    "--own-mounts",
    is_flag=True,
    help="Only what clients run here sees their mounts, which is faster where only root may bind.",
)
@insecure
@click.pass_context
def worker(
    ctx: click.Context,
    address: str,
    credentials: Path | None,
    issue: bool,
    output: Path | None,
    own_mounts: bool,
) -> None:
    """Make this machine a host, until interrupted.

    ADDRESS is where clients and other hosts reach it, `tls://HOST:PORT`. It accepts only callers
    with a certificate of the user's authority, which is the file `credentials/authority.pem` of the
    user's state directory and is made on first use. For a host with another home directory, make
    credentials on this machine with `--issue --output FILE`, and give them there by
    `--credentials`: a file that others may read is refused. With `tcp://HOST:PORT` and `--insecure`
    it accepts every caller that reaches the port.
    """
    where, settings = Address.parse(address), config.load()
    if where.scheme == OPEN:
        check_insecure(INSECURE in ctx.meta, address)
    if issue:
        from wheelmount.hosts.credentials import issue_for

        issued = issue_for(where, settings)
        if output is None:
            click.echo(issued, nl=False)
        else:
            disk.write(output, issued, mode=0o600)
        return
    if output is not None:
        raise InputError("--output is only for --issue", hint="add --issue")
    from wheelmount.hosts import keeper, process
    from wheelmount.hosts import worker as host

    if own_mounts:
        host.enter_namespace([sys.executable, "-m", "wheelmount.cli.main", *sys.argv[1:]])
    given = None
    if credentials is not None:
        from wheelmount.hosts.credentials import read_secret

        hint = f"run: chmod 600 {credentials}; if others may have read it, issue another"
        given = read_secret(credentials, hint)
    directory = process.make_directory(settings.private_runtime(), process.OF_WORKER)
    keeper.keep()
    host.listen_at(where, settings, given)
    process.prepare(directory)
    host.serve(str(where))
