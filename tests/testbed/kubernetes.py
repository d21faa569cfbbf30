"""What stands in for a cluster of Kubernetes, of which there is none for tests.

It answers, over HTTP, the calls that Monarch's KubernetesJob and wheelmount make, and plays
Monarch's operator and the kubelet as well: pods are processes of this machine, run as their
manifest says, at addresses of loopback, each with mounts and processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.testbed.monarchmesh import refusals

MESHES = "monarchmeshes"

MISSING = "registry.invalid/missing"
"""An image that the cluster cannot pull."""

SLOW = "registry.invalid/slow"
"""One that takes for ever."""

UNREADABLE = "registry.invalid/unreadable"
"""One of which no container can be made as it is configured."""

TEMPLATE = """
metadata:
  labels: {kueue.x-k8s.io/queue-name: team}
  annotations: {note: kept}
spec:
  nodeSelector: {pool: gpu}
  tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
  imagePullSecrets: [{name: registry}]
  terminationGracePeriodSeconds: 60
  containers:
  - name: worker
    env: [{name: OWN, value: own}]
    resources: {limits: {github.com/fuse: "1"}, requests: {github.com/fuse: "1"}}
    securityContext: {capabilities: {add: [SYS_ADMIN]}}
  - {name: beside, image: registry/beside}
"""
"""Of pods, as a user may have it."""

OWN = """
for place in "$WHEELMOUNT_RUNTIME_DIR" "$WHEELMOUNT_STORE"; do mount -t tmpfs none "$place"; done
exec "$@"
"""
"""What a pod keeps for itself goes with it."""


def start_container(
    container: dict[str, Any], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Run what a pod has a container for, as a process with mounts and processes of its own.

    Args:
        container: as in a pod's manifest.
        variables: of its environment, with their values.
    """
    command = [
        re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
        for word in container["command"]
    ]
    own = ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [*own, "--mount-proc", "--", "sh", "-c", OWN, "sh", *command],
        env={**os.environ, "PATH": path, **variables},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class Cluster:
    """The cluster, as long as the context lasts.

    Args:
        kubeconfig: file to be written, that says where it is.
        operator: whether Monarch's is installed.

    Attributes:
        namespace: whether those are there that are asked for.
        objects: what there is, by path.
        made: all that ever was made.
        fails: how many of the next questions about pods end with an error of the server.
        keeps: whether requests to delete something end with an error of the server.
    """

    def __init__(self, kubeconfig: Path, *, operator: bool = True) -> None:
        self.operator = operator
        self.namespace = True
        self.objects: dict[str, dict[str, Any]] = {}
        self.made: list[dict[str, Any]] = []
        self.fails = 0
        self.keeps = False
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        self._looks = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server = f"http://127.0.0.1:{self._server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": {"server": server}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "users": [{"name": "lab", "user": {}}],
        }
        kubeconfig.write_text(json.dumps(config))  # JSON is YAML

    def __enter__(self) -> Cluster:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._stop()

    def kill(self, pod: str) -> None:
        """End a pod as the crash of its node would; the API still shows it."""
        self._pods[pod].kill()
        self._pods[pod].wait(10)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What the API says to a call."""
        place, _, name = path.rpartition("/")
        kind = place.rpartition("/")[2] if method == "DELETE" else name
        if method == "POST" and not self.namespace:
            return 404, {"message": f'namespaces "{path.split("/")[-2]}" not found'}
        if kind == MESHES and not self.operator:
            return 404, {"message": "the server could not find the requested resource"}
        if method == "POST" and kind == MESHES and (reasons := refusals(body)):
            return 422, {"message": "; ".join(reasons)}
        if method == "POST":
            body["metadata"]["uid"] = f"uid-{len(self.made)}"
            self.made.append(body)
            self.objects[f"{path}/{body['metadata']['name']}"] = body
            if kind == MESHES:
                self._start(body)
            return 201, body
        if method == "GET" and kind == "pods" and self.fails:
            self.fails -= 1
            return 503, {"message": "etcdserver: leader changed"}
        if method == "DELETE" and self.keeps:
            return 503, {"message": "etcdserver: leader changed"}
        if method == "GET" and kind == "pods":
            return 200, {"items": self._list()}
        if method == "GET" and path in self.objects:
            return 200, self.objects[path]
        if method == "PATCH" and path in self.objects:
            self.objects[path]["metadata"] |= body["metadata"]
            return 200, self.objects[path]
        if method == "DELETE" and path in self.objects:
            if kind == MESHES:
                self._stop()
            return 200, self._remove(path)
        return 404, {"message": f"{path} not found"}

    def _remove(self, path: str) -> dict[str, Any]:
        """Delete something, and what it owns."""
        gone = self.objects.pop(path)
        for other, each in list(self.objects.items()):
            owners = each["metadata"].get("ownerReferences", [])
            if gone["metadata"]["uid"] in [owner["uid"] for owner in owners]:
                del self.objects[other]
        return gone

    def _start(self, mesh: dict[str, Any]) -> None:
        container, *_ = mesh["spec"]["podTemplate"]["spec"]["containers"]
        if container["image"] in (MISSING, SLOW, UNREADABLE):
            return
        for rank in range(mesh["spec"]["replicas"]):
            variables = {each["name"]: self._value(each, rank) for each in container["env"]}
            name = f"{mesh['metadata']['name']}-{rank}"
            self._pods[name] = start_container(container, variables)

    def _value(self, variable: dict[str, Any], rank: int) -> str:
        if "value" in variable:
            return str(variable["value"])
        if "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            return address(rank)
        wanted = variable["valueFrom"]["secretKeyRef"]
        (secret,) = (
            each
            for path, each in self.objects.items()
            if path.endswith(f"/secrets/{wanted['name']}")
        )
        return str(secret["stringData"][wanted["key"]])

    def _list(self) -> list[dict[str, Any]]:
        self._looks += 1
        if self._looks == 1:  # as when the operator has not seen it yet
            return []
        ready = {"name": "worker", "image": "i", "imageID": "i", "restartCount": 0, "ready": True}
        pods = [
            {
                "metadata": {"name": name},
                "status": {
                    "phase": "Running",
                    "podIP": address(rank),
                    "containerStatuses": [ready],
                },
            }
            for rank, name in enumerate(self._pods)
        ]
        if not pods:
            made = json.dumps(self.made)
            reason = "ContainerCreating" if SLOW in made else "ImagePullBackOff"
            if UNREADABLE in made:
                reason = "CreateContainerConfigError"
            waits = {"waiting": {"reason": reason, "message": f"no {MISSING}"}}
            state = {**ready, "ready": False, "state": waits}
            status = {"phase": "Pending", "containerStatuses": [state]}
            pods = [{"metadata": {"name": "mesh-0"}, "status": status}]
        return pods

    def _stop(self) -> None:
        for process in self._pods.values():
            process.kill()
            process.wait(10)
        self._pods.clear()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                code, said = cluster.answer(self.command, path, json.loads(body or b"{}"))
                answer = json.dumps(said).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815 - what http.server calls

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def address(rank: int) -> str:
    """Where a pod is."""
    return f"127.0.0.{2 + rank}"
