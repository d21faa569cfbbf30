"""Create and delete Kubernetes pods that each run a worker, by Monarch's KubernetesJob.

Run as ``python -m wheelmount.hosts.pods MODE``; the first line of the input is an order (``Order``
as JSON). The program prints lines of JSON: ``{"waits": …}`` with the reason of a wait, and at the
end ``{"pods": {NAME: IP}}`` or ``{"error": …, "hint": …}``. MODE is

``guarded``    delete the pods at the end of the input, and so whenever the client ends; print
               ``{"ended": …}`` if another user deletes them before;
``detached``   leave the pods running, and end;
``ended``      delete pods that ``detached`` left;
``asked``      print ``{"ended": …}`` with the reason why pods have ended, or null, and end.

A separate process deletes the pods even if the client is killed. Besides, Monarch listens without
certificates in a process that has created a KubernetesJob. Monarch's own workers do so, too, and
any machine that reaches such a pod could run programs there. So the pods run wheelmount's worker,
with credentials from a Secret.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from wheelmount.errors import HostError, WaitError, WheelmountError
from wheelmount.hosts.launcher import DETACHED, ENDED, GUARDED
from wheelmount.hosts.worker import OWN_MOUNTS
from wheelmount.variables import CREDENTIALS

ASKED = "asked"

PORT = 26600
"""Port at which each pod's worker listens; also Monarch's default."""

LABELS = {"app.kubernetes.io/managed-by": "wheelmount"}
"""Label of all objects that wheelmount creates."""

AUTHORITY = "authority"
"""Key of the credentials in the Secret."""

POLL_INTERVAL = 1.0
"""Seconds between checks of the pods."""

CHECK_INTERVAL = 3.0
"""Seconds between checks that the MonarchMesh of running pods still exists."""

ASK_TIMEOUT = 30.0
"""Seconds that the cluster may take to answer."""

END = 5
"""Seconds in which pods must end; short, because they have nothing to save."""

PERMANENT_REASONS = {
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
"""Kubernetes' reasons for a waiting container after which it will never run."""

WORKER = "worker"
"""Name of the container in which the worker runs."""

MESH = "monarch.pytorch.org", "v1alpha1", "monarchmeshes"
"""Group, version and plural of the resource from which Monarch's operator creates pods."""


@dataclass(frozen=True, slots=True)
class Order:
    """A client's order for pods.

    Attributes:
        name: name of the MonarchMesh and the Secret: lower-case letters and digits.
        namespace: their Kubernetes namespace.
        kubeconfig: configuration file of the cluster; empty inside a cluster.
        count: number of pods.
        image: image of the container, with wheelmount installed.
        python: the image's Python that has wheelmount.
        resources: requests and limits of each pod, by Kubernetes' names.
        template: the user's pod template in Kubernetes' form; ``template`` adds the needed parts.
        shm: size of ``/dev/shm`` in Kubernetes' notation; empty for the engine's default.
        timeout: seconds within which all pods must run.
        authority: credentials for the workers.
    """

    name: str
    namespace: str
    kubeconfig: str
    count: int = 0
    image: str = ""
    python: str = "python"
    resources: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    shm: str = ""
    timeout: float = 0
    authority: str = ""

    def encode(self) -> bytes:
        """Return the order as the input of this module."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    """Run the mode of the command line; return 0 if no object is left behind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=[GUARDED, DETACHED, ENDED, ASKED])
    mode = parser.parse_args().mode
    order = Order(**json.loads(sys.stdin.buffer.readline()))
    gone = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(gone,), daemon=True).start()
    try:
        pods = Pods(order)
    except HostError as error:
        _report_error(error)
        return error.exit_code if mode == ENDED else 0
    if mode == ASKED:
        try:
            _report(ended=pods.ended())
        except HostError as error:
            _report_error(error)
        return 0
    try:
        if mode != ENDED:
            pods.make()
            _report(pods=pods.wait(gone))
            if mode == DETACHED:
                return 1
            pods.watch(gone)
            gone.wait()
    except WheelmountError as error:
        _report_error(error)
        if not pods.reached:
            return 0
    try:
        pods.delete()
    except HostError as error:
        _report_error(error)
        return error.exit_code
    return 0


