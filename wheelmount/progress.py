"""Progress of anything that takes longer than a second, as the rest of the package reports it.

Library code takes a ``Progress`` and opens one ``Task`` for each step; how that is shown (a bar on
a terminal, plain lines in a log, nothing) is decided by whoever made the ``Progress``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One step under way."""

    def total(self, amount: int) -> None:
        """Say how much there is to do, once it is known (in the task's unit)."""

    def advance(self, amount: int) -> None:
        """Say that ``amount`` more is done. Safe to call from any thread."""

    def note(self, text: str) -> None:
        """Say what came of it; shown at the end of the step (``11 wheels, 68 MB``)."""


class Progress(Protocol):
    """Where steps are reported to."""

    def task(self, name: str, *, unit: str = "") -> AbstractContextManager[Task]:
        """Open a step; leaving the context ends it.

        Args:
            name: what is done, in a word or two (``download``, ``send``).
            unit: ``"B"`` for bytes, else the thing counted (``"wheels"``).
        """

    def log(self, text: str) -> None:
        """Show one line that stays."""


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
