"""``doctor`` on every host, and the differences between hosts."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
    heard = _Heard()
    results = each_host.run(site, ["doctor", "--json"], heard)
    found: dict[str, Report | WheelmountError] = {}
    for name, result in results.items():
        if isinstance(result, WheelmountError):
            found[name] = result
            continue
        try:
            report = typed.decode(bytes(heard.said[name]), Report)
        except ValueError:
            found[name] = HostError(f"doctor said {last_words(result.stderr, 'nothing')} there")
        else:
            late, early = report.time - heard.at[name], report.time - heard.began
            found[name] = replace(report, skew=max(0.0, late) or min(0.0, early))
    return found


class _Heard:
    """Keeps what hosts say, and when they do: what is done before and after may take long."""

    def __init__(self) -> None:
        self.began = 0.0
        self.said: defaultdict[str, bytearray] = defaultdict(bytearray)
        self.at: dict[str, float] = {}

    def begin(self, hosts: Sequence[str]) -> None:  # noqa: ARG002 - a ``Listener``
        self.began = time.time()

    def end(self, host: str, *, lost: bool) -> None:
        pass

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        self.at[host] = time.time()
        if stream == "stdout":
            self.said[host] += data


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
