"""``wheelmount doctor``."""

from __future__ import annotations

import dataclasses
import json

import click

from wheelmount import config, doctor
from wheelmount.cli import options
from wheelmount.errors import UnavailableError

MARKS = {doctor.GOOD: "ok", doctor.POOR: "--", doctor.BAD: "!!"}


@click.command("doctor")
@click.option("--fix", is_flag=True, help="Delete what dead mounts and hosts have left.")
@options.as_json
def examine(fix: bool, as_json: bool) -> int:
    """Tell what this machine can do, what it lacks, and what dead mounts have left.

    Ends with 69 if something lacks that mounts need.
    """
    settings = config.load()
    findings = doctor.examine(settings)
    left = doctor.leftovers(settings)
    if fix:
        for each in left:
            doctor.clear(each)
    if as_json:
        print(
            json.dumps(
                {
                    "findings": [dataclasses.asdict(finding) for finding in findings],
                    "leftovers": [{"path": str(e.path), "text": e.text} for e in left],
                    "cleared": fix,
                }
            )
        )
    else:
        for finding in findings:
            print(f"{MARKS[finding.state]}  {finding.what}: {finding.text}")
            if finding.hint:
                print(f"    hint: {finding.hint}")
        for each in left:
            print(f"{MARKS[doctor.POOR]}  {'cleared' if fix else 'left'}: {each.text}: {each.path}")
        if left and not fix:
            print("    hint: `wheelmount doctor --fix` deletes it")
    bad = any(finding.state == doctor.BAD for finding in findings)
    return UnavailableError.exit_code if bad else 0
