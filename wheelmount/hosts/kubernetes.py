"""``kubernetes:N``: pods of a Kubernetes cluster, each of which runs a worker."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import secrets
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from wheelmount import lifeline, logs, variables
from wheelmount.child import last_words
from wheelmount.config import Settings
from wheelmount.errors import HostError, InputError, UnavailableError, WaitError
from wheelmount.hosts import launcher, pods
from wheelmount.hosts.address import SECURE, Address
from wheelmount.hosts.network import NetworkHosts, counted
from wheelmount.hosts.pods import Order
from wheelmount.progress import SILENT, Progress

if TYPE_CHECKING:  # see hosts.network
    from wheelmount.hosts.credentials import Authority

log = logging.getLogger("wheelmount")

NAME_OPTIONS = "image", "namespace", "kubeconfig", "template"
"""Options for the pods' image and template, and for their place in a cluster."""

AMOUNT_OPTIONS = "cpu", "memory", "shm"
"""Options for amounts of resources, beside full names of resources such as ``nvidia.com/gpu``."""

GRACE = 30.0
"""Seconds beyond ``queue_timeout`` after which a process that creates pods must have reported."""

MAX_MESSAGE = 4096
"""Maximum bytes of a message about running pods; a pipe delivers that many in one read."""

STOP_TIMEOUT = 90.0
"""Seconds in which a cluster must accept a request to delete pods, or to report on them."""


def parse(text: str) -> tuple[int, tuple[str, ...]]:
    """Read ``N,image=IMAGE[,OPTION=VALUE]…``.

    Raises:
        InputError: the text is invalid.
    """
    example = "for example kubernetes:4,image=registry/wheelmount:1,memory=64Gi"
    count, options = counted("kubernetes", text, "pods", f"give {example}")
    known, names = (*NAME_OPTIONS, *AMOUNT_OPTIONS), []
    for option in options:
        name, _, value = option.partition("=")
        if not value or not (name in known or re.fullmatch(r"[\w.-]+/[\w.-]+", name)):
            raise InputError(
                f"{option!r} is not an option of kubernetes",
                hint=f"known: {', '.join(known)}, and names such as nvidia.com/gpu",
            )
        names.append(name)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"kubernetes:{text} gives {', '.join(twice)} more than once",
            hint=f"give each option once, {example}",
        )
    if "image" not in names:
        raise InputError(
            f"kubernetes:{text} names no image for the pods",
            hint=f"give one that has wheelmount installed, {example}",
        )
    return count, tuple(options)


