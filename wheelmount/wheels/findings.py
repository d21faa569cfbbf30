"""The results of a check of a wheelhouse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wheelmount.errors import WheelError
from wheelmount.wheels.missing import Missing
from wheelmount.wheels.target import Target


@dataclass(frozen=True, slots=True)
class Unsound:
    """A wheel that is damaged, or not the locked one.

    Attributes:
        wheel: its file name.
        fault: its first fault, in words.
    """

    wheel: str
    fault: str

    def __str__(self) -> str:
        return f"{self.wheel} ({self.fault})"


@dataclass(frozen=True, slots=True)
class Gap:
    """Requirements that the directory does not meet on one target.

    Attributes:
        target: the target.
        missing: requirements without a wheel, and which packages have them; empty if wheels
            conflict.
        reason: why there is no solution, in uv's words.
        hint: uv's advice; empty if there is none.
    """

    target: Target
    missing: tuple[Missing, ...]
    reason: str
    hint: str

    def __str__(self) -> str:
        if self.missing:
            return f"no wheel for {self.target} of {', '.join(map(str, self.missing))}"
        return f"no solution for {self.target}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a check.

    Attributes:
        directory: the directory that was checked.
        requests: sets of requirements that were to be proven.
        wheels: names of the wheels that were read, sorted.
        size: bytes of those.
        unsound: the bad ones among them.
        gaps: requests that do not resolve from the directory.
    """

    directory: Path
    requests: int
    wheels: tuple[str, ...]
    size: int
    unsound: tuple[Unsound, ...]
    gaps: tuple[Gap, ...]

    def raise_if_any(self) -> None:
        """Turn faults into an error.

        Raises:
            WheelError: anything is unsound or missing; the message names all of it.
        """
        if self.unsound:
            # Their metadata may be gone too, so what else does not resolve may come from that.
            more = [gap for gap in self.gaps if gap.missing]
            raise WheelError(
                f"{self.directory} has damaged wheels: "
                + "; ".join(map(str, [*self.unsound, *more])),
                hint="remove them and run wheelmount download again; to accept a wrong RECORD of a "
                "publisher that you trust: wheelmount download --trust PACKAGE",
            )
        if self.gaps:
            told = any(gap.missing for gap in self.gaps)
            raise WheelError(
                f"{self.directory} has {'; '.join(map(str, self.gaps))}",
                hint="run wheelmount download for this target"
                if told
                else self.gaps[0].hint or "run wheelmount download with all of these requirements",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        return {
            "directory": str(self.directory),
            "complete": not self.unsound and not self.gaps,
            "requests": self.requests,
            "wheels": list(self.wheels),
            "size": self.size,
            "unsound": [{"wheel": one.wheel, "fault": one.fault} for one in self.unsound],
            "gaps": [
                {
                    "python_version": gap.target.python_version,
                    "platform": gap.target.platform,
                    "missing": [
                        {"requirement": one.requirement, "wanted_by": one.wanted_by}
                        for one in gap.missing
                    ],
                    "reason": gap.reason,
                }
                for gap in self.gaps
            ],
        }
