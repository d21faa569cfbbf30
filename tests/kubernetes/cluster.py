"""A cluster with a real API server, garbage collector and controller of StatefulSets.

Stand-ins are here what makes a StatefulSet of a MonarchMesh, as Monarch's operator does, and what
runs pods: they are processes of this machine, each with mounts and processes of its own, at
addresses of loopback.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.client.rest import ApiException

from tests.testbed.kubernetes import start_container

GROUP, VERSION, PLURAL = "monarch.pytorch.org", "v1alpha1", "monarchmeshes"

NAMESPACE = "lab"

TIMEOUT = 120.0
"""Seconds that a state may take to come."""

POLL_INTERVAL = 0.1
"""Seconds between looks."""

RIGHTS = (
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "patch", "delete"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["create", "get", "delete"]},
)
"""Of the account that runs wheelmount, in its namespace, and it has no others."""


class Cluster:
    """The cluster, as long as the context lasts.

    Args:
        place: directory for its files.
        definition: of a MonarchMesh, the operator's own.

    Attributes:
        kubeconfig: file by which the account with ``RIGHTS`` reaches it.
        everything: one of an account with all rights.
    """

    def __init__(self, place: Path, definition: Path) -> None:
        self.kubeconfig = place / "kubeconfig"
        self.everything = place / "everything"
        self._place, self._definition = place, definition
        self._ports = _free_ports(3)
        self._tokens = {name: secrets.token_hex(16) for name in ("root", "user")}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._nodes = threading.Thread(target=self._play, daemon=True)

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def _start(self) -> None:
        place, (store, peers, port) = self._place, self._ports
        key = place / "key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = [
            f'{self._tokens["root"]},root,0,"system:masters"',
            f"{self._tokens['user']},user,1",
        ]
        (place / "tokens").write_text("\n".join(tokens) + "\n")
        self._serve(
            "etcd",
            f"--data-dir={place}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
        )
        self._serve(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{store}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={place}/certificates",
            f"--token-auth-file={place}/tokens",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://lab",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        certificate = place / "certificates" / "apiserver.crt"
        self.wait("its certificate", certificate.exists)
        everything = self.everything
        for file, who in ((everything, "root"), (self.kubeconfig, "user")):
            file.write_text(json.dumps(self._config(certificate, who)))
        configuration = client.Configuration()
        configuration.host = f"https://127.0.0.1:{port}"
        configuration.ssl_ca_cert = str(certificate)
        configuration.verify_ssl = True
        configuration.api_key = {"authorization": f"Bearer {self._tokens['root']}"}
        self._api = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self._api)
        self.apps = client.AppsV1Api(self._api)
        self.meshes = client.CustomObjectsApi(self._api)
        self.wait("the API", self._answers)
        self._serve(
            "kube-controller-manager",
            f"--kubeconfig={everything}",
            "--controllers=garbagecollector,statefulset",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
        )
        definition = _for_this_version(yaml.safe_load(self._definition.read_text()))
        self.tell("apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        self.wait("its definition of MonarchMesh", self._knows_meshes)
        self.core.create_namespace({"metadata": {"name": NAMESPACE}})
        self._permit()
        self._nodes.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._nodes.is_alive():
            self._nodes.join()
        for process in [*self._pods.values(), *reversed(self._servers)]:
            process.kill()
            process.wait()
        if any(error):
            for name in ("etcd", "kube-apiserver", "kube-controller-manager"):
                log = self._place / f"{name}.log"
                if log.exists():
                    print(f"-- {name}:", *log.read_text().splitlines()[-15:], sep="\n")

    def _serve(self, program: str, *options: str) -> None:
        with (self._place / f"{program}.log").open("wb") as log:
            self._servers.append(
                subprocess.Popen(
                    [program, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _config(self, certificate: Path, who: str) -> dict[str, Any]:
        server = {
            "server": f"https://127.0.0.1:{self._ports[2]}",
            "certificate-authority-data": base64.b64encode(certificate.read_bytes()).decode(),
        }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": server}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": who}}],
            "users": [{"name": who, "user": {"token": self._tokens[who]}}],
        }

    def wait(self, what: str, seen: Any) -> None:
        """Wait for a state.

        Args:
            what: that is waited for.
            seen: returns whether it is there.

        Raises:
            TimeoutError: it does not come.
        """
        deadline = time.monotonic() + TIMEOUT
        while not seen():
            if ended := [each.args for each in self._servers if each.poll() is not None]:
                raise RuntimeError(f"it has ended: {ended}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {TIMEOUT:g} s")
            time.sleep(POLL_INTERVAL)

    def _answers(self) -> bool:
        try:
            self.core.list_namespace(_request_timeout=5)
            return bool(self.core.read_namespace("default"))
        except Exception:  # it comes up
            return False

    def _knows_meshes(self) -> bool:
        with contextlib.suppress(ApiException):
            self._list()
            return True
        return False

    def _list(self) -> list[dict[str, Any]]:
        found = self.meshes.list_cluster_custom_object(GROUP, VERSION, PLURAL)
        return list(found["items"])

    def _permit(self) -> None:
        rights = client.RbacAuthorizationV1Api(self._api)
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "user"}
        rights.create_namespaced_role(NAMESPACE, {"metadata": {"name": "user"}, "rules": [*RIGHTS]})
        rights.create_namespaced_role_binding(
            NAMESPACE,
            {
                "metadata": {"name": "user"},
                "roleRef": role,
                "subjects": [{"kind": "User", "name": "user"}],
            },
        )

    def tell(self, path: str, what: dict[str, Any]) -> None:
        """Have the API make something, as the account with all rights."""
        context = ssl.create_default_context(cafile=self._place / "certificates/apiserver.crt")
        token = self._tokens["root"]
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._ports[2]}/{path}",
            json.dumps(what).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, context=context, timeout=TIMEOUT).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:2000]) from None

    def made(self) -> dict[str, Any]:
        """The one MonarchMesh that is there, as the API keeps it."""
        (mesh,) = self._list()
        return mesh

    def delete_mesh(self) -> None:
        """Delete it, as `kubectl delete monarchmesh` does."""
        mesh = self.made()["metadata"]
        self.meshes.delete_namespaced_custom_object(
            GROUP, VERSION, mesh["namespace"], PLURAL, mesh["name"]
        )

    def left(self) -> list[str]:
        """What is there of all that was made."""
        secrets_ = self.core.list_namespaced_secret(NAMESPACE).items
        sets = self.apps.list_namespaced_stateful_set(NAMESPACE).items
        pods = self.core.list_namespaced_pod(NAMESPACE).items
        services = self.core.list_namespaced_service(NAMESPACE).items
        names = [
            f"{kind} {each.metadata.name}"
            for kind, found in (
                ("secret", secrets_),
                ("statefulset", sets),
                ("pod", pods),
                ("service", services),
            )
            for each in found
        ]
        names += [f"monarchmesh {mesh['metadata']['name']}" for mesh in self._list()]
        return names

    def _play(self) -> None:
        """Be the operator, the scheduler and the kubelets."""
        while not self._over.wait(POLL_INTERVAL):
            with contextlib.suppress(ApiException):  # of what changed meanwhile
                for mesh in self._list():
                    self._make_set(mesh)
                for pod in self.core.list_namespaced_pod(NAMESPACE).items:
                    self._tend(pod)

    def _make_set(self, mesh: dict[str, Any]) -> None:
        meta, spec = mesh["metadata"], mesh["spec"]
        if "deletionTimestamp" in meta:
            return
        name = meta["name"]
        labels = {"monarch.pytorch.org/mesh-name": name, "app.kubernetes.io/name": "monarch-worker"}
        owner = {
            "apiVersion": mesh["apiVersion"],
            "kind": mesh["kind"],
            "name": name,
            "uid": meta["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        own = {"namespace": meta["namespace"], "ownerReferences": [owner], "labels": labels}
        template = dict(spec["podTemplate"])
        given = dict(template.get("metadata", {}))
        template["metadata"] = {**given, "labels": {**given.get("labels", {}), **labels}}
        ports = [{"name": "monarch", "port": spec.get("port", 26600)}]
        service = {"clusterIP": "None", "selector": labels, "ports": ports}
        wanted = {
            "replicas": spec["replicas"],
            "serviceName": f"{name}-svc",
            "selector": {"matchLabels": labels},
            "podManagementPolicy": "Parallel",
            "template": template,
        }
        try:
            self.apps.create_namespaced_stateful_set(
                meta["namespace"], {"metadata": {**own, "name": name}, "spec": wanted}
            )
            self.core.create_namespaced_service(
                meta["namespace"], {"metadata": {**own, "name": f"{name}-svc"}, "spec": service}
            )
        except ApiException as error:
            if error.status != 409:  # it is there
                print(f"-- no StatefulSet: {error.body}", flush=True)

    def _tend(self, pod: Any) -> None:
        name, namespace = pod.metadata.name, pod.metadata.namespace
        if pod.metadata.deletion_timestamp is not None:
            self._end(name)
            self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        elif pod.spec.node_name is None:
            node = {"target": {"apiVersion": "v1", "kind": "Node", "name": "node"}}
            self.core.create_namespaced_pod_binding(
                name, namespace, {**node, "metadata": {"name": name}}, _preload_content=False
            )
        elif name not in self._pods:
            manifest = self._api.sanitize_for_serialization(pod)
            (container,) = (c for c in manifest["spec"]["containers"] if c["name"] == "worker")
            values = {each["name"]: self._value(each, pod) for each in container["env"]}
            self._pods[name] = start_container(container, values)
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            states = [
                {
                    "name": each["name"],
                    "image": each["image"],
                    "imageID": each["image"],
                    "restartCount": 0,
                    "ready": True,
                    "state": {"running": {"startedAt": at}},
                }
                for each in manifest["spec"]["containers"]
            ]
            status = {
                "phase": "Running",
                "podIP": _address(name),
                "podIPs": [{"ip": _address(name)}],
                "containerStatuses": states,
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            self.core.patch_namespaced_pod_status(name, namespace, {"status": status})

    def _end(self, name: str) -> None:
        process = self._pods.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def _value(self, variable: dict[str, Any], pod: Any) -> str:
        if "value" in variable:
            return str(variable["value"])
        wanted = variable["valueFrom"]
        if "fieldRef" in wanted:
            return _address(pod.metadata.name)
        reference = wanted["secretKeyRef"]
        secret = self.core.read_namespaced_secret(reference["name"], pod.metadata.namespace)
        return base64.b64decode(secret.data[reference["key"]]).decode()


_MERGED = "x-kubernetes-list-map-keys", "x-kubernetes-list-type"


def _address(pod: str) -> str:
    return f"127.0.0.{2 + int(pod.rpartition('-')[2])}"


def _for_this_version(schema: Any) -> Any:
    """A definition without ``default: ""``, which this old API server takes for ``null``.

    And without keys of lists, which may need such defaults; they matter where parts are merged.
    """
    if isinstance(schema, list):
        return [_for_this_version(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _for_this_version(value)
        for key, value in schema.items()
        if (key, value) != ("default", "") and key not in _MERGED
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]
