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
import subprocess
import termios
import tty
from types import FrameType, TracebackType
from typing import Any

_CHUNK = 1 << 16


class Terminal:
    """A terminal that a command may have. A context manager.

    Meanwhile this process's own terminal gives on every key as it is, ``^C`` among them; it is put
    back at the end.

    Args:
        stdin: descriptor of this process's terminal.
        stdout: where what the command shows goes.
    """

    def __init__(self, stdin: int = 0, stdout: int = 1) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._saved: list[Any] | None = None
        self._signal: Any = None
        self._outer = self.inner = -1

    def __enter__(self) -> Terminal:
        self._outer, self.inner = os.openpty()
        self._resize()
        self._signal = signal.signal(signal.SIGWINCH, self._resize)
        self._saved = termios.tcgetattr(self._stdin)
        tty.setraw(self._stdin, termios.TCSADRAIN)  # what was typed ahead is for the command
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._saved is not None:
            termios.tcsetattr(self._stdin, termios.TCSAFLUSH, self._saved)
        signal.signal(signal.SIGWINCH, self._signal)
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
            size = fcntl.ioctl(self._stdin, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._outer, termios.TIOCSWINSZ, size)


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
