"""``slurm:N``: nodes of a Slurm job, on which ``srun`` starts workers.

This module submits the job, because Monarch's own SlurmJob cannot read the output of ``squeue`` of
Slurm 22.05; Monarch does everything else. One command's job is an ``srun`` of this process, and the
job of a session is submitted by ``sbatch``. Inside an allocation, a step replaces the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wheelmount import lifeline, logs, variables
from wheelmount.child import last_words
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, WaitError
from wheelmount.hosts import launcher, runtime
from wheelmount.hosts.address import SECURE, Address
from wheelmount.hosts.network import INSTALL, NetworkHosts, counted
from wheelmount.hosts.scheduler import (
    Job,
    ask,
    expand,
    look,
    missing,
    of_user,
    outside,
    queue,
    unfiltered,
    verdict,
)
from wheelmount.progress import SILENT, Progress, number_of

if TYPE_CHECKING:  # loads slowly, and is needed only to start nodes
    from wheelmount.hosts.bundle import Bundle

log = logging.getLogger("wheelmount")

PORTS = range(20000, 30000)
"""Range of the random port of a job: jobs that share a node need different ports."""

TRIES = 3
"""Maximum number of ports to try if another program on a node already uses the first."""

NEW_JOB = "new-job"
"""Option that submits a new job from inside an allocation; not an option of ``sbatch``."""

CHECK_INTERVAL = 3.0
"""Minimum seconds between requests to Slurm whether a job still has its nodes."""

EXCLUSIVE = "exclusive"
"""Option for whole nodes."""

FLAGS = frozenset(
    {NEW_JOB, EXCLUSIVE}
    | {"contiguous", "hold", "no-kill", "no-requeue", "overcommit", "oversubscribe"}
    | {"reboot", "requeue", "spread-job", "use-min-nodes", "verbose"}
)
"""Options of ``sbatch`` that need no value."""

OWN = {
    "array": "it would be many jobs",
    "job-name": "wheelmount finds the job by a name of its own",
    "clusters": "wheelmount asks only the cluster of this machine",
    "nodes": "N of slurm:N is the number of nodes",
    "ntasks": "each node has one worker",
    "ntasks-per-node": "each node has one worker",
    **dict.fromkeys(("output", "error", "label", "quiet"), "wheelmount reads what Slurm prints"),
    "input": "wheelmount sends workers their credentials by it",
    "wait": "the command that submits a session's job would wait for its end",
    "wrap": "wheelmount has a script of its own",
    "test-only": "there would be no job",
    "no-shell": "there would be no workers",
}
"""Options of ``sbatch`` that users may not give, with the reason."""

_OWN_VARIABLES = (
    *("SLURM_LABELIO", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SBATCH_WAIT", "SBATCH_ARRAY_INX", "SRUN_OUTPUT", "SRUN_ERROR"),
)
"""Variables with the effect of such options, which Slurm does not get."""

POLL_INTERVAL = 0.2
"""Seconds between the first checks of the queue; the interval grows up to tenfold."""

_WITH_PARENT = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])",
)
"""Runs a program that the kernel kills when its parent ends (PR_SET_PDEATHSIG of prctl(2)): without
it, ``sbcast`` of a killed client would go on to copy to nodes that have removed the copy."""

MIN_RATE = 1e6
"""Minimum rate of ``sbcast``, in bytes a second, for its time-out."""

OUTPUT_POLL_INTERVAL = 0.05
"""Seconds between checks of the output of nodes."""

GRACE = 10.0
"""Seconds in which nodes must end their processes after the end of their input."""

KILL_TIMEOUT = 2.0
"""Seconds in which ``srun`` must end after a signal."""

CERTIFICATE_TIMEOUT = 10.0
"""Seconds in which a process that listens at a node must show its certificate."""

STOP_TIMEOUT = 30.0
"""Seconds that a job may take to end after it was cancelled; Slurm's KillWait is 30 by default."""