def _report_error(error: WheelmountError) -> None:
    _report(error=error.message, hint=error.hint)


def _report(**message: Any) -> None:
    with contextlib.suppress(OSError):  # the client has ended, which the end of the input shows
        os.write(1, json.dumps(message).encode() + b"\n")


def _await_end_of_input(gone: threading.Event) -> None:
    while os.read(0, 4096):  # not by sys.stdin: Python ends by an abort while a thread reads there
        pass
    gone.set()


class _PassingError(HostError):
    """A question that the cluster did not answer, but may answer later."""


class Pods:
    """The pods of one order.

    Raises:
        HostError: the cluster's configuration is missing or invalid.
    """

    def __init__(self, order: Order) -> None:
        from kubernetes import client
        from monarch.job.kubernetes import KubeConfig

        self.reached = True
        """Whether the cluster may have got a request to create an object."""
        self._order = order
        config = KubeConfig.from_path(order.kubeconfig) if order.kubeconfig else KubeConfig()
        try:
            config.load()
        except Exception as error:  # a configuration file may be invalid in any way
            raise HostError(
                str(error), hint="give kubeconfig=FILE, or run wheelmount in a pod of the cluster"
            ) from None
        self._core = client.CoreV1Api()
        self._config = config

    def make(self) -> None:
        """Create the Secret and the MonarchMesh, from which Monarch's operator creates pods.

        Raises:
            HostError: the cluster rejects one of them.
        """
        from monarch.job.kubernetes import KubernetesJob
        from urllib3.exceptions import MaxRetryError, NewConnectionError

        order = self._order
        job = KubernetesJob(order.namespace, kubeconfig=self._config)
        job.add_mesh(
            order.name, order.count, port=PORT, pod_template=template(order), labels=LABELS
        )
        secret = {
            "metadata": {"name": order.name, "labels": LABELS},
            "stringData": {AUTHORITY: order.authority},
        }
        within = {"_request_timeout": ASK_TIMEOUT}
        try:
            try:
                self._core.create_namespaced_secret(order.namespace, secret, **within)
            except MaxRetryError as error:
                self.reached = not isinstance(error.reason, NewConnectionError)
                raise
            job.apply()
            mesh = self._mesh()
            patch = {"metadata": {"ownerReferences": [self._owner(mesh)]}}
            self._core.patch_namespaced_secret(order.name, order.namespace, patch, **within)
        except Exception as error:
            raise _convert(error) from None
        # Kubernetes silently drops fields that its definition of a MonarchMesh does not have.
        if unknown := list(_missing(template(order), mesh["spec"]["podTemplate"])):
            raise HostError(
                f"the cluster does not know {', '.join(unknown)} of a pod",
                hint="correct template=FILE; a newer operator may know more",
            )

    def _mesh(self) -> dict[str, Any]:
        """Return the MonarchMesh as the cluster has it."""
        from kubernetes import client

        group, version, plural = MESH
        name, namespace = self._order.name, self._order.namespace
        found: dict[str, Any] = client.CustomObjectsApi().get_namespaced_custom_object(
            group, version, namespace, plural, name, _request_timeout=ASK_TIMEOUT
        )
        return found

    def _owner(self, mesh: dict[str, Any]) -> dict[str, Any]:
        """Return the reference that makes the MonarchMesh an object's owner.

        Kubernetes deletes such objects together with their owner.
        """
        group, version, _ = MESH
        return {
            "apiVersion": f"{group}/{version}",
            "kind": "MonarchMesh",
            "name": self._order.name,
            "uid": mesh["metadata"]["uid"],
        }

    def ended(self) -> str | None:
        """Return why pods have ended; None if they run, or the reason is unknown.

        Raises:
            HostError: the cluster does not answer.
        """
        if reason := self._deleted():
            return reason
        for pod in self._list():
            if pod.status.phase == "Failed":
                why = ": ".join(filter(None, [pod.status.reason, pod.status.message]))
                return f"{pod.metadata.name} has failed" + (f": {why}" if why else "")
        return None

    def _deleted(self) -> str | None:
        """Return the message that the MonarchMesh was deleted; None if it exists.

        Raises:
            HostError: the cluster does not answer.
        """
        from kubernetes.client.rest import ApiException

        try:
            self._mesh()
        except Exception as error:
            if isinstance(error, ApiException) and error.status == 404:
                return f"MonarchMesh {self._order.name} was deleted"
            raise _convert(error) from None
        return None

    def watch(self, gone: threading.Event) -> None:
        """Report to the client if another user deletes the MonarchMesh, and with it all pods.

        Args:
            gone: set when the client has ended, which ends the watch.
        """
        while not gone.wait(CHECK_INTERVAL):
            with contextlib.suppress(HostError):  # the cluster may be out of reach for a while
                if reason := self._deleted():
                    _report(ended=reason)
                    return

    def wait(self, gone: threading.Event) -> dict[str, str]:
        """Wait until all pods run; return their addresses by name, in order.

        Args:
            gone: set when the client has ended.

        Raises:
            HostError: a pod cannot run, or the client has ended.
            WaitError: the pods did not run in time.
        """
        order, started, said = self._order, time.monotonic(), ""
        while True:
            try:
                pods = self._list()
            except _PassingError as error:
                waits = error.message
            else:
                ready = {pod.metadata.name: pod.status.pod_ip for pod in pods if _runs(pod)}
                if len(ready) == order.count:
                    return {name: ready[name] for name in sorted(ready, key=_rank)}
                reasons = filter(None, map(_reason, pods))
                waits = next(reasons, "Monarch's operator makes no pods yet")
            if waits != said:
                said = waits
                _report(waits=waits)
            if time.monotonic() - started > order.timeout:
                raise WaitError(
                    f"the pods did not run within {order.timeout:g} s: {said}",
                    hint="raise WHEELMOUNT_QUEUE_TIMEOUT, or look at `kubectl get monarchmesh,pod`",
                )
            if gone.wait(POLL_INTERVAL):
                raise HostError("the client of the pods has ended")

    def _list(self) -> list[Any]:
        which = f"monarch.pytorch.org/mesh-name={self._order.name}"
        try:
            found = self._core.list_namespaced_pod(
                self._order.namespace, label_selector=which, _request_timeout=ASK_TIMEOUT
            )
        except Exception as error:
            raise _convert(error) from None
        return list(found.items)

    def delete(self) -> None:
        """Delete all objects that exist, also if the cluster made them and did not say so.

        Raises:
            HostError: the cluster does not delete the objects.
        """
        from kubernetes import client
        from kubernetes.client.rest import ApiException

        group, version, plural = MESH
        name, namespace = self._order.name, self._order.namespace
        meshes = client.CustomObjectsApi()
        for delete in (
            partial(
                meshes.delete_namespaced_custom_object, group, version, namespace, plural, name
            ),
            partial(self._core.delete_namespaced_secret, name, namespace),
        ):
            try:
                delete(_request_timeout=ASK_TIMEOUT)
            except Exception as error:
                if not (isinstance(error, ApiException) and error.status == 404):
                    raise _convert(error) from None


