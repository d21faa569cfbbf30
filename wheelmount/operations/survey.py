"""``doctor`` on every host, and the differences between hosts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from wheelmount import typed
from wheelmount.child import last_words
from wheelmount.doctor import Report
from wheelmount.errors import HostError, WheelmountError
from wheelmount.operations import each_host
from wheelmount.operations.site import Site

SAME = "python", "versions", "kernel"
"""Findings that should be the same on all hosts."""

SKEW = 2.0
"""Largest allowed difference of a host's clock, in seconds: file times and certificates need it."""


def survey(site: Site) -> dict[str, Report | WheelmountError]:
    """Run the checks of ``doctor`` on every host.

    Returns:
        Reports by host, or errors.
    """
    results = each_host.run(site, ["doctor", "--json"])
    now = time.time()
    found: dict[str, Report | WheelmountError] = {}
    for name, result in results.items():
        if isinstance(result, WheelmountError):
            found[name] = result
            continue
        try:
            report = typed.decode(result.stdout, Report)
        except ValueError:
            found[name] = HostError(f"doctor said {last_words(result.stderr, 'nothing')} there")
        else:
            ahead = report.time - now
            skew = ahead if ahead > 0 else min(0, ahead + result.seconds)
            found[name] = replace(report, skew=skew)
    return found


def differences(reports: Mapping[str, Report]) -> list[str]:
    """Return, in words, differences between hosts that should be alike."""
    said = []
    for what in SAME:
        texts = {
            name: finding.text
            for name, report in reports.items()
            for finding in report.findings
            if finding.what == what
        }
        usual = Counter(texts.values()).most_common(1)
        said += [
            f"{name}: {what} is {text}, elsewhere {usual[0][0]}"
            for name, text in texts.items()
            if text != usual[0][0]
        ]
    said += [
        f"{name}: its clock is {report.skew:+.1f} s off"
        for name, report in reports.items()
        if abs(report.skew) > SKEW
    ]
    return said
