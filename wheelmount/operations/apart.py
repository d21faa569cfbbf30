"""Work on several sets of hosts by one command."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from wheelmount.errors import WheelmountError
from wheelmount.progress import SILENT, Progress

Found = TypeVar("Found")


def each(
    works: Sequence[Callable[[Progress], Found]], progress: Progress, step: str
) -> list[Found | WheelmountError]:
    """Do some work on each of several sets of hosts, in a process of its own if it is not one.

    Once Monarch was stopped in a process it does not find again what it had left on other hosts:
    calls to them are never answered.

    Args:
        works: what to do, and whom to tell about its steps; may be pickled.
        progress: told about each step.
        step: what it is called where progress is shown.

    Returns:
        For each what it returned, or the error it ended with.
    """
    if len(works) == 1:
        try:
            return [works[0](progress)]
        except WheelmountError as error:
            return [error]
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        task = stack.enter_context(progress.task(step, unit="sets of hosts"))
        pools = [stack.enter_context(ProcessPoolExecutor(1, context)) for _ in works]
        pairs = zip(pools, works, strict=True)
        futures = [pool.submit(work, SILENT) for pool, work in pairs]
        found = list(map(_settled, futures))
        task.advance(len(found))
    return found


def raise_first(found: Sequence[Found | WheelmountError]) -> list[Found]:
    """Give the results of ``each`` back, or raise the first error among them."""
    results = []
    for result in found:
        if isinstance(result, WheelmountError):
            raise result
        results.append(result)
    return results


def _settled(future: Future[Found]) -> Found | WheelmountError:
    try:
        return future.result()
    except WheelmountError as error:
        return error
