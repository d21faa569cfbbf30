"""``wheelmount download | check``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import InputError
from wheelmount.hosts.spec import HostSpec
from wheelmount.operations.site import Site
from wheelmount.operations.targets import of_hosts
from wheelmount.progress import number_of
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse


@click.command()
@options.wanted
@click.option(
    "-d",
    "--directory",
    type=options.GivenPath(path_type=Path),
    required=True,
    help="The wheelhouse; created if missing.",
)
@options.targets
@options.hosts
@click.option(
    "--trust",
    "trusted",
    multiple=True,
    metavar="PACKAGE",
    help="Accept wheels of this package although their RECORD is wrong; repeatable.",
)
@click.option("-U", "--upgrade", is_flag=True, help="Resolve again to the newest versions.")
@click.option("--prune", is_flag=True, help="Remove wheels that no request needs any more.")
@click.option("--dry-run", is_flag=True, help="List the wheels and write nothing.")
@click.option(
    "--forget", is_flag=True, help="Drop these REQUIREMENTS from the wheelhouse's requests."
)
@click.option(
    "-j", "--jobs", default=8, show_default=True, help="Number of wheels fetched at the same time."
)
@options.as_json
@options.quiet
def download(
    wanted: Wanted | None,
    directory: Path,
    targets: list[Target],
    spec: HostSpec,
    trusted: tuple[str, ...],
    upgrade: bool,
    prune: bool,
    dry_run: bool,
    forget: bool,
    jobs: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Download wheels of REQUIREMENTS, and of all they need, into a flat directory.

    A `pylock.toml` with the hashes of all is put beside them, and an index in `simple/`. With
    several --python-version or --platform, for each of them; with none, for what the hosts are.
    What is there is not asked for again.
    """
    if wanted is None:
        raise InputError("nothing to download", hint="name a package, or -r a file of them")
    progress = ConsoleProgress(quiet=quiet)
    house = Wheelhouse(directory)
    if forget:
        if dry_run:
            raise InputError("--forget and --dry-run exclude each other", hint="give one of them")
        number = house.forget(wanted, progress)
        if prune:
            house.prune(progress)
        if as_json:
            print(json.dumps({"directory": str(directory), "forgotten": number}))
        return
    if not targets:
        targets = of_hosts(Site(spec, config.load(), progress))
    if dry_run:
        names = [name for each in targets for name in house.preview(wanted, each, progress)]
        print(json.dumps(names) if as_json else "\n".join(dict.fromkeys(names)))
        return
    report = house.add(
        wanted,
        targets=targets,
        progress=progress,
        jobs=jobs,
        trusted=trusted,
        upgrade=upgrade,
        prune=prune,
    )
    if as_json:
        print(
            json.dumps(
                {
                    "directory": str(directory),
                    "wheels": report.wheels,
                    "fetched": report.fetched,
                    "size": report.size,
                    "seconds": round(report.seconds, 3),
                }
            )
        )
        return
    for wheel in report.wheels:
        print(wheel)


@click.command()
@click.argument("directory", type=options.GivenPath(path_type=Path))
@options.wanted
@options.targets
@click.option(
    "--contents",
    is_flag=True,
    help="Read and unpack all wheels, also those unchanged since the last check.",
)
@click.option(
    "--tool",
    type=click.Choice(["uv", "pip"]),
    default="uv",
    show_default=True,
    help="Installer whose rules apply. pip accepts fewer prereleases, honors upper bounds of "
    "Requires-Python, and resolves for this machine's Python only.",
)
@options.as_json
@options.quiet
def check(
    directory: Path,
    wanted: Wanted | None,
    targets: list[Target],
    contents: bool,
    tool: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove offline that REQUIREMENTS install from DIRECTORY alone, and that its wheels are whole.

    Without REQUIREMENTS: all that was ever downloaded into it, and every wheel that is there.
    """
    findings = Wheelhouse(directory).check(
        wanted,
        targets=targets,
        contents=contents,
        pip=tool == "pip",
        progress=ConsoleProgress(quiet=quiet),
    )
    if as_json:
        print(json.dumps(findings.to_dict()))
    findings.raise_if_any()
    if not as_json:
        wheels = number_of(len(findings.wheels), "wheel")
        print(f"complete for {tool}: {wheels}, {findings.size / 1e6:.1f} MB")