def template(order: Order) -> dict[str, Any]:
    """Return the MonarchMesh's pod template: the user's template with the parts a worker needs.

    The worker is privileged and has ``/dev/fuse``, because it could not mount otherwise; Monarch's
    ``ImageSpec(enable_fuse=True)`` does the same. If the user's template has a ``securityContext``
    for the worker, that one applies instead, and a device plugin must provide ``/dev/fuse``. The
    template refers to the Secret with the credentials and does not contain them.
    """
    given = copy.deepcopy(dict(order.template))
    spec = given.setdefault("spec", {})
    labels = given.setdefault("metadata", {}).setdefault("labels", {})
    labels.update(LABELS)
    others = [each for each in spec.get("containers", []) if each.get("name") != WORKER]
    workers = [each for each in spec.get("containers", []) if each.get("name") == WORKER]
    worker = workers[0] if workers else {}
    secret = {"name": order.name, "key": AUTHORITY}
    worker |= {
        "name": WORKER,
        "image": order.image,
        # Kubernetes inserts the address.
        "command": [order.python, "-m", "wheelmount.hosts.worker", f"tls://$(POD_IP):{PORT}"],
    }
    worker.setdefault("env", []).extend(
        [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": OWN_MOUNTS, "value": "1"},  # nothing else of the pod has to see the mounts
            {"name": CREDENTIALS, "valueFrom": {"secretKeyRef": secret}},
        ]
    )
    resources = worker.setdefault("resources", {})
    for kind in ("requests", "limits"):
        resources[kind] = {**resources.get(kind, {}), **order.resources}
    volumes = spec.setdefault("volumes", [])
    mounts = worker.setdefault("volumeMounts", [])
    if "securityContext" not in worker:
        worker["securityContext"] = {"privileged": True}
        device = {"path": "/dev/fuse", "type": "CharDevice"}
        volumes.append({"name": "fuse", "hostPath": device})
        mounts.append({"name": "fuse", "mountPath": "/dev/fuse"})
    if order.shm:
        memory = {"medium": "Memory", "sizeLimit": order.shm}
        volumes.append({"name": "shm", "emptyDir": memory})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("terminationGracePeriodSeconds", END)
    spec["containers"] = [worker, *others]
    return given


