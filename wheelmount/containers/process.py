"""Processes of apptainer: each in a session of its own, and none outlives whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from wheelmount.containers import apptainer
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import WaitError

Stream = int | IO[bytes] | IO[str] | None

# Ends a container whose owner died: standard input is a pipe that only the owner can write to.
_GUARD = 'read -r _; kill -s TERM -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"'


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
) -> int:
    """Run an apptainer command in a session of its own, and see that all of it ends.

    Args:
        command: the whole command line.
        stdin: as for `subprocess.Popen`, and so are the next two.
        stdout: the same.
        stderr: the same.
        timeout: seconds it may take.
        terminal: is what it has for all three instead.
        pass_fds: descriptors that it inherits.
        environment: variables for apptainer, besides the few that it always needs.

    Returns:
        The exit code; 128 and the signal's number where one ended it.

    Raises:
        WaitError: the time ran out.
    """
    if terminal is not None:
        # setsid(1) and not a hook in the child: other threads may hold locks while it is made.
        command = ["setsid", "--ctty", *command]
        stdin = stdout = stderr = terminal.inner
    with contextlib.ExitStack() as ended:
        with _undisturbed():
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**apptainer.environment(), **(environment or {})},
                start_new_session=terminal is None,
                pass_fds=pass_fds,
            )
            ended.enter_context(_ended_with_this_process(process))
        try:
            if terminal is not None:
                terminal.relay(process)
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise WaitError(
                f"a command in a container was stopped: it took longer than {timeout:g} s",
                hint="give it more time, or look at what it printed",
            ) from None
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait: one that ends this in the midst of starting a process would lose that."""
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


@contextlib.contextmanager
def _ended_with_this_process(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop ``process``, a session's leader, when the context fails or this process dies."""
    reading, writing = os.pipe()
    guard = None
    try:
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(process.pid), str(apptainer.GRACE)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield
    except BaseException:
        apptainer.stop(process.pid)
        process.wait()
        raise
    finally:
        # Killed before the pipe is closed: it must not wake up for a session that has ended.
        if guard is not None:
            guard.kill()
            guard.wait()
        os.close(reading)
        os.close(writing)
