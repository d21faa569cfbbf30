"""Commands in offline containers, on every host."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.containers.order import Order
from wheelmount.errors import InputError
from wheelmount.hosts import engine
from wheelmount.hosts.runner import Command
from wheelmount.hosts.runners import Result, Results, Runners
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs.mounts import on_mounts
from wheelmount.progress import Progress
from wheelmount.wheels import redirect
from wheelmount.wheels.missing import absent


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """Work in a container of each host.

    Attributes:
        path: of the SIF.
        overlay: name of the overlay that keeps what is installed.
    """

    path: Path
    overlay: str


def execute(
    spec: HostSpec,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Run a command on every host in an offline container.

    Args:
        spec: the hosts.
        image: the container.
        argv: the command.
        packages: a wheelhouse to mount on the hosts and show at ``/packages``.
        settings: in force.
        progress: told about each step.
    """
    if not argv:
        raise InputError("no command to run in the container", hint="name one, such as: -- python")

    def command(host: str, path: str | None) -> Command:
        order = Order(
            host=host,
            image=str(image.path.absolute()),
            overlay=image.overlay,
            state_dir=settings.state_dir,
            runtime_dir=str(settings.private_runtime()),
            packages=path,
            environment=redirect.environment(),
            files={
                redirect.PIP_CONF: redirect.pip_conf(),
                redirect.UV_TOML: redirect.uv_toml(),
            },
        )
        return Command(order.command(argv))

    if packages is not None:
        where = packages_point(settings)
        results = on_mounts(spec, packages, where, command, settings, progress, "run")
        failed = [r for r in results.values() if isinstance(r, Result) and r.code]
        lacking = {name for r in failed for name in absent(r.stderr.decode(errors="replace"))}
        if lacking:
            progress.log(f"hint: wheelmount download {shlex.join(sorted(lacking))} -d {packages}")
        return results
    with spec.make(settings, namespaces=False) as hosts:
        try:
            with (
                Runners(list(hosts), settings.start_timeout) as runners,
                progress.task("run", unit="hosts") as task,
            ):
                results = runners.run({host.name: command(host.name, None) for host in hosts})
                task.advance(len(results))
                return results
        finally:
            engine.stop()


def packages_point(settings: Settings) -> str:
    """Where a wheelhouse is mounted on hosts."""
    return str(settings.private_runtime() / f"packages-{secrets.token_hex(4)}-{{host}}")
