"""``wheelmount run``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from wheelmount import config
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress, show_results
from wheelmount.errors import WheelmountError
from wheelmount.hosts.runners import Results, worst
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs import scripts


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--mntpoint", help="Where to mount on the hosts; default the path of SOURCE.")
@options.hosts
@options.adapter
@options.as_json
@options.quiet
def run(
    source: Path,
    script: str,
    arguments: tuple[str, ...],
    mntpoint: str | None,
    spec: HostSpec,
    adapter: str,
    as_json: bool,
    quiet: bool,
) -> int:
    """Mount SOURCE on every host and run the bash script SCRIPT (`-`: standard input) on each.

    It runs in the mounted directory, which is read-only, as soon as that stands: what it reads
    arrives first. Output is printed host by host, in order; the exit code is the worst of all.
    """
    text = sys.stdin.read() if script == "-" else scripts.read(script)
    progress = ConsoleProgress(quiet=quiet)
    settings = replace(config.load(), adapter=adapter)
    results = scripts.run(spec, source, text, arguments, mntpoint, settings, progress)
    return finish(results, progress, as_json=as_json)


def finish(results: Results, progress: ConsoleProgress, *, as_json: bool) -> int:
    """Show what came of it; gives the exit code."""
    show_results(results, as_json=as_json)
    for name, result in results.items():
        if isinstance(result, WheelmountError):
            result.message = f"{name}: {result.message}"
            progress.error(result)
    return worst(results)