def parse(text: str) -> tuple[int, tuple[str, ...]]:
    """Read ``N[,OPTION[=VALUE]]…``: nodes, and long options of ``sbatch`` without their dashes.

    Raises:
        InputError: the text is invalid.
    """
    hint = "give slurm:N, for example slurm:4,partition=gpu,time=1:00:00"
    count, words = counted("slurm", text, "nodes", hint)
    options: list[str] = []
    for word in words:
        # A word after a value may belong to the value, as in nodelist=a,b.
        if not options or "=" not in options[-1] or _begins(word):
            options.append(word)
        else:
            options[-1] += f",{word}"
    for option in options:
        if re.fullmatch(r"[a-z][a-z-]*(=\S*)?", option) is None:
            raise InputError(
                f"{option!r} is not an option of sbatch",
                hint="give slurm:N,partition=gpu,exclusive",
            )
        name = option.partition("=")[0]
        for own, reason in OWN.items():
            if own.startswith(name):  # sbatch completes what is abbreviated
                raise InputError(
                    f"{option!r} cannot be given: {reason}",
                    hint="give slurm:N with the nodes of one job, and other options",
                )
    return count, tuple(options)


def allocation() -> str | None:
    """Return the hosts of this process's allocation, as for ``--hosts``; None outside of one.

    A command on one of wheelmount's hosts is in an allocation, too, but uses its own machine.

    Raises:
        InputError: the allocation is of a heterogeneous job.
    """
    if "SLURM_JOB_ID" not in os.environ or "WHEELMOUNT_HOST" in os.environ:
        return None
    _check_one_kind()
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    return f"slurm:{len(expand(nodes))}" if nodes else None


def _check_one_kind() -> None:
    """Check that the allocation around this process has nodes of one kind.

    Raises:
        InputError: it is of a heterogeneous job.
    """
    if "SLURM_HET_SIZE" in os.environ:
        raise InputError(
            "this allocation has parts of several kinds (a heterogeneous job)",
            hint="run this outside of it, in an allocation of one kind, or with other --hosts",
        )


def _begins(word: str) -> bool:
    """Return whether a word is an option, and not a part of the value before it."""
    return word in FLAGS or word in OWN or re.match(r"[a-z][a-z-]*=", word) is not None


_ENDED = re.compile(r"tasks? [\d,-]+: (Exited|Terminated|Killed|Out Of Memory)")
"""Pattern of lines of ``srun`` that report the end of a task without a reason."""

_ABORTED = "Job step aborted"
"""Text of ``srun`` for a step that was ended from outside; the job's state has the reason."""

_ALL_VARIABLES = "--export=ALL"
"""Option that gives workers this process's environment, also where ``SLURM_EXPORT_ENV`` or
``SBATCH_EXPORT`` says otherwise, as in a batch script with ``--export=NONE``."""

_STEP = "--overlap", "--mem=0", "--cpu-bind=none", _ALL_VARIABLES
"""Options of a step that shares all the job's resources on its nodes with other steps."""

_CANCEL = """
read -r kept && exit
for _ in 1 2 3 4 5; do scancel --quiet "$@"; sleep 1; done
"""
"""Program of ``sh`` that cancels the jobs of its arguments when its input ends, unless it reads a
line before. It tries more than once, because a job may just be submitted."""

_KEPT = b"\n"
"""The line that keeps the job."""


class _BusyPortError(HostError):
    """Another program on a node listens at the workers' port."""


def _ports() -> list[int]:
    """Return random ports to try, in order."""
    return secrets.SystemRandom().sample(PORTS, TRIES)


def _messages_in(token: str, output: bytes) -> list[dict[str, Any]]:
    """Return the launchers' messages in the output of a step."""
    messages = (launcher.hear(token, line) for line in output.splitlines())
    return [message for message in messages if message is not None]


def _errors(said: Sequence[dict[str, Any]]) -> list[HostError]:
    """Return the errors of nodes that cannot start wheelmount, from their messages."""
    return [
        HostError(f"{words['host']}: {words.get('error')}", hint=words.get("hint"))
        for words in said
        if "host" in words
    ]


def _check(said: Sequence[dict[str, Any]]) -> None:
    """Raise the first error of a node that cannot start wheelmount, if there is one.

    Raises:
        HostError: a node reports an error.
    """
    for error in _errors(said):
        raise error


