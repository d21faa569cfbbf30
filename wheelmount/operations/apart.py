"""Work on hosts in processes of its own: several sets of hosts, or some beside those in use.

The processes are not of ``multiprocessing``, which would run the program of a user of ``Cluster``
from its beginning in each of them.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import IO, NamedTuple, NoReturn, TypeVar, cast

from wheelmount.errors import HostError, WheelmountError
from wheelmount.hosts import runtime
from wheelmount.mount.kernel.syscalls import die_with_parent
from wheelmount.progress import SILENT, Progress

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from wheelmount.operations.apart import main; main(*map(int, sys.argv[1:3]))"
)
"""What such a process runs; it finds modules where this one does."""

Found = TypeVar("Found")


def each(
    works: Sequence[Callable[[Progress], Found]],
    progress: Progress,
    step: str,
    *,
    alone: bool = False,
) -> list[Found | WheelmountError]:
    """Do some work on sets of hosts, each in a new process if there are several.

    A process that has stopped Monarch cannot use other hosts afterwards: its calls are never
    answered.

    Args:
        works: functions that do the work, each called with a progress object. They must be
            picklable, unless there is one that this process does.
        progress: told about each step.
        step: name of the step in the progress.
        alone: start a new process even for one.

    Returns:
        For each function its result, or the error that it raised.
    """
    if len(works) == 1 and not alone:
        try:
            return [works[0](progress)]
        except WheelmountError as error:
            return [error]
    with ExitStack() as stack:
        task = stack.enter_context(progress.task(step, unit="set of hosts"))
        processes: list[_Process] = []
        with _telling(processes):
            for work in works:
                processes.append(stack.enter_context(_working(partial(work, SILENT))))
            found: list[Found | WheelmountError] = list(map(_settled, processes))
        task.advance(len(found))
    return found


def alone(work: Callable[[], Found]) -> Found:
    """Do some work on hosts in a new process, so that this process can use other hosts.

    Args:
        work: a picklable function.

    Raises:
        WheelmountError: the work failed.
    """
    with _working(work) as one, _telling([one]):
        found: Found | WheelmountError = _settled(one)
    if isinstance(found, WheelmountError):
        raise found
    return found


class _Process(NamedTuple):
    """A process that does some work.

    Attributes:
        process: the process.
        answer: pipe from which its result is read.
    """

    process: subprocess.Popen[bytes]
    answer: IO[bytes]


@contextmanager
def _working(work: Callable[[], object]) -> Iterator[_Process]:
    """Have a new process do some work, and wait for its end when the context ends."""
    path = [each or os.getcwd() for each in sys.path]  # noqa: PTH109 - as Python itself
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answer:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, str(os.getpid()), str(writing), *path],
                stdin=subprocess.PIPE,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        try:
            with suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as given:
                given.write(pickle.dumps(work))
            yield _Process(process, answer)
        finally:
            answer.close()  # or else it could wait for its reader
            process.wait()  # after ^C it takes down what it has made


@contextmanager
def _telling(processes: Sequence[_Process]) -> Iterator[None]:
    """Tell processes if this one is interrupted in the context: all, before any is waited for.

    A terminal tells them of ^C itself, but other signals come to this process alone.
    """
    try:
        yield
    except KeyboardInterrupt:
        for each in processes:
            each.process.terminate()
        raise


def _settled(one: _Process) -> Found | WheelmountError:
    """Return the result of a process's work, or the error of wheelmount's that ended it."""
    text = one.answer.read()
    if not text:
        return HostError(
            "the process that worked on these hosts was killed",
            hint="is the memory of this machine exhausted? then run it again",
        )
    found, error = pickle.loads(text)  # noqa: S301 - from a child of this process
    if error is not None and not isinstance(error, WheelmountError):
        raise error
    return cast("Found | WheelmountError", found if error is None else error)


_came: list[int] = []
"""Signals that have interrupted this process."""


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGINT or not _came:  # the parent's own must not disturb the clean-up
        _came.append(number)
        raise KeyboardInterrupt


def main(parent: int, answer: int) -> NoReturn:
    """Do the work that standard input holds, and end this process.

    Args:
        parent: the process that waits for the result, with which this one ends.
        answer: descriptor of a pipe, for the result or the error.
    """
    die_with_parent()
    if os.getppid() != parent:  # it was killed before this
        os._exit(1)
    os.set_inheritable(answer, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        runtime.own_process()
        try:
            work = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent
            text = pickle.dumps((work(), None))
        except Exception as error:
            text = pickle.dumps((None, error))
        with os.fdopen(answer, "wb") as file:
            file.write(text)
        atexit._run_exitfuncs()
    except KeyboardInterrupt:  # the parent tells of it
        pass
    finally:
        os._exit(0)  # as the command line ends: a thread of Monarch's would abort the process
