"""``wheelmount download | check``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.errors import InputError
from wheelmount.wheels.target import Target
from wheelmount.wheels.wheelhouse import Wheelhouse


@click.command()
@options.requirements
@options.files
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path),
    required=True,
    help="The wheelhouse; made if it is not there.",
)
@options.target
@click.option(
    "--trust",
    "trusted",
    multiple=True,
    metavar="PACKAGE",
    help="Take its wheels although their RECORD is wrong; may be given more than once.",
)
@click.option("-j", "--jobs", default=8, show_default=True, help="Wheels fetched at a time.")
@options.as_json
@options.quiet
def download(
    requirements: tuple[str, ...],
    files: tuple[Path, ...],
    directory: Path,
    target: Target | None,
    trusted: tuple[str, ...],
    jobs: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Download wheels of REQUIREMENTS, and of all they need, into a flat directory.

    A `pylock.toml` with the hashes of all is put beside them.
    """
    if not requirements and not files:
        raise InputError("nothing to download", hint="name a package, or -r a file of them")
    report = Wheelhouse(directory).add(
        requirements,
        files=files,
        target=target or Target.here(),
        progress=ConsoleProgress(quiet=quiet),
        jobs=jobs,
        trusted=trusted,
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
@click.argument("directory", type=click.Path(path_type=Path))
@options.requirements
@options.files
@options.target
@options.as_json
@options.quiet
def check(
    directory: Path,
    requirements: tuple[str, ...],
    files: tuple[Path, ...],
    target: Target | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove offline that REQUIREMENTS install from DIRECTORY alone, and that its wheels are whole.

    Without REQUIREMENTS: all that was ever downloaded into it, and every wheel that is there.
    """
    findings = Wheelhouse(directory).check(
        requirements, files=files, target=target, progress=ConsoleProgress(quiet=quiet)
    )
    if as_json:
        print(json.dumps(findings.to_dict()))
    findings.raise_if_any()
    if not as_json:
        print(f"complete: {len(findings.wheels)} wheels, {findings.size / 1e6:.1f} MB")
