"""Run apptainer in a session of its own, such that no process outlives its owner."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from wheelmount.containers import apptainer, guard
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import OvertimeError

Stream = int | IO[bytes] | IO[str] | None

_GUARD = str(Path(guard.__file__))


def attend(
    command: Sequence[str],
    *,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    timeout: float | None = None,
    terminal: Terminal | None = None,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    stays: bool = False,
    confined: bool = False,
    ids: str = "",
) -> int:
    """Run an apptainer command in a session of its own, and end all its processes.

    They end with the command, with an exception here, and with this process, however it ends: a
    guard process (`guard`) runs the command.

    Args:
        command: the whole command line.
        stdin: as for `subprocess.Popen`, and so are the next two.
        stdout: the same.
        stderr: the same.
        timeout: seconds it may take.
        terminal: the command's terminal, in place of all three.
        pass_fds: descriptors of locks, which it inherits; see ``guard.main``.
        environment: variables for apptainer, besides the few that it always needs.
        directory: the container's private one, deleted if this process does not live to do so.
        stays: let go on what the command leaves when it has ended well.
        confined: see ``guard.main``.
        ids: the same.

    Returns:
        The exit code; 128 and the signal's number where one ended it.

    Raises:
        OvertimeError: the time ran out.
    """
    if terminal is not None:
        stdin = stdout = stderr = terminal.inner
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    reading, writing = os.pipe()
    try:
        with undisturbed():
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", _GUARD, str(reading)),
                    "stays" if stays else "ends",
                    "terminal" if terminal is not None else "none",
                    "confined" if confined else "free",
                    "" if directory is None else str(directory),
                    ids,
                    ",".join(map(str, pass_fds)),
                    *command,
                ],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**apptainer.environment(), **(environment or {})},
                start_new_session=True,
                pass_fds=[reading, *pass_fds],
            )
        os.close(reading)
        reading = -1
        try:
            if terminal is not None:
                terminal.relay(process, deadline)
            return process.wait(None if timeout is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OvertimeError(
                f"the command was ended: it took longer than {timeout:g} s"
            ) from None
        finally:
            if process.poll() is None:
                with undisturbed():
                    with contextlib.suppress(BrokenPipeError):
                        os.write(writing, b"x")
                    process.wait()
    finally:
        os.close(writing)
        if reading >= 0:
            os.close(reading)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block signals that end this process, so that a start or an end is complete."""
    if threading.current_thread() is not threading.main_thread():  # signals go to that one
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _frame: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)
