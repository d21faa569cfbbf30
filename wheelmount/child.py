"""Run a program to its end and read its output, bounded in time and memory."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from wheelmount import owned, variables

WORDS = 128 << 10
"""Bytes kept of a program's messages: half from the start, half from the end."""

_PIECE = 64 << 10
_WRITTEN = 512
"""Bytes that a pipe accepts without blocking once it is writable: select(2)."""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a program.

    Attributes:
        code: exit code, or the negative number of the signal that ended the program.
        stdout: the kept part of its standard output.
        stderr: the kept part of its standard error.
        whole: whether ``stdout`` is the whole output.
    """

    code: int
    stdout: str
    stderr: str
    whole: bool


def run(
    command: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    given: str = "",
    most: int = WORDS,
    umask: int | None = None,
) -> Done:
    """Run a program to its end; keep the beginning and the end of its output, of any length.

    Args:
        command: program and arguments.
        timeout: seconds in which the program, and all processes that share its output, must end.
        environ: the program's whole environment; default that of this process. Variables that are
            for Monarch's processes alone are left out.
        given: text for its standard input.
        most: bytes that are kept of its standard output.
        umask: the program's umask; default that of this process, and others
            may not write to files that it makes.

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: the program did not end, and was killed with its children.
    """
    deadline = time.monotonic() + timeout
    kept = [_Kept(most), _Kept(WORDS)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE if given else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables.for_programs(os.environ if environ is None else environ),
        umask=owned.umask() if umask is None else umask,
    ) as process:
        try:
            _attend(process, given.encode(), kept, deadline)
            code = process.wait(max(0, deadline - time.monotonic()))
        except TimeoutError:
            _kill(process)
            raise subprocess.TimeoutExpired(command, timeout) from None
        except BaseException:
            _kill(process)
            raise
    return Done(code, kept[0].text(), kept[1].text(), kept[0].left_out == 0)


def last_words(output: str | bytes, otherwise: str) -> str:
    """Return the last line of a program's output, which usually tells why it failed.

    Args:
        output: the output.
        otherwise: what is returned where there is none.
    """
    text = output if isinstance(output, str) else output.decode(errors="replace")
    lines = text.strip().splitlines()
    return lines[-1] if lines else otherwise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its descendants, except daemons that detached from it."""
    import psutil  # only here, because it takes long to load

    below = []
    with suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in below:
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            each.kill()


def _attend(
    process: subprocess.Popen[bytes], given: bytes, kept: Sequence[_Kept], deadline: float
) -> None:
    """Write a program's input and read its output until both of its streams end.

    Raises:
        TimeoutError: the streams did not end by the deadline.
    """
    rest = memoryview(given)
    with selectors.DefaultSelector() as selector:
        for stream, store in zip((process.stdout, process.stderr), kept, strict=True):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, store)
        if process.stdin is not None:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise TimeoutError
            for key, _ in ready:
                if key.fileobj is not process.stdin:
                    piece = os.read(key.fd, _PIECE)
                    key.data.add(piece)
                    if not piece:
                        selector.unregister(key.fileobj)
                    continue
                try:
                    rest = rest[os.write(key.fd, rest[:_WRITTEN]) :]
                except BrokenPipeError:  # the program closed its input
                    rest = rest[:0]
                if not rest:
                    selector.unregister(key.fileobj)
                    with suppress(BrokenPipeError):
                        process.stdin.close()


class _Kept:
    """The first and the last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._first, self._last = bytearray(), bytearray()
        self.left_out = 0

    def add(self, piece: bytes) -> None:
        room = self._half - len(self._first)
        self._first += piece[:room]
        self._last += piece[room:]
        if len(self._last) > self._half + _PIECE:
            self._shorten()

    def _shorten(self) -> None:
        more = max(0, len(self._last) - self._half)
        self.left_out += more
        del self._last[:more]

    def text(self) -> str:
        self._shorten()
        gap = f"\n({self.left_out} bytes are left out)\n".encode() if self.left_out else b""
        return (self._first + gap + self._last).decode(errors="replace")
