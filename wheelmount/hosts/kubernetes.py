"""``kubernetes:N``: pods of a cluster, each of which is a worker."""

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

from wheelmount import logs, variables
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

PLACES = "image", "namespace", "kubeconfig", "template"
"""Options that say what runs, and where."""

AMOUNTS = "cpu", "memory", "shm"
"""Options that say how much of it; so do the full names of resources, as ``nvidia.com/gpu``."""

GRACE = 30.0
"""Seconds beyond ``queue_timeout`` in which something must be said about pods."""

MOST_SAID = 4096
"""Bytes that are said at a time about pods that run; a pipe keeps so many together."""

STOP_TIMEOUT = 90.0
"""Seconds that a cluster may take to be told that pods are to be deleted."""


def parse(text: str) -> tuple[int, tuple[str, ...]]:
    """Read ``N,image=IMAGE[,OPTION=VALUE]…``.

    Raises:
        InputError: it is something else.
    """
    example = "for example kubernetes:4,image=registry/wheelmount:1,memory=64Gi"
    count, options = counted("kubernetes", text, "pods", f"give {example}")
    names = []
    for option in options:
        name, _, value = option.partition("=")
        if not value or not (name in (*PLACES, *AMOUNTS) or re.fullmatch(r"[\w.-]+/[\w.-]+", name)):
            raise InputError(
                f"{option!r} is no option of kubernetes",
                hint=f"known: {', '.join((*PLACES, *AMOUNTS))}, and names such as nvidia.com/gpu",
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
    """Pods named as Kubernetes names them; this machine must reach them, and they this one.

    They have an authority of their own: users who may read the cluster's Secrets can connect to
    these pods, and to no other hosts.

    Args:
        count: pods.
        options: see ``parse``.
        settings: in force; ``python`` is the Python in the image.
        guarded: delete the pods when this process ends. Else they stay until ``stop``.
        progress: told about waiting.
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
        self._taken: str | None = None
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
        """Who signs for these pods, and for no other hosts."""
        from wheelmount.hosts.credentials import Authority

        return Authority.decode(self._order.authority.encode())

    def start(self) -> None:
        """Have the pods made, and wait until each answers.

        Raises:
            UnavailableError: the Python package ``kubernetes`` is not here.
            HostError: the cluster does not take them, or one cannot run.
            WaitError: they did not run within ``queue_timeout``.
        """
        if importlib.util.find_spec("kubernetes") is None:
            raise _missing()
        from wheelmount.hosts.credentials import OF_HOSTS, Authority

        self._order = replace(self._order, authority=Authority.make(OF_HOSTS).encode().decode())
        self._made = True
        try:
            self._process = self._spawn(launcher.GUARDED if self._guarded else launcher.DETACHED)
            found = self._await_pods(self._process)
            self._order = replace(self._order, job=found["job"])
            self._names = list(found["pods"])
            self._addresses = [Address(SECURE, ip, pods.PORT) for ip in found["pods"].values()]
            self.check(self._settings.start_timeout)  # they were about to listen
            self.attach()
        except BaseException:
            self.stop()
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
            stderr=self._messages,  # where Monarch's job tells its own story
            bufsize=0,
            env=variables.without_secrets(),
            cwd="/",  # and not where anybody may have put modules
            start_new_session=True,  # a ^C is for the client, which ends it in order
        )
        with contextlib.suppress(BrokenPipeError):
            cast(IO[bytes], process.stdin).write(self._order.encode())
        return process

    def _await_pods(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        timeout = self._settings.queue_timeout + GRACE
        deadline = time.monotonic() + timeout
        with (
            self._progress.task("queue", unit="pods") as task,
            selectors.DefaultSelector() as ready,
        ):
            stdout = cast(IO[bytes], process.stdout)
            ready.register(stdout, selectors.EVENT_READ)
            while ready.select(max(0, deadline - time.monotonic())):
                said = _read(stdout, self._last_words)
                if "pods" in said:
                    task.advance(len(said["pods"]))
                    return said
                self._progress.log(f"pods wait: {said['waits']}")
        raise WaitError(f"nothing was heard of the pods for {timeout:g} s")

    def _last_words(self) -> str:
        """Return the last line that the process that makes pods wrote to its standard error."""
        messages = cast(IO[bytes], self._messages)
        messages.seek(0)
        lines = messages.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _forget_messages(self) -> None:
        self._bounded.set()
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def stop(self) -> None:
        """Delete the pods."""
        process, self._process = self._process, None
        if self._made and not self._guarded:
            if process is not None:
                _end(process)
            process = self._spawn(launcher.ENDED)
        self._made = False
        if process is not None and _end(process):
            log.warning(
                "pods may be left: kubectl delete monarchmesh,secret %s --namespace %s",
                self._order.name,
                self._order.namespace,
            )
        self._forget_messages()
        self._hosts = []

    def check(self, patience: float = 0) -> None:
        """Check that each pod listens.

        Raises:
            HostError: one does not, and why if the cluster knows.
        """
        try:
            super().check(patience)
        except HostError:
            if reason := self.ended():
                raise HostError(reason) from None
            raise

    def check_lease(self) -> None:
        """See that no other user has deleted the pods of a command.

        Raises:
            HostError: they were deleted.
        """
        if self._process is not None and self._guarded and self._taken is None:
            stdout = cast(IO[bytes], self._process.stdout).fileno()
            os.set_blocking(stdout, False)
            with contextlib.suppress(BlockingIOError, ValueError):
                self._taken = json.loads(os.read(stdout, MOST_SAID)).get("ended")
        if self._taken is not None:
            raise HostError(self._taken)

    def ended(self) -> str | None:
        """Why pods that ran do not any more, as the cluster says."""
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
            said = json.loads(done.stdout or b"{}")
        except (subprocess.TimeoutExpired, ValueError):
            return None
        ended = said.get("ended")
        return None if ended is None else str(ended)

    def leave(self) -> dict[str, Any]:
        """Let go of them without stopping them; they must not be guarded."""
        if self._process is not None:
            _end(self._process)
        self._forget_messages()
        self._process, self._made = None, False
        return super().leave() | {"order": asdict(self._order)}

    @classmethod
    def resume(cls, record: dict[str, Any], settings: Settings) -> KubernetesHosts:
        """Hosts that another process left."""
        order = Order(**record["order"])
        hosts = cls(order.count, (), settings, guarded=False)
        hosts._order, hosts._made = order, True
        hosts.recall(record)
        return hosts

    def __len__(self) -> int:
        return self._order.count


def _read(stdout: IO[bytes], last_words: Callable[[], str]) -> dict[str, Any]:
    """What is said next about pods.

    Args:
        stdout: of the process that makes them.
        last_words: gives what it printed last, if it has died.

    Raises:
        HostError: they cannot be.
    """
    line = stdout.readline()
    if not line:
        raise HostError(f"the process that makes pods has died: {last_words()}")
    said: dict[str, Any] = json.loads(line)
    if "error" in said:
        raise HostError(said["error"], hint=said["hint"])
    return said


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Let a process that has pods end; gives its exit code if it does."""
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            cast(IO[bytes], stream).close()
    try:
        return process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _template(path: str) -> dict[str, Any]:
    """Read a template of pods; empty if none is given.

    Raises:
        InputError: it cannot be read, or is none.
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
        raise InputError(f"{path} is no template of pods", hint=hint)
    if unknown := sorted(set(found) - {"metadata", "spec"}):
        raise InputError(f"{path} has {', '.join(map(str, unknown))}", hint=hint)
    if "activeDeadlineSeconds" in found["spec"]:
        # Monarch's operator could make no pods, and the command would wait for them.
        raise InputError(f"{path}: a StatefulSet accepts no activeDeadlineSeconds", hint=hint)
    return found


def _missing() -> UnavailableError:
    return UnavailableError(
        "there is no Python package kubernetes here",
        hint="run: pip install 'wheelmount[kubernetes]'",
    )


def _kubeconfig() -> str:
    """The files in which ``kubectl`` would look; empty if there are none."""
    usual = Path.home() / ".kube" / "config"
    return os.environ.get("KUBECONFIG") or (str(usual) if usual.exists() else "")


def _absolute(paths: str) -> str:
    return ":".join(str(Path(path).absolute()) for path in paths.split(":") if path)