def _missing(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that were given and that the cluster did not keep."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for name, value in given.items():
            field_path = f"{path}.{name}" if path else name
            if name in kept:
                yield from _missing(value, kept[name], field_path)
            elif value not in (None, "", {}, []):
                yield field_path
    elif isinstance(given, list) and isinstance(kept, list):
        for number, (each, other) in enumerate(zip(given, kept, strict=False)):
            yield from _missing(each, other, f"{path}[{number}]")


def _rank(name: str) -> int:
    return int(name.rpartition("-")[2])


def _runs(pod: Any) -> bool:
    return pod.status.phase == "Running" and all(
        each.ready for each in pod.status.container_statuses or []
    )


def _reason(pod: Any) -> str:
    """Return why a pod does not run yet; empty if it runs, or gives no reason.

    Raises:
        HostError: the pod will never run.
    """
    for each in pod.status.container_statuses or []:
        waiting = each.state and each.state.waiting
        if waiting:
            said = ": ".join(filter(None, [waiting.reason, waiting.message]))
            if waiting.reason in PERMANENT_REASONS:
                raise HostError(
                    f"{pod.metadata.name} does not run: {said}",
                    hint="give image=IMAGE with wheelmount installed, which the cluster can pull",
                )
            return said
    for each in pod.status.conditions or []:
        if each.type == "PodScheduled" and each.status != "True":
            return ": ".join(filter(None, [each.reason, each.message]))
    return ""


def _convert(error: Exception) -> WheelmountError:
    """Convert an error of the cluster's API to one of wheelmount's."""
    from kubernetes.client.rest import ApiException

    if isinstance(error, WheelmountError):
        return error
    if not isinstance(error, ApiException):
        reason = getattr(error, "reason", None) or error  # urllib3 wraps the socket's error
        message = f"the cluster does not answer: {reason}"
        return _PassingError(message, hint="try `kubectl get pods`")
    try:
        said = str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        said = str(error.reason)
    hint = "try the same with `kubectl`"
    if error.status == 404:
        hint = "Monarch's operator must run there: github.com/meta-pytorch/monarch-kubernetes"
        if said.startswith("namespaces "):
            hint = "give namespace=NAME of one that exists"
    passing = error.status in (0, 429) or error.status >= 500
    kind = _PassingError if passing else HostError
    return kind(f"the cluster refuses: {said}", hint=hint)


if __name__ == "__main__":
    sys.exit(main())
