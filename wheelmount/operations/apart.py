"""Work on several sets of hosts by one command."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import TypeVar

from wheelmount.errors import HostError, WheelmountError
from wheelmount.mount.kernel.syscalls import die_with_parent
from wheelmount.progress import SILENT, Progress

Found = TypeVar("Found")


def each(
    works: Sequence[Callable[[Progress], Found]], progress: Progress, step: str
) -> list[Found | WheelmountError]:
    """Do some work on several sets of hosts, each in a new process if there are several.

    A process that has stopped Monarch cannot use other hosts afterwards: its calls are never
    answered.

    Args:
        works: functions that do the work, each called with a progress object. They must be
            picklable if there are several.
        progress: told about each step.
        step: name of the step in the progress.

    Returns:
        For each function its result, or the error that it raised.
    """
    if len(works) == 1:
        try:
            return [works[0](progress)]
        except WheelmountError as error:
            return [error]
    with ExitStack() as stack:
        task = stack.enter_context(progress.task(step, unit="set of hosts"))
        pools = [stack.enter_context(_pool()) for _ in works]
        pairs = zip(pools, works, strict=True)
        futures = [pool.submit(work, SILENT) for pool, work in pairs]
        found = list(map(_settled, futures))
        task.advance(len(found))
    return found


def alone(work: Callable[[], Found]) -> Found:
    """Do some work on hosts in a new process, so that this process can use other hosts.

    Args:
        work: a picklable function.

    Raises:
        WheelmountError: the work failed.
    """
    with _pool() as pool:
        found = _settled(pool.submit(work))
    if isinstance(found, WheelmountError):
        raise found
    return found


def _pool() -> ProcessPoolExecutor:
    """Return one process, which would wait for further work for ever if this one were killed."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it was killed before this
        os._exit(1)


def _settled(future: Future[Found]) -> Found | WheelmountError:
    try:
        return future.result()
    except WheelmountError as error:
        return error
    except BrokenProcessPool:
        return HostError(
            "the process that worked on these hosts was killed",
            hint="is the memory of this machine exhausted? then run it again",
        )
