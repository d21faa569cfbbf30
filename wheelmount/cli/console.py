"""What a person sees: progress on standard error, results on standard output."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wheelmount import config
from wheelmount.errors import WheelmountError
from wheelmount.hosts.names import alike
from wheelmount.progress import Task, number_of
from wheelmount.urls import without_credentials

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_EVERY = 10.0
"""Seconds between lines about a long step where there is no terminal."""


AS_TERMINAL = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
"""Variables by which rich takes for a terminal what is none, and the other way round."""


class _Step:
    """A task as shown here; ``bar`` is None where there is no terminal."""

    def __init__(
        self, name: str, unit: str, bar: Progress | None, say: Callable[[str], None]
    ) -> None:
        self.text = ""
        self._name, self._unit, self._bar, self._say = name, unit, bar, say
        self._done = 0
        self._amount: int | None = None
        self._started = self._spoken = time.monotonic()
        self._lock = threading.Lock()
        self._id = bar.add_task(name, total=None, amounts="") if bar else None

    def total(self, amount: int) -> None:
        self._amount = amount
        if self._bar is not None and self._id is not None:
            self._bar.update(self._id, total=amount)

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            if self._bar is not None and self._id is not None:
                self._bar.update(self._id, advance=amount, amounts=self.amounts())
            elif time.monotonic() - self._spoken > PLAIN_EVERY:
                self._spoken = time.monotonic()
                self._say(f"{self._name}: {self.amounts()}")

    def note(self, text: str) -> None:
        self.text = text

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None and self._id is not None:
            self._bar.remove_task(self._id)

    def amounts(self) -> str:
        """How much is done, in words."""
        if self._unit == "B":
            of = "" if self._amount is None else f" of {self._amount / 1e6:.1f}"
            rate = self._done / 1e6 / max(time.monotonic() - self._started, 0.001)
            return f"{self._done / 1e6:.1f}{of} MB, {rate:.1f} MB/s"
        of = "" if self._amount is None else f"{self._done} of "
        amount = self._done if self._amount is None else self._amount
        return of + (number_of(amount, self._unit) if self._unit else str(amount))


class ConsoleProgress:
    """Bars on a terminal, plain lines elsewhere; each step leaves one line when it ends."""

    def __init__(self, *, quiet: bool = False) -> None:
        # A descriptor of its own: standard error itself is closed to Monarch's noise at times.
        self._file = _standard_error()
        self._quiet = quiet
        self._bar: Progress | None = None
        self._steps = 0
        self._lock = threading.Lock()

    @functools.cached_property
    def console(self) -> Console:
        """What is drawn on a terminal; its import takes a tenth of a short command."""
        from rich.console import Console

        return Console(file=self._file, soft_wrap=True)

    @functools.cached_property
    def _is_terminal(self) -> bool:
        forced = AS_TERMINAL & os.environ.keys()
        return self.console.is_terminal if forced else self._file.isatty()

    @contextmanager
    def task(self, name: str, *, unit: str = "") -> Iterator[Task]:
        """Show a step: a bar while it runs on a terminal, one line when it ends."""
        started = time.monotonic()
        bar = self._open_bar() if self._is_terminal and not self._quiet else None
        step = _Step(name, unit, bar, self.log)
        try:
            yield step
        finally:
            step.end()
            if bar is not None:
                self._close_bar(bar)
        seconds = time.monotonic() - started
        self.log(f"{name}: {step.text or step.amounts()} in {seconds:.1f} s")

    def _open_bar(self) -> Progress:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        # One for all steps: some run at the same time, and a terminal has one live display.
        with self._lock:
            if self._bar is None:
                self._bar = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TextColumn("{task.fields[amounts]}"),
                    TimeElapsedColumn(),
                    console=self.console,
                    transient=True,
                )
                self._bar.start()
            self._steps += 1
            return self._bar

    def _close_bar(self, bar: Progress) -> None:
        with self._lock:
            self._steps -= 1
            if not self._steps:
                bar.stop()
                self._bar = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While something else writes to the terminal: bars are out of its way."""
        with self._lock:
            if self._bar is None:
                yield
                return
            self._bar.stop()
            try:
                yield
            finally:
                self._bar.start()

    def log(self, text: str) -> None:
        """Print one line to standard error, without credentials, unless all is to be quiet."""
        if not self._quiet:
            self._print(without_credentials(text))

    def _print(self, text: str, kind: str = "", style: str = "") -> None:
        """Print a line, with its kind (``error``) in a style before it."""
        kind, text = kind and f"{kind}: ", printable(text)
        if self._is_terminal:
            from rich.markup import escape

            self.console.print(
                f"[{style}]{kind}[/]" if kind else "", escape(text), sep="", highlight=False
            )
        else:
            print(kind + text, file=self._file, flush=True)

    def error(self, error: WheelmountError) -> None:
        """Print an error in one line, and its hint in another; with ``--json`` as one object."""
        if wants_json():
            record = {"code": error.exit_code, "message": error.message, "hint": error.hint}
            self._print(json.dumps(record))
            return
        self._print(error.message, "error", "bold red")
        if error.hint:
            self._print(error.hint, "hint", "bold cyan")

    def errors(self, errors: Mapping[str, WheelmountError]) -> None:
        """Print errors by host, once for all hosts with the same error."""
        told = ((name, (type(each), each.message, each.hint)) for name, each in errors.items())
        for hosts, (kind, message, hint) in alike(told):
            self.error(kind(f"{hosts}: {message}", hint=hint))

    def raise_first(self, errors: Sequence[WheelmountError]) -> None:
        """Raise the first error, if there is one, after printing the others."""
        for each in errors[1:]:
            self.error(each)
        if errors:
            raise errors[0]


def printable(text: str) -> str:
    """Return a text with what would control a terminal, or is no character, in escapes (``\\x1b``).

    Names of files, hosts and packages, and what programs say, may hold anything.
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1].replace("\\udc", "\\x")
        for each in text
    )


WRITABLE = "wheelmount.writable"
"""Error handler of encodings: bytes of a path are written as they are, and characters that an
encoding lacks in escapes."""


def _writable(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    each = error.object[error.start]
    is_byte = "\udc80" <= each <= "\udcff"
    how = "surrogateescape" if is_byte else "backslashreplace"
    return each.encode("ascii", how), error.start + 1


codecs.register_error(WRITABLE, _writable)


class Terminal(io.TextIOWrapper):
    """Standard output that is a terminal: its text does not control it."""

    def write(self, text: str) -> int:
        return super().write(printable(text))


def _standard_error() -> io.TextIOWrapper:
    """Return a stream of its own to standard error, to which any text can be written."""
    return os.fdopen(os.dup(2), "w", errors="backslashreplace")


_as_json = threading.Event()


def errors_as_json() -> None:
    """Have errors be objects of JSON from here on, a line each."""
    _as_json.set()


def wants_json() -> bool:
    """Whether a program reads what is said."""
    return _as_json.is_set()


def tell_all() -> None:
    """Show what the package logs as well."""
    handler = logging.StreamHandler(_standard_error())
    log = logging.getLogger("wheelmount")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    settings, origins = config.load_with_origins()
    for name, value in dataclasses.asdict(settings).items():
        if origins[name] != config.DEFAULT:
            log.debug("setting: %s = %r (%s)", name, value, origins[name])
