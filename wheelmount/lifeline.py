"""Pipes by whose end other processes notice that this one has ended, and end too.

A child that this process forks, as ``multiprocessing`` does, has a copy of each pipe. It would keep
them open beyond the end of this process, and while this process closes them.
"""

from __future__ import annotations

import contextlib
import os
from typing import IO

_pipes: set[IO[bytes]] = set()


def keep(pipe: IO[bytes] | None) -> None:
    """Keep the end of a pipe until this process closes it, and only in this process.

    Children that it forks let go of their copies.
    """
    _pipes.difference_update([each for each in list(_pipes) if each.closed])
    if pipe is not None:
        _pipes.add(pipe)


def _let_go() -> None:
    # Not closed, as the child's objects would then close another file that gets the same number.
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for pipe in _pipes:
        with contextlib.suppress(ValueError):  # closed
            os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
