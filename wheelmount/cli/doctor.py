"""``wheelmount doctor``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wheelmount import config, doctor
from wheelmount.cli import options
from wheelmount.cli.console import ConsoleProgress
from wheelmount.doctor import Report
from wheelmount.errors import InputError, UnavailableError, WheelmountError
from wheelmount.hosts.names import alike, expand, fold
from wheelmount.hosts.spec import HostSpec

MARKS = {doctor.GOOD: "ok", doctor.POOR: "--", doctor.BAD: "!!"}


@click.command("doctor")
@click.option("--fix", is_flag=True, help="Delete leftovers of dead mounts and hosts.")
@click.option(
    "--source",
    type=options.GivenPath(path_type=Path),
    help="Also check that there is room for this directory.",
)
@options.some_hosts
@options.as_json
@options.quiet
def examine(
    fix: bool, source: Path | None, spec: HostSpec | None, as_json: bool, quiet: bool
) -> int:
    """Check this machine for mounts and containers, and find leftovers of dead mounts.

    With --hosts the same of every host, and where they differ. Ends with 69 if something lacks that
    mounts need.
    """
    if spec is None:
        report = doctor.report(config.load(), fix=fix)
        _add(source, report)
        print(_json(dataclasses.asdict(report)) if as_json else "\n".join(_lines(report)))
        return _code(report)
    if fix:
        raise InputError("--fix is for this machine", hint="run it on the host by `wheelmount run`")
    from wheelmount.operations import survey  # with Monarch
    from wheelmount.operations.site import Site

    progress = ConsoleProgress(quiet=quiet)
    found = survey.survey(Site(spec, config.load(), progress))
    reports = {n: r for n, r in found.items() if not isinstance(r, WheelmountError)}
    for report in reports.values():
        _add(source, report)
    differences = survey.differences(reports)
    if as_json:
        hosts = {name: dataclasses.asdict(report) for name, report in reports.items()}
        print(_json({"hosts": hosts, "differences": differences}))
    else:
        print("\n".join(_together(reports)))
        for text in differences:
            print(f"{MARKS[doctor.POOR]}  {text}")
    codes = [_code(report) for report in reports.values()]
    errors = {n: e for n, e in found.items() if isinstance(e, WheelmountError)}
    progress.errors(errors)
    codes += [error.exit_code for error in errors.values()]
    return max(codes)


def _json(state: dict[str, Any]) -> str:
    return json.dumps(state, default=str)


def _together(reports: Mapping[str, Report]) -> Iterator[str]:
    """What hosts say, once for all that say the same."""
    if not reports:
        return
    yield f"== {fold(reports)} =="
    looked_at = [finding.what for report in reports.values() for finding in report.findings]
    for what in dict.fromkeys(looked_at):
        said = {
            name: tuple(_lines(replace(report, findings=found, leftovers=[])))
            for name, report in reports.items()
            if (found := [each for each in report.findings if each.what == what])
        }
        yield from _of_hosts(said, len(reports))
    yield from _of_hosts(
        {
            name: lines
            for name, report in reports.items()
            if (lines := tuple(_lines(replace(report, findings=[]))))
        },
        len(reports),
    )


def _of_hosts(said: Mapping[str, tuple[str, ...]], count: int) -> Iterator[str]:
    for hosts, (first, *more) in alike(said.items()):
        everywhere = len(expand(hosts)) == count
        yield first if everywhere else f"{first[:4]}{hosts}: {first[4:]}"
        yield from more


def _add(source: Path | None, report: Report) -> None:
    """Add to a report whether a directory has room there."""
    if source is not None:
        report.findings.append(doctor.fit(source, report.free))


def _lines(report: Report) -> list[str]:
    lines = []
    for finding in report.findings:
        lines.append(f"{MARKS[finding.state]}  {finding.what}: {finding.text}")
        if finding.hint:
            lines.append(f"    hint: {finding.hint}")
    for each in report.leftovers:
        what = "cleared" if report.cleared else "left"
        lines.append(f"{MARKS[doctor.POOR]}  {what}: {each.text}: {each.path}")
    if report.leftovers and not report.cleared:
        lines.append("    hint: `wheelmount doctor --fix` deletes it")
    return lines


def _code(report: Report) -> int:
    bad = any(finding.state == doctor.BAD for finding in report.findings)
    return UnavailableError.exit_code if bad else 0
