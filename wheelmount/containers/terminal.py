"""A terminal for a command in a container, connected to this process's terminal.

The command runs in a new session, so that all its processes can be ended together. A session cannot
share a terminal with another, so the command gets a new one (``pty(7)``, ``credentials(7)``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Iterator
from types import FrameType, TracebackType

_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16

_GLANCE = 0.1
"""Seconds between checks whether the command has ended."""


Size = tuple[int, int]
"""Rows and columns."""


@contextlib.contextmanager
def raw() -> Iterator[Size]:
    """Set the terminal to raw mode, in which keys such as ``^C`` are input too; yield its size."""
    saved = termios.tcgetattr(_STDIN)
    tty.setraw(_STDIN, termios.TCSADRAIN)  # keys typed ahead are for the command
    try:
        size = os.get_terminal_size(_STDIN)
        yield size.lines, size.columns
    finally:
        termios.tcsetattr(_STDIN, termios.TCSAFLUSH, saved)


class Terminal:
    """A new terminal for a command, as a context manager.

    In the context, this process's terminal is in raw mode; its former mode is restored at the end.

    Args:
        size: size of a terminal elsewhere, whose keys are the input; None for this process's own.
    """

    def __init__(self, size: Size | None = None) -> None:
        self._size = size
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
        self._ended.enter_context(raw())
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

    def relay(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        """Copy input and output until the command, or all users of its terminal, have ended.

        Args:
            process: the command.
            deadline: time, of ``time.monotonic``, at which this ends even if they have not.
        """
        os.close(self.inner)  # the last one to close it ends the terminal
        self.inner = -1  # another file may get the number
        # A thread for each direction: the command may read nothing until its output was read.
        ended, ending = os.pipe()
        shows = threading.Thread(target=self._show, args=(ended,), daemon=True)
        types = threading.Thread(target=self._type, args=(ended,), daemon=True)
        try:
            os.set_blocking(self._outer, False)
            for each in (shows, types):
                each.start()
            while shows.is_alive() and process.poll() is None:
                if time.monotonic() > deadline:
                    return
                shows.join(_GLANCE)
            shows.join(_GLANCE)  # background processes may still have the terminal
            os.write(ending, b"x")
            shows.join()  # until all output is copied
        finally:
            with contextlib.suppress(OSError):
                os.write(ending, b"x")
            for each in (shows, types):
                if each.ident is not None:
                    each.join(_GLANCE)  # it may wait for the reader of its output
            for descriptor in (ended, ending):
                os.close(descriptor)

    def _show(self, ended: int) -> None:
        with contextlib.suppress(OSError):  # this process's terminal was closed; a signal says so
            while True:
                ready, _, _ = select.select([self._outer, ended], [], [])
                shown = _read(self._outer)
                if shown == b"" or (shown is None and ended in ready):
                    return
                _write(_STDOUT, shown or b"")

    def _type(self, ended: int) -> None:
        while ended not in (ready := select.select([_STDIN, ended], [], [])[0]):
            try:
                typed = os.read(_STDIN, _CHUNK) if ready else b""
            except OSError:
                typed = b""
            rest = memoryview(typed or b"\x04")  # ^D: the end of input
            while rest:
                try:
                    rest = rest[os.write(self._outer, rest) :]
                except BlockingIOError:  # the command does not read
                    if ended in select.select([ended], [self._outer], [])[0]:
                        return
                except OSError:
                    return
            if not typed:
                return

    def _resize(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        with contextlib.suppress(OSError):
            _set_size(self._outer, fcntl.ioctl(_STDIN, termios.TIOCGWINSZ, bytes(8)))


def _set_size(terminal: int, size: bytes) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def _read(descriptor: int) -> bytes | None:
    """Read bytes: None if there are none yet, empty if no process has the other end open."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:  # Linux's error if no process has the other end open
            raise
        return b""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