def _lacking(said: Sequence[dict[str, Any]]) -> list[str]:
    """Return the nodes that lack wheelmount, from their messages."""
    return [str(words["lacks"]) for words in said if "lacks" in words]


class SlurmHosts(NetworkHosts):
    """Nodes of one job, with Slurm's names; wheelmount is sent to nodes without it.

    Args:
        count: number of nodes.
        options: long options of ``sbatch`` without their dashes.
        settings: the settings in force; ``python`` is the Python on the nodes.
        guarded: end the job when this process ends; otherwise it stays until ``stop``.
        apart: give a host on this process's own node a mount namespace.
        own_mounts: give each host where this user may not bind otherwise a mount namespace.
        progress: informed of waits.
    """

    def __init__(
        self,
        count: int,
        options: Sequence[str],
        settings: Settings,
        *,
        guarded: bool,
        apart: bool = False,
        own_mounts: bool = False,
        progress: Progress = SILENT,
    ) -> None:
        super().__init__((), settings)
        self._apart, self._own_mounts = apart, own_mounts
        self._count = count
        self._new_job = NEW_JOB in options
        self._options = [option for option in options if option != NEW_JOB]
        self._progress = progress
        self._guarded = guarded
        self._token = secrets.token_hex(4)
        self._job: str | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._canceller: subprocess.Popen[bytes] | None = None
        self._checked_at = 0.0

    def start(self) -> None:
        """Submit the job, wait until it runs, and until each node answers.

        Raises:
            UnavailableError: Slurm is not installed.
            HostError: Slurm rejects the job, or the job ends.
            WaitError: the job did not run within ``queue_timeout``.
        """
        self._start_authority(guarded=self._guarded)
        first, *others = _ports()
        try:
            self._start_at(first)
        except _BusyPortError as busy:
            for port in others:
                log.debug("slurm: %s", busy.message)
                with contextlib.suppress(_BusyPortError):
                    return self._start_at(port)
            raise

    def _start_at(self, port: int) -> None:
        """Start workers that listen at a port of each node.

        Raises:
            _BusyPortError: another program of a node has the port.
        """
        self._addresses, self._token = [], secrets.token_hex(4)
        self.begun(self.record())  # of a job or a step that is found by its name
        try:
            inside = None if self._new_job else os.environ.get("SLURM_JOB_ID")
            if inside is not None:
                _check_one_kind()
                nodes = expand(os.environ["SLURM_JOB_NODELIST"])[: self._count]
                if len(nodes) < self._count:
                    raise InputError(
                        f"this allocation has {number_of(len(nodes), 'node')}, not {self._count}",
                        hint=f"ask for as many, or make a job: slurm:{self._count},{NEW_JOB}",
                    )
                where = [f"--jobid={inside}", f"--nodelist={','.join(nodes)}", *_STEP]
                self._run(port, where)
            else:
                self._cancel_if_killed()
                if self._guarded:
                    self._run(port, [])
                else:
                    self._submit(port)
                nodes = self._await_nodes()
            self._names = nodes
            self._addresses = [Address(SECURE, node, port) for node in nodes]
            self._bring(inside or str(self._job))
            with runtime.watching(self.check_lease):
                self._give_credentials()
                self._await_workers()
                self.attach()
        except BaseException:
            self.give_up()
            raise

    @property
    def _name(self) -> str:
        return f"wheelmount-{self._token}"

    def _worker(self, port: int, mode: str, how: str) -> list[str]:
        command = self._settings, self._token, "", port, mode
        return launcher.command(*command, apart=self._apart, own_mounts=self._own_mounts, how=how)

    def _wanted(self) -> list[str]:
        options = [f"--{option}" for option in self._options]
        name, nodes, *tasks = self._tasks()
        return [name, nodes, *options, *tasks]

    def _tasks(self) -> list[str]:
        # One worker on each node, for any number of tasks.
        tasks = [f"--ntasks={self._count}", "--ntasks-per-node=1"]
        return [f"--job-name={self._name}", f"--nodes={self._count}", *tasks]

    def _run(self, port: int, where: list[str]) -> None:
        """Start workers by ``srun``; guarded workers end when its input ends.

        Args:
            port: port at which the workers listen.
            where: options for a step of an existing allocation; empty for a new job.
        """
        mode = launcher.GUARDED if self._guarded else launcher.ATTENDED
        wanted, before = self._wanted(), []
        if not where:
            where = ["--cpu-bind=none", _ALL_VARIABLES]
            if any(option.partition("=")[0] == EXCLUSIVE for option in self._options):
                # With srun alone, where Slurm confines steps, the step would get only one
                # processor a task, although the job has whole nodes.
                before = ["salloc", "--quiet", *wanted]
                wanted, where = self._tasks(), list(_STEP)
        command = [*before, "srun", *wanted, *where, "--input=all", "--"]
        command += self._worker(port, mode, "told")
        log.debug("run: %s", shlex.join(command))
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the step runs
        self._bounded = logs.bound(self._messages.fileno())
        try:
            self._step = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._messages,
                stderr=self._messages,
                env=self._environment(),  # srun passes the environment on to the nodes
                start_new_session=True,  # on ^C the client ends srun in order
            )
        except FileNotFoundError:
            self._bounded.set()
            self._messages.close()
            raise missing(command[0]) from None
        lifeline.keep(self._step.stdin)

    def _cancel_if_killed(self) -> None:
        """Have the new job cancelled if this process is killed while the job waits.

        The job of a session is cancelled also if it runs already, until ``leave``.
        """
        which = [of_user(), f"--name={self._name}", *(["--state=PENDING"] if self._guarded else [])]
        self._canceller = subprocess.Popen(
            ["sh", "-c", _CANCEL, "sh", *which],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=unfiltered(self._environment()),
            start_new_session=True,  # it outlives this process
        )
        lifeline.keep(self._canceller.stdin)

    def _end_canceller(self, kept: bytes) -> None:
        """End what ``_cancel_if_killed`` began.

        Args:
            kept: a line to keep the job; empty to cancel it, also if Slurm accepts it only now.
        """
        canceller, self._canceller = self._canceller, None
        if canceller is not None and canceller.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                canceller.stdin.write(kept)
                canceller.stdin.close()
            if kept:
                canceller.wait()

    def _environment(self) -> dict[str, str]:
        environ = variables.without_secrets()
        for name in _OWN_VARIABLES:
            environ.pop(name, None)
        return outside(environ) if self._new_job else environ

    def _give_credentials(self) -> None:
        """Send the workers of a step a certificate for its nodes."""
        if self._step is not None:
            names = [name for address in self._addresses for name in address.names()]
            self._give(self._certify(list(dict.fromkeys(names))))

    def _give(self, text: bytes) -> None:
        """Write to the input of each worker of a step."""
        if self._step is not None and self._step.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._step.stdin.write(text)
                self._step.stdin.flush()

    def _submit(self, port: int) -> None:
        """Submit a new job, whose script contains the authority because its nodes are unknown yet.

        Only the owner of a job can read its script.
        """
        credentials = self.authority().encode()
        run = ["srun", f"--ntasks={self._count}", "--ntasks-per-node=1", *_STEP, "--input=all"]
        run += ["--", *self._worker(port, launcher.ATTENDED, "wait")]
        script = (
            f"#!/bin/bash\n{shlex.join(run)} <<'CREDENTIALS'\n{credentials.decode()}CREDENTIALS\n"
        )
        output = ["--output=/dev/null", "--parsable"]
        command = ["sbatch", _ALL_VARIABLES, *self._wanted(), *output]
        log.debug("run: %s, which runs %s", shlex.join(command), shlex.join(run))
        said = ask(command, script, environ=self._environment())
        self._job = said.strip().partition(";")[0]
        self.begun(self.record())

    def _bring(self, job: str) -> None:
        """Send wheelmount to nodes without it; their launchers wait for it.

        Raises:
            HostError: a node cannot receive it.
        """
        if self._settings.python:
            return
        if self._step is not None:
            lacking = self._await_messages()
        else:  # the output of a session's workers is not kept
            lacking = _lacking(self._ask_nodes(job, self._names))
        if lacking:
            from wheelmount.hosts import bundle

            with self._progress.task("bring", unit="B") as task:
                made = bundle.make(self._settings)
                task.total(made.size * len(lacking))
                self._send(job, made)
                self._give(b"\n")  # the nodes that waited for wheelmount continue
                task.advance(made.size * len(lacking))

    def _send(self, job: str, made: Bundle) -> None:
        """Copy the bundle to all nodes by ``sbcast``; nodes without wheelmount unpack it."""
        path = f"/tmp/{self._name}.tar.gz"  # noqa: S108 - sbcast overwrites no file
        where = self._look_for_step() or job
        try:
            timeout = self._settings.start_timeout + made.size / MIN_RATE
            self._run_for(timeout, ["sbcast", f"--jobid={where}", str(made.path), path])
            self._ask_nodes(job, self._names, made.order(path))
        finally:
            with contextlib.suppress(HostError, WaitError):
                step = self._step_of(job, self._names)
                self._run_for(self._settings.start_timeout, [*step, "rm", "-f", path])

    def _await_messages(self) -> list[str]:
        """Wait until each node reports that it listens; return those that lack wheelmount.

        Raises:
            HostError: a node reports an error.
        """
        deadline = time.monotonic() + self._settings.start_timeout
        while not self._step_ended():
            said = self._received()
            _check(said)
            if len(said) >= len(self._names):
                return _lacking(said)
            if time.monotonic() > deadline:
                break  # the wait for the workers' ports will raise the error
            time.sleep(OUTPUT_POLL_INTERVAL)
        return []

    def _received(self) -> list[dict[str, Any]]:
        """Return the messages of the step's workers; none if another process started the step."""
        if self._step is None:
            return []
        self._messages.seek(0)
        return _messages_in(self._token, self._messages.read())

    def _ask_nodes(
        self, job: str, nodes: Sequence[str], order: bytes = b""
    ) -> list[dict[str, Any]]:
        """Ask nodes, in a new step, whether they have wheelmount.

        Args:
            job: the job of the nodes.
            nodes: the nodes to ask.
            order: order of the bundle, for nodes without wheelmount.

        Returns:
            The nodes' messages.

        Raises:
            HostError: a node reports an error.
            WaitError: the step takes too long.
        """
        from wheelmount.hosts import bundle

        command = self._step_of(job, nodes)
        command += bundle.command(self._token, ["-c", ""], self._settings)
        timeout = self._settings.start_timeout + (bundle.UNPACK if order else 0)
        said = _messages_in(self._token, self._run_for(timeout, command, order))
        _check(said)
        return said

    @staticmethod
    def _step_of(job: str, nodes: Sequence[str]) -> list[str]:
        """Return the first words of an ``srun`` command that runs a program once on each node."""
        command = ["srun", f"--jobid={job}", f"--nodelist={','.join(nodes)}"]
        command += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        return [*command, *_STEP, "--input=all", "--"]

    def _run_for(self, timeout: float, command: list[str], given: bytes = b"") -> bytes:
        """Run a command of Slurm while the job runs; return its output.

        Raises:
            HostError: the job has ended, or the command fails.
            WaitError: the command takes longer than ``timeout`` seconds.
        """
        log.debug("run: %s", shlex.join(command))
        deadline = time.monotonic() + timeout
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as output:
            told.write(given)
            told.seek(0)
            process = subprocess.Popen(
                [*(_WITH_PARENT if command[0] == "sbcast" else ()), *command],
                stdin=told,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    if time.monotonic() > deadline:
                        raise WaitError(
                            f"{command[0]} has not ended within {timeout:g} s",
                            hint="raise WHEELMOUNT_START_TIMEOUT",
                        )
                    self.check_lease()
                    time.sleep(OUTPUT_POLL_INTERVAL)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            said = output.read()
        if process.returncode and command[0] == "sbcast":
            raise HostError(
                last_words(said, "sbcast failed"),
                hint="set WHEELMOUNT_PYTHON to a Python with wheelmount on the nodes",
            )
        return said

    def _await_nodes(self) -> list[str]:
        """Wait until the job runs; return its nodes."""
        started, wait, waits = time.monotonic(), POLL_INTERVAL, ""
        with self._progress.task("queue", unit="") as task:
            while True:
                asked, job = True, None
                try:
                    job = self._look()
                except HostError as error:  # Slurm's controller may be restarting, or be busy
                    asked = False
                    if error.message != waits:
                        waits = error.message
                        self._progress.log(f"{waits}; it is asked again")
                if job is not None:
                    self._job = job.number
                    task.note(f"job {job.number} {job.state.lower()}")
                    if job.state == "RUNNING":
                        return expand(job.nodes)
                    if job.state not in ("PENDING", "CONFIGURING"):
                        raise HostError(
                            verdict(job.number) or f"job {job.number} is {job.state.lower()}"
                        )
                    if job.reason not in ("None", waits):
                        waits = job.reason
                        self._progress.log(f"job {job.number} waits: {waits}")
                elif self._step_ended() or (asked and self._step is None):
                    _check(self._received())
                    raise self._failure("Slurm does not run the job", self._last_reason())
                if time.monotonic() - started > self._settings.queue_timeout:
                    raise WaitError(
                        f"the job did not run within {self._settings.queue_timeout:g} s",
                        hint="raise WHEELMOUNT_QUEUE_TIMEOUT, or ask for less",
                    )
                time.sleep(wait)
                wait = min(wait * 1.2, 10 * POLL_INTERVAL)

    def _look(self) -> Job | None:
        return look(f"--name={self._name}" if self._job is None else f"--jobs={self._job}")

    def _last_reason(self) -> str:
        """Return the last message of ``srun`` with a reason why a task ended."""
        if self._step is None:
            return "the job is gone"
        for error in _errors(self._received()):
            return error.message
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").strip().splitlines()
        own = "srun: job ", "salloc: job ", f"{self._token} "
        said = [line for line in lines if not line.startswith(own)]
        reasons = [line for line in said if not _ENDED.search(line)] or said
        return re.sub("^(srun|salloc): error: ", "", reasons[-1]) if reasons else "srun ended"

    @staticmethod
    def _failure(subject: str, reason: str) -> HostError:
        """Return the error for workers that do not start."""
        ended = "CANCELLED" in reason or _ABORTED in reason or reason.startswith("job ")
        return HostError(f"{subject}: {reason}", hint=None if ended else INSTALL)

    def _await_workers(self) -> None:
        timeout = self._settings.start_timeout
        deadline = time.monotonic() + timeout
        for address in self._addresses:
            patience = max(0, deadline - time.monotonic())
            try:
                address.await_answer(timeout, patience, self._in_vain)
            except HostError as error:
                _check(self._received())
                reason = (
                    self._last_reason() if self._step_ended() else self.ended() or error.message
                )
                if _ABORTED in reason:
                    reason = self.ended() or reason
                raise self._failure(address.host, reason) from None
            if not self._is_ours(address):
                raise _BusyPortError(f"another program listens at {address}", hint="try again")

    def _in_vain(self) -> bool:
        """Return whether a node will not come up."""
        return self._loss() is not None or bool(_errors(self._received()))

    def _is_ours(self, address: Address) -> bool:
        """Return whether the process at an address has a certificate of these hosts' authority."""
        context = ssl.create_default_context(cadata=self.authority().public())
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority signs only for these hosts
        try:
            with (
                socket.create_connection(
                    (address.host, address.port), CERTIFICATE_TIMEOUT
                ) as connection,
                context.wrap_socket(connection),
            ):
                return True
        except OSError:  # another certificate, no answer, or a closed connection
            return False

    def check_lease(self) -> None:
        """Check that the step runs, or the job if another process started the step.

        Raises:
            HostError: the step or the job has ended.
        """
        if reason := self._loss():
            raise HostError(self.ended() or reason)

    def _loss(self) -> str | None:
        """Return why the nodes are lost, or None; ask Slurm at most once in ``CHECK_INTERVAL``."""
        if self._step is not None:
            return self._last_reason() if self._step_ended() else None
        if time.monotonic() - self._checked_at < CHECK_INTERVAL:
            return None
        self._checked_at = time.monotonic()
        return self.ended()

    def _step_ended(self) -> bool:
        return self._step is not None and self._step.poll() is not None

    def stop(self) -> None:
        """End the job.

        Raises:
            HostError: a session's job may go on, because Slurm does not answer; all else has ended.
        """
        step, self._step = self._step, None
        if step is not None:
            if step.stdin is not None:
                with contextlib.suppress(OSError):
                    step.stdin.close()  # guarded workers end when their input ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(GRACE if self._addresses else 0)
        left = None
        try:
            if self._job is not None or not self._guarded:
                self._cancel()
            if self._job is None and not self._guarded:
                self._cancel_step()
        except HostError as error:
            job = "its job" if self._job is None else f"job {self._job}"
            command = "this command again" if self._job is None else f"`scancel {self._job}`"
            left = HostError(
                f"{job} may still have its nodes: {error.message}",
                hint=f"run {command} when Slurm answers",
            )
        self._end_canceller(_KEPT if self._job is not None and left is None else b"")
        self._job = None
        if step is not None:
            for end in (step.terminate, step.kill):  # srun may wait for lost nodes
                if step.poll() is None:
                    end()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        step.wait(KILL_TIMEOUT)
            self._bounded.set()
            self._messages.close()
        self._hosts = []
        if left is not None:
            if not self._guarded:
                raise left
            log.warning("%s", left)  # the end of srun ends the job of a command, too

    def _cancel(self) -> None:
        """Cancel the job, and wait until it has ended.

        If its number is unknown, Slurm may have accepted the job all the same.

        Raises:
            HostError: Slurm does not answer.
        """
        ask(["scancel", of_user(), self._job or f"--name={self._name}"], ended=True)
        started = time.monotonic()
        with contextlib.suppress(HostError):  # the job is cancelled, and ends also unseen
            while (found := self._look()) is not None:
                waited = time.monotonic() - started
                # A completing job ends its processes, or waits for a lost node.
                if waited > STOP_TIMEOUT or (found.state == "COMPLETING" and waited > GRACE):
                    break
                time.sleep(POLL_INTERVAL)

    def _cancel_step(self) -> None:
        """End a session's step within an allocation, and wait until the step has ended.

        Raises:
            HostError: Slurm does not answer.
        """
        started = time.monotonic()
        while (step := self._look_for_step()) is not None:
            waited = time.monotonic() - started
            if waited > STOP_TIMEOUT:
                break
            # SIGTERM first, because Slurm kills a step at once if it is cancelled.
            gently = ["--signal=TERM"] if waited < GRACE else []
            ask(["scancel", *gently, step], ended=True)
            time.sleep(POLL_INTERVAL)

    def _look_for_step(self) -> str | None:
        for line in queue("--steps", "--format=%i|%j"):
            number, _, name = line.partition("|")
            if name == self._name:
                return number
        return None

    def check(self, patience: float = 0) -> None:
        """Check that the job runs, and each node listens.

        Raises:
            HostError: the job has ended, or a node does not listen.
        """
        reason = self.ended()
        if reason is not None:
            raise HostError(reason)
        super().check(patience)

    def ended(self) -> str | None:
        """Return why Slurm has taken the nodes back; None if it has not, or does not answer."""
        if self._job is None:
            return None
        try:
            return verdict(self._job)
        except HostError as error:
            log.debug("slurm: %s", error)
            return None

    def leave(self) -> dict[str, Any]:
        """Disconnect from the nodes without stopping the job; it must not be guarded."""
        self._step = None
        self._end_canceller(_KEPT)
        return self.record()

    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``."""
        return {
            "count": self._count,
            "job": self._job,
            "token": self._token,
            **super().record(),
        }

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> SlurmHosts:
        """Return hosts that another process left running."""
        hosts = cls(record["count"], (), settings, guarded=False)
        hosts._job, hosts._token = record["job"], record["token"]
        hosts.recall(record)
        return hosts
