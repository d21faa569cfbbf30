"""``doctor`` on every host, and the differences between hosts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from wheelmount.child import last_words
from wheelmount.errors import HostError, WheelmountError
from wheelmount.operations import each_host
from wheelmount.operations.site import Site

SAME = "python", "versions", "kernel"
"""Findings that should be the same on all hosts."""

SKEW = 2.0
"""Largest allowed difference of a host's clock, in seconds: file times and certificates need it."""

Report = dict[str, Any]
"""The object that ``wheelmount doctor --json`` prints."""


def survey(site: Site) -> dict[str, Report | WheelmountError]:
    """Run the checks of ``doctor`` on every host.

    Returns:
        Reports by host, with ``skew``: seconds by which the host's clock is ahead of this one.
    """
    results = each_host.run(site, ["doctor", "--json"])
    now = time.time()
    found: dict[str, Report | WheelmountError] = {}
    for name, result in results.items():
        if isinstance(result, WheelmountError):
            found[name] = result
            continue
        try:
            report = json.loads(result.stdout)
            ahead = report["time"] - now
        except (ValueError, TypeError, KeyError):
            found[name] = HostError(f"doctor said {last_words(result.stderr, 'nothing')} there")
        else:
            found[name] = report | {"skew": ahead if ahead > 0 else min(0, ahead + result.seconds)}
    return found


def differences(reports: Mapping[str, Report]) -> list[str]:
    """Return, in words, differences between hosts that should be alike."""
    said = []
    for what in SAME:
        texts = {
            name: finding["text"]
            for name, report in reports.items()
            for finding in report["findings"]
            if finding["what"] == what
        }
        usual = Counter(texts.values()).most_common(1)
        said += [
            f"{name}: {what} is {text}, elsewhere {usual[0][0]}"
            for name, text in texts.items()
            if text != usual[0][0]
        ]
    said += [
        f"{name}: its clock is {report['skew']:+.1f} s off"
        for name, report in reports.items()
        if abs(report["skew"]) > SKEW
    ]
    return said
