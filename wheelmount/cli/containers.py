"""``wheelmount exec | shell | overlay | instance``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wheelmount import config
from wheelmount.cli import completion, logs, options, output
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.environments import environment
from wheelmount.cli.image_options import container
from wheelmount.cli.launcher import Launcher
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations import (
    containers,
    environments,
    instances,
    logbooks,
    overlays,
    shells,
)
from wheelmount.operations.environments import Needed
from wheelmount.operations.image import BESIDE, ONE, Image
from wheelmount.operations.launch import Launch
from wheelmount.operations.site import Site

packages_option = click.option(
    "--packages",
    type=options.GivenPath(path_type=Path),
    help="A wheelhouse to mount on the hosts: pip and uv in the containers install from it. Or a "
    f"directory with one in packages/, and the image as {BESIDE} beside.",
)


@click.command("exec", cls=Launcher)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@options.hosts
@container
@packages_option
@environment
@click.option(
    "-i", "--interactive", is_flag=True, help="Pass output through unchanged; one host only (--on)."
)
@options.launch
@options.collected
@output.options
@options.quiet
def execute(
    command: tuple[str, ...],
    spec: HostSpec,
    image: Image | None,
    packages: Path | None,
    needed: Callable[[], Needed | None],
    interactive: bool,
    launch: Launch,
    show: output.Show,
    quiet: bool,
) -> int:
    """Run COMMAND on every host in a container without network.

    Options stand before COMMAND; all words after it are its arguments, with or without a `--`
    before it. Files that it writes stay in the overlay. The exit code is the worst of all hosts.
    A single host gets the standard input of this command; with --interactive its output is passed
    through unchanged. With --with, -r or --project the container has an environment that is made
    here and mounted on the hosts.
    """
    image = replace(_needed(image), variables=launch.variables)
    progress = ConsoleProgress(quiet=quiet)
    found = needed()
    if interactive:
        if found is not None:
            raise InputError(
                "--interactive cannot be combined with --with", hint="omit it or --with"
            )
        if launch.collect is not None:
            raise InputError(
                "--interactive cannot be combined with --collect", hint="omit it or --collect"
            )
        given = click.get_current_context().params
        if given["as_json"] or given["output_dir"]:
            raise InputError(
                "--interactive passes output on as it is", hint="omit --json and --output-dir"
            )
        return _pipe(spec, image, command, packages, launch, progress)
    site = Site(spec, config.load(), progress)
    with show.open(progress) as told:
        launch = replace(launch, output=told, stdin=output.standard_input(), lent=show.lent())
        if found is not None:
            results = environments.execute(site, found, command, image, packages, launch)
        else:
            results = containers.execute(site, image, command, packages, launch)
    return show.end(results, progress)


@click.command(cls=Launcher)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@options.hosts
@container
@packages_option
@options.launch
@options.quiet
def shell(
    command: tuple[str, ...],
    spec: HostSpec,
    image: Image | None,
    packages: Path | None,
    launch: Launch,
    quiet: bool,
) -> int:
    """Open a shell (or COMMAND) in a container without network on one host.

    Options stand before COMMAND; all words after it are its arguments. On a terminal the shell
    gets a terminal of its own; else it reads standard input.
    """
    image = replace(_needed(image), variables=launch.variables)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = command or ("bash",)
    progress = ConsoleProgress(quiet=quiet)
    if not terminal or spec.kind != "local":
        return _pipe(spec, image, argv, packages, launch, progress, terminal=terminal)
    return shells.attach(Site(spec, config.load(), progress), image, argv, packages, launch)


def _pipe(
    spec: HostSpec,
    image: Image,
    command: tuple[str, ...],
    packages: Path | None,
    launch: Launch,
    progress: ConsoleProgress,
    *,
    terminal: bool = False,
) -> int:
    def told(_host: str, stream: str, data: bytes) -> None:
        target = getattr(sys, stream).buffer
        target.write(data)
        target.flush()

    site = Site(spec, config.load(), progress)
    launch = replace(
        launch, output=told, stdin=output.standard_input(), lent=output.lent("stdin", "stdout")
    )
    results = shells.pipe(site, image, command, packages, launch, terminal=terminal)
    return output.Show(as_json=False, live=True, directory=None).end(results, progress)


@click.group()
def overlay() -> None:
    """List and delete overlays, which keep files of containers, on this machine or on hosts."""


@overlay.command("ls")
@options.some_hosts
@options.as_json
def overlay_ls(spec: HostSpec | None, as_json: bool) -> int:
    """List overlays: name, host, kind, size, and the processes that use them."""
    if spec is not None:
        return output.of_each_host(spec, ("overlay", "ls"), as_json=as_json)
    records = overlays.here(config.load())
    if as_json:
        print(json.dumps(records))
        return 0
    for each in records:
        used = f"  in use by {each['user']}" if each["user"] else ""
        print(f"{each['name']}  {each['host']}  {each['kind']}  {each['bytes'] / 1e6:.1f} MB{used}")
    return 0


@overlay.command("prune")
@click.option(
    "--unused",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Delete overlays that no container has used for this long.",
)
@options.some_hosts
@options.as_json
def overlay_prune(unused: float, spec: HostSpec | None, as_json: bool) -> int:
    """Delete overlays that were not used for some time, with all files in them."""
    if spec is not None:
        words = "--unused", str(unused)
        return output.of_each_host(spec, ("overlay", "prune"), *words, as_json=as_json)
    gone, failed = overlays.prune(config.load(), unused * 24 * 3600)
    if not as_json:
        for each in gone:
            print(f"{each['name']} {each['host']} removed ({each['bytes'] / 1e6:.1f} MB)")
    elif gone or not failed:
        print(json.dumps(gone))
    ConsoleProgress().raise_first(failed)
    return 0


@overlay.command("rm")
@click.argument("names", nargs=-1, required=True, shell_complete=completion.overlays)
@click.option("--on", "host", metavar="HOST", help="Only the overlay of this host.")
@options.some_hosts
@options.as_json
def overlay_rm(
    names: tuple[str, ...], host: str | None, spec: HostSpec | None, as_json: bool
) -> int:
    """Delete overlays with all files in them."""
    if spec is not None:
        words = (*(() if host is None else ("--on", host)), "--", *names)
        return output.of_each_host(spec, ("overlay", "rm"), *words, as_json=as_json)
    gone, failed = overlays.remove(config.load(), names, host)
    if not as_json:
        for each in gone:
            print(f"{each['name']} {each['host']} removed")
    elif gone or not failed:
        print(json.dumps([{"name": each["name"], "host": each["host"]} for each in gone]))
    ConsoleProgress().raise_first(failed)
    return 0


@click.group()
def instance() -> None:
    """List and stop containers that keep running, on this machine or on hosts."""


@instance.command("ls")
@options.some_hosts
@options.as_json
def instance_ls(spec: HostSpec | None, as_json: bool) -> int:
    """List instances: name, host, image, overlay and running time."""
    if spec is not None:
        return output.of_each_host(spec, ("instance", "ls"), as_json=as_json)
    records: list[dict[str, Any]] = []
    for each in instances.find(config.load()):
        record = each.remembered()
        records.append(
            {
                "name": each.name,
                "host": each.host,
                "running": each.record() is not None,
                "image": record and record.image,
                "overlay": record and record.overlay,
                "packages": record and record.packages,
                "seconds": record and round(time.time() - record.since, 1),
            }
        )
    if as_json:
        print(json.dumps(records))
        return 0
    for found in records:
        state = f"up {found['seconds']:.0f} s" if found["running"] else "killed"
        print(f"{found['name']}  {found['host']}  {found['image']}  {found['overlay']}  {state}")
    return 0


@instance.command("logs")
@click.argument("name", shell_complete=completion.instances)
@click.option("--follow", "-f", is_flag=True, help="Keep showing new lines.")
@options.some_hosts
@options.as_json
def instance_logs(name: str, follow: bool, spec: HostSpec | None, as_json: bool) -> int:
    """Show the output of an instance's start and of its image's start script."""
    if spec is not None:
        return logs.elsewhere(spec, ("instance", "logs"), name, follow=follow, as_json=as_json)
    settings = config.load()
    instances.find(settings, [name])
    logs.show(logbooks.of_instances(settings, name), follow=follow, as_json=as_json)
    return 0


@instance.command("stop")
@click.argument("names", nargs=-1, shell_complete=completion.instances)
@click.option("--all", "everything", is_flag=True, help="All instances that ls shows.")
@options.some_hosts
@options.as_json
def instance_stop(
    names: tuple[str, ...], everything: bool, spec: HostSpec | None, as_json: bool
) -> int:
    """Stop instances and all processes in them; their overlays stay."""
    if not names and not everything:
        raise InputError("nothing to stop", hint="give a name, or --all")
    if spec is not None:
        words = ("--all",) if everything else ("--", *names)
        return output.of_each_host(spec, ("instance", "stop"), *words, as_json=as_json)
    settings = config.load()
    stopped = []
    for each in instances.find(settings, names):
        instances.stop(each, settings)
        stopped.append({"name": each.name, "host": each.host})
        if not as_json:
            print(f"{each.name} {each.host} stopped")
    if as_json:
        print(json.dumps(stopped))
    return 0


def _needed(image: Image | None) -> Image:
    if image is None:
        raise InputError("no image to run it in", hint=ONE)
    return image
