"""A terminal for a command in a container, passed on to the terminal that this process has.

The command gets a terminal of its own and not this one: it is in a session of its own, so that it
can be ended as a whole, and a session has a terminal to itself (``pty(7)``, ``credentials(7)``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import struct
import subprocess
import termios
import tty
from collections.abc import Iterator
from types import FrameType, TracebackType

_CHUNK = 1 << 16


Size = tuple[int, int]
"""Rows and columns."""


@contextlib.contextmanager
def raw(stdin: int = 0) -> Iterator[Size]:
    """Have a terminal give on every key as it is, ``^C`` among them; gives its size."""
    saved = termios.tcgetattr(stdin)
    tty.setraw(stdin, termios.TCSADRAIN)  # what was typed ahead is for the command
    try:
        size = os.get_terminal_size(stdin)
        yield size.lines, size.columns
    finally:
        termios.tcsetattr(stdin, termios.TCSAFLUSH, saved)


class Terminal:
    """A terminal that a command may have. A context manager.

    Meanwhile this process's own terminal gives on every key as it is; it is put back at the end.

    Args:
        stdin: descriptor of this process's terminal, or of what is typed elsewhere.
        stdout: where what the command shows goes.
        size: of the terminal elsewhere; None if this process has it.
    """

    def __init__(self, stdin: int = 0, stdout: int = 1, size: Size | None = None) -> None:
        self._stdin, self._stdout, self._size = stdin, stdout, size
        self._ended = contextlib.ExitStack()
        self._outer = self.inner = -1

    def __enter__(self) -> Terminal:
        self._outer, self.inner = os.openpty()
        if self._size is not None:
            _set_size(self._outer, struct.pack("HHHH", *self._size, 0, 0))  # ioctl_tty(2)
            return self
        self._resize()
        before = signal.signal(signal.SIGWINCH, self._resize)
        self._ended.callback(signal.signal, signal.SIGWINCH, before)
        self._ended.enter_context(raw(self._stdin))
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.close()
        for descriptor in (self._outer, self.inner):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def relay(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what is typed and shown, until the command and all that has its terminal ended.

        Args:
            process: the command.
        """
        os.close(self.inner)  # the last one to close it ends the terminal
        with selectors.DefaultSelector() as ready:
            ready.register(self._stdin, selectors.EVENT_READ)
            ready.register(self._outer, selectors.EVENT_READ)
            while True:
                found = {key.fd for key, _ in ready.select(0.5)}
                if self._outer in found:
                    shown = _read(self._outer)
                    if not shown:
                        return
                    _write(self._stdout, shown)
                elif process.poll() is not None:  # something it left has the terminal still
                    return
                if self._stdin in found:
                    typed = _read(self._stdin)
                    if not typed:
                        ready.unregister(self._stdin)
                        typed = b"\x04"  # what a terminal ends its input with
                    _write(self._outer, typed)

    def _resize(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        with contextlib.suppress(OSError):
            _set_size(self._outer, fcntl.ioctl(self._stdin, termios.TIOCGWINSZ, bytes(8)))


def _set_size(terminal: int, size: bytes) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK)
    except OSError as error:
        if error.errno != errno.EIO:  # what Linux says when nobody has the other end
            raise
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
