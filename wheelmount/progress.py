"""The interface by which library code reports the progress of steps longer than a second.

Library code is given a ``Progress`` and opens one ``Task`` for each step. The object decides how
that is shown: as a bar on a terminal, as lines in a log, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


def number_of(count: int, name: str) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``.

    Args:
        count: the number.
        name: the noun, singular; other words may follow, such as in ``set of hosts``.
    """
    noun, space, rest = name.partition(" ")
    return f"{count} {noun}{'' if count == 1 else 's'}{space}{rest}"


class Task(Protocol):
    """One step under way."""

    def total(self, amount: int) -> None:
        """Set the total amount of work, in the task's unit, once it is known."""

    def advance(self, amount: int) -> None:
        """Add an amount of completed work, in the task's unit. Thread-safe."""

    def note(self, text: str) -> None:
        """Set the result to show at the end of the step, such as ``11 wheels, 68 MB``."""


class Progress(Protocol):
    """A receiver of reports about steps."""

    def task(self, name: str, *, unit: str = "") -> AbstractContextManager[Task]:
        """Open a step, which ends with the context.

        Args:
            name: name of the step in a word or two, such as ``download``.
            unit: ``"B"`` for bytes, otherwise the counted thing, such as ``"wheel"``.
        """

    def log(self, text: str) -> None:
        """Print one line, which stays on the screen."""


class _SilentTask:
    def total(self, amount: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Silent:
    """Shows nothing: the default for library use."""

    @contextmanager
    def task(self, name: str, *, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        yield _SilentTask()

    def log(self, text: str) -> None:
        pass


SILENT: Progress = Silent()