class KubernetesHosts(NetworkHosts):
    """Pods with Kubernetes' names; this machine and the pods must be able to reach each other.

    The pods have a certificate authority of their own, so users who may read the cluster's Secrets
    can connect to these pods, and to no other hosts.

    Args:
        count: number of pods.
        options: see ``parse``.
        settings: the settings in force; ``python`` is the Python in the image.
        guarded: delete the pods when this process ends; otherwise they stay until ``stop``.
        progress: informed of waits.
    """

    def __init__(
        self,
        count: int,
        options: Sequence[str],
        settings: Settings,
        *,
        guarded: bool,
        progress: Progress = SILENT,
    ) -> None:
        super().__init__((), settings)
        given = dict(option.split("=", 1) for option in options)
        self._guarded = guarded
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._made = False
        self._loss: str | None = None
        self._messages: IO[bytes] | None = None
        self._bounded = threading.Event()
        self._order = Order(
            name=f"wheelmount{secrets.token_hex(4)}",
            namespace=given.pop("namespace", "default"),
            kubeconfig=_absolute(given.pop("kubeconfig", "") or _kubeconfig()),
            count=count,
            image=given.pop("image", ""),
            python=settings.python or "python",
            shm=given.pop("shm", ""),
            template=_template(given.pop("template", "")),
            resources=given,
            timeout=settings.queue_timeout,
        )

    def authority(self) -> Authority:
        """Return the certificate authority of these pods, which is not that of other hosts."""
        from wheelmount.hosts.credentials import Authority

        return Authority.decode(self._order.authority.encode())

    def start(self) -> None:
        """Create the pods, and wait until each answers.

        Raises:
            UnavailableError: the Python package ``kubernetes`` is not installed.
            HostError: the cluster rejects the pods, or one cannot run.
            WaitError: the pods did not run within ``queue_timeout``.
        """
        if importlib.util.find_spec("kubernetes") is None:
            raise _missing()
        from wheelmount.hosts.credentials import OF_HOSTS, Authority

        self._order = replace(self._order, authority=Authority.make(OF_HOSTS).encode().decode())
        self._made = True
        self.begun(self.record())
        try:
            self._process = self._spawn(launcher.GUARDED if self._guarded else launcher.DETACHED)
            found = self._await_pods(self._process)
            self._names = list(found["pods"])
            self._addresses = [Address(SECURE, ip, pods.PORT) for ip in found["pods"].values()]
            self.check(self._settings.start_timeout)  # the workers are about to listen
            self.attach()
        except BaseException:
            self.give_up()
            raise

    def _spawn(self, mode: str) -> subprocess.Popen[bytes]:
        log.debug("pods: %s, MonarchMesh %s in %s", mode, self._order.name, self._order.namespace)
        self._forget_messages()
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process runs
        self._bounded = logs.bound(self._messages.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "wheelmount.hosts.pods", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,  # also holds the output of Monarch's job
            bufsize=0,
            env=variables.without_secrets(),
            cwd="/",  # Python would import modules of the working directory
            start_new_session=True,  # on ^C the client ends the process in order
        )
        lifeline.keep(process.stdin)
        with contextlib.suppress(BrokenPipeError):
            cast(IO[bytes], process.stdin).write(self._order.encode())
        return process

    def _await_pods(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        timeout = self._settings.queue_timeout + GRACE
        deadline = time.monotonic() + timeout
        with (
            self._progress.task("queue", unit="pod") as task,
            selectors.DefaultSelector() as ready,
        ):
            stdout = cast(IO[bytes], process.stdout)
            ready.register(stdout, selectors.EVENT_READ)
            while ready.select(max(0, deadline - time.monotonic())):
                message = _read_message(stdout, self._last_words)
                if "pods" in message:
                    task.advance(len(message["pods"]))
                    return message
                self._progress.log(f"pods wait: {message['waits']}")
        raise WaitError(f"no report about the pods within {timeout:g} s")

    def _last_words(self) -> str:
        """Return the last line of standard error of the process that creates pods."""
        messages = cast(IO[bytes], self._messages)
        messages.seek(0)
        return last_words(messages.read(), "it gave no reason")

    def _forget_messages(self) -> None:
        self._bounded.set()
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def stop(self) -> None:
        """Delete the pods.

        Raises:
            HostError: the cluster did not delete the pods of a session.
        """
        process, self._process = self._process, None
        if self._made and not self._guarded:
            # If it made none, as without a configuration of the cluster, this cannot fail, too.
            none_left = process is not None and _end(process) is None
            process = None if none_left else self._spawn(launcher.ENDED)
        self._made = False
        reason = None if process is None else _end(process)
        self._forget_messages()
        self._hosts = []
        if reason is not None:
            which = f"{self._order.name} --namespace {self._order.namespace}"
            left = HostError(
                f"pods may be left: {reason}",
                hint=f"kubectl delete monarchmesh,secret {which}",
            )
            if not self._guarded:
                raise left
            log.warning("%s: %s", left, left.hint)

    def check(self, patience: float = 0) -> None:
        """Check that each pod listens.

        Raises:
            HostError: a pod does not listen; with the cluster's reason if there is one.
        """
        try:
            super().check(patience)
        except HostError:
            if reason := self.ended():
                raise HostError(reason) from None
            raise

    def check_lease(self) -> None:
        """Check that no other user has deleted the pods of a command.

        Raises:
            HostError: the pods were deleted.
        """
        if self._process is not None and self._guarded and self._loss is None:
            stdout = cast(IO[bytes], self._process.stdout).fileno()
            os.set_blocking(stdout, False)
            with contextlib.suppress(BlockingIOError, ValueError):
                self._loss = json.loads(os.read(stdout, MAX_MESSAGE)).get("ended")
        if self._loss is not None:
            raise HostError(self._loss)

    def ended(self) -> str | None:
        """Return the cluster's reason why pods have ended; None if there is none."""
        if not self._made:
            return None
        try:
            done = subprocess.run(
                [sys.executable, "-m", "wheelmount.hosts.pods", pods.ASKED],
                input=self._order.encode(),
                capture_output=True,
                env=variables.without_secrets(),
                cwd="/",
                timeout=STOP_TIMEOUT,
                check=False,
            )
            message = json.loads(done.stdout or b"{}")
        except (subprocess.TimeoutExpired, ValueError):
            return None
        ended = message.get("ended")
        return None if ended is None else str(ended)

    def leave(self) -> dict[str, Any]:
        """Disconnect from the pods without deleting them; they must not be guarded."""
        if self._process is not None:
            _end(self._process)
        self._forget_messages()
        self._process, self._made = None, False
        return self.record()

    def record(self) -> dict[str, Any]:
        """Return a record for ``resume``."""
        return super().record() | {"order": asdict(self._order)}

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> KubernetesHosts:
        """Return pods that another process left running."""
        record["order"].pop("job", None)  # of version 0.1.0
        order = Order(**record["order"])
        hosts = cls(order.count, (), settings, guarded=False)
        hosts._order, hosts._made = order, True
        hosts.recall(record)
        return hosts


def _read_message(stdout: IO[bytes], last_words: Callable[[], str]) -> dict[str, Any]:
    """Return the next message of the process that creates pods.

    Args:
        stdout: standard output of the process.
        last_words: returns the last line of its standard error, if it has died.

    Raises:
        HostError: the pods cannot be created, or the process has died.
    """
    line = stdout.readline()
    if not line:
        raise HostError(f"the process that makes pods has died: {last_words()}")
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise HostError(message["error"], hint=message["hint"])
    return message


def _end(process: subprocess.Popen[bytes]) -> str | None:
    """End the input of a process that holds pods, and wait until it has ended.

    Returns:
        Why it did not delete the pods; None if none is left.
    """
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    with stdout:
        with contextlib.suppress(OSError):
            stdin.close()
        try:
            code = process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"the cluster did not answer within {STOP_TIMEOUT:g} s"
        if not code:
            return None
        os.set_blocking(stdout.fileno(), False)
        with contextlib.suppress(OSError, ValueError, LookupError):
            return str(json.loads(os.read(stdout.fileno(), MAX_MESSAGE).splitlines()[-1])["error"])
    return f"the process that deletes them ended with code {code}"


def _template(path: str) -> dict[str, Any]:
    """Read a template of pods; return an empty one for an empty path.

    Raises:
        InputError: the file cannot be read, or is not a template.
    """
    if not path:
        return {}
    try:
        import yaml  # comes with the package kubernetes
    except ImportError:
        raise _missing() from None
    hint = "give template=FILE with `metadata:` and `spec:` of a pod, in YAML"
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}", hint=hint) from None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise InputError(f"{path} is not a template of a pod", hint=hint)
    if unknown := sorted(set(found) - {"metadata", "spec"}):
        raise InputError(f"{path} has {', '.join(map(str, unknown))}", hint=hint)
    if "activeDeadlineSeconds" in found["spec"]:
        # Monarch's operator could not create pods, and the command would wait for them.
        raise InputError(f"{path}: a StatefulSet accepts no activeDeadlineSeconds", hint=hint)
    return found


def _missing() -> UnavailableError:
    return UnavailableError(
        "the Python package kubernetes is not installed",
        hint="run: pip install 'wheelmount[kubernetes]'",
    )


def _kubeconfig() -> str:
    """Return the configuration files that ``kubectl`` would read; empty if there are none."""
    usual = Path.home() / ".kube" / "config"
    return os.environ.get("KUBECONFIG") or (str(usual) if usual.exists() else "")


def _absolute(paths: str) -> str:
    return ":".join(str(Path(path).absolute()) for path in paths.split(":") if path)
