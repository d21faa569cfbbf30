"""Queries to Slurm by its commands, and their answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from wheelmount import variables
from wheelmount.child import last_words
from wheelmount.errors import HostError, UnavailableError

ASK_TIMEOUT = 60.0
"""Seconds that Slurm's controller may take to answer."""

_OWN_FILTERS = "SQUEUE_", "SCANCEL_"
"""Prefixes of variables by which a user has these commands pass over jobs, or ask questions."""

_ENDED = re.compile("Invalid job id|already completing or completed")
"""Pattern of what Slurm's commands say of a job that has ended; other errors say nothing of it."""

WORKS = "RUNNING", "SUSPENDED"
"""States of a job that has its nodes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A line of the queue.

    Attributes:
        number: of the job.
        state: such as ``RUNNING``.
        reason: why it waits.
        nodes: it has, as Slurm abbreviates them.
    """

    number: str
    state: str
    reason: str
    nodes: str


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables that tell Slurm's commands of an enclosing job."""
    own = "SLURM_CONF", "SLURM_CLUSTERS"
    return {
        name: value
        for name, value in environ.items()
        if name in own or not name.startswith("SLURM_")
    }


def unfiltered(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which ``squeue`` and ``scancel`` do what their arguments say."""
    return {name: value for name, value in environ.items() if not name.startswith(_OWN_FILTERS)}


def ask(
    command: list[str],
    text: str = "",
    *,
    ended: bool = False,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Ask Slurm.

    Args:
        command: one of Slurm's.
        text: its input.
        ended: whether the command may fail because the job has ended; for no other reason.
        environ: its environment, which ``sbatch`` passes on to the job; default this process's,
            without secrets and filters.

    Raises:
        UnavailableError: Slurm is not installed.
        HostError: it fails, or does not answer.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a job may have any name
            timeout=ASK_TIMEOUT,
            env=environ or unfiltered(variables.without_secrets()),
            check=False,
        )
    except FileNotFoundError:
        raise missing(command[0]) from None
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{command[0]} does not answer within {ASK_TIMEOUT:g} s", hint="look at `scontrol ping`"
        ) from None
    if done.returncode and not (ended and _ENDED.search(done.stderr)):
        said = last_words(done.stderr, f"it ended with code {done.returncode}")
        raise HostError(f"{command[0]}: {said.removeprefix(f'{command[0]}: error: ')}")
    return done.stdout


def of_user() -> str:
    """Return the option for this user's jobs: another user's job can have any name."""
    return f"--user={os.getuid()}"


def queue(*options: str, ended: bool = False) -> list[str]:
    """Return lines of ``squeue`` about this user's jobs.

    Args:
        options: of ``squeue``.
        ended: see ``ask``.

    Raises:
        HostError: Slurm does not answer.
    """
    said = ask(["squeue", "--noheader", of_user(), *options], ended=ended)
    return [line.strip() for line in said.splitlines()]


def look(which: str, *, ended: bool = False) -> Job | None:
    """A job of this user's as the queue has it; None if it is not there, or not yet.

    Args:
        which: option of ``squeue`` that names it.
        ended: also some minutes after its end, as long as Slurm remembers it (MinJobAge).

    Raises:
        HostError: Slurm does not answer.
    """
    states = ["--states=all"] if ended else []
    # A job that has ended long ago is an error to squeue.
    for line in queue(which, *states, "--format=%A|%T|%r|%N", ended=True):
        return Job(*line.split("|", 3))
    return None


def account(number: str) -> Job | None:
    """Return a job as Slurm's accounts have it; None if there are none, or it is not in them."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}"]
    try:
        said = ask([*command, "--format=State"])
    except (UnavailableError, HostError):  # sacct is not installed, or does not answer
        return None
    state = said.split()  # as CANCELLED by 0
    return Job(number, state[0], "", "") if state else None


def verdict(number: str) -> str | None:
    """Return why a job has lost its nodes; None if it has them.

    Raises:
        HostError: Slurm does not answer.
    """
    job = look(f"--jobs={number}", ended=True)
    if job is None:  # the controller forgets jobs some minutes after their end
        job = account(number)
        if job is None or job.state in (*WORKS, "PENDING"):
            return f"job {number} has ended"
    if job.state == "TIMEOUT" or job.reason == "TimeLimit":
        return f"job {number} has ended: its time limit was reached; for more: time=…"
    if job.state in WORKS:
        return None
    if job.state == "PENDING":  # as Slurm does where a node failed
        return f"job {number} was put back into the queue: {job.reason}"
    if job.state == "COMPLETING":  # and Slurm does not say yet how
        return f"job {number} is being ended"
    return f"job {number} has ended: {job.state.lower()}"


def expand(nodes: str) -> list[str]:
    """Names of nodes that Slurm has abbreviated."""
    return ask(["scontrol", "show", "hostnames", nodes]).split()


def missing(program: str) -> UnavailableError:
    """What to raise where one of Slurm's commands is not there."""
    return UnavailableError(f"there is no {program} here", hint="run it where Slurm is installed")
