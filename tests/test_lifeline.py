"""Pipes that children of a process do not keep open."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from wheelmount import lifeline


def test_children_let_go_of_a_pipe_and_nothing_else() -> None:
    (reading, kept), (other, free) = os.pipe(), os.pipe()
    with os.fdopen(kept, "wb") as pipe, os.fdopen(free, "wb") as shared:
        lifeline.keep(pipe)
        child = os.fork()
        if child == 0:
            shared.write(str(Path(f"/proc/self/fd/{kept}").readlink()).encode())
            shared.flush()
            signal.pause()
    try:
        assert os.read(other, 100) == b"/dev/null"
        assert select.select([reading, other], [], [], 0) == ([reading], [], [])
        assert os.read(reading, 1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(other)


def test_a_pipe_that_is_closed_is_none_of_theirs() -> None:
    reading, kept = os.pipe()
    with os.fdopen(kept, "wb") as pipe:
        lifeline.keep(pipe)
    other = os.open("/proc/self/status", os.O_RDONLY)
    assert other == kept, "which the pipe no longer has"
    child = os.fork()
    if child == 0:
        os._exit(0 if os.read(other, 5) == b"Name:" else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(other)
    os.close(reading)
