"""``wheelmount worker``."""

from __future__ import annotations

import click

from wheelmount import config
from wheelmount.hosts.address import Address


@click.command()
@click.argument("address")
def worker(address: str) -> None:
    """Make this machine a host, until interrupted.

    ADDRESS is where clients and other hosts reach it, `tls://HOST:PORT`. Only who has the same
    credentials comes in: those in the file `credentials/authority.pem` of the user's state
    directory, which is made on first use and to be copied to hosts with another home directory.
    With `tcp://HOST:PORT` everybody comes in who reaches the port.
    """
    from wheelmount.hosts import process
    from wheelmount.hosts import worker as host  # with Monarch

    where, settings = Address.parse(address), config.load()
    host.listen_at(where, settings)
    process.prepare(process.make_directory(settings.private_runtime(), process.OF_WORKER))
    host.serve(str(where))
