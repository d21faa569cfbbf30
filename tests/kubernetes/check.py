"""What a cluster's API says to wheelmount: ``python -m tests.kubernetes.check DEFINITION [CASE…]``.

``run.sh`` builds what it needs. Prints a transcript; ends with 0 if all is as it should be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.kubernetes.cluster import NAMESPACE, Cluster
from tests.testbed.kubernetes import TEMPLATE

POD = f"kubernetes:2,image=registry/wheelmount:1,namespace={NAMESPACE}"


class Check:
    """Cases of one cluster.

    Args:
        cluster: that runs.
        place: directory for what is mounted.
    """

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster, self.place = cluster, place
        self.source = place / "source"
        self.source.mkdir()
        (self.source / "text").write_text("text\n")
        for variable, name in (("RUNTIME_DIR", "runtime"), ("STORE", "store")):
            (place / name).mkdir(mode=0o700)
            os.environ[f"WHEELMOUNT_{variable}"] = str(place / name)  # of pods too
        self.environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}

    def tell(self, *words: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run wheelmount; print what was run, and what it said."""
        print("$ wheelmount", *map(self._shown, words))
        done = subprocess.run(
            [sys.executable, "-m", "wheelmount.cli.main", *words],
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=300,
            check=False,
        )
        print(self._shown(done.stdout + done.stderr).rstrip())
        return done

    def _shown(self, text: str) -> str:
        """Return text with a user's home directory in place of this check's directory."""
        return text.replace(str(self.place), "/home/you")

    def await_nothing(self) -> None:
        """Wait until all that was made is gone."""
        self.cluster.wait(f"end of {self.cluster.left()}", lambda: not self.cluster.left())
        print("-- nothing is left: no MonarchMesh, StatefulSet, Service, Pod or Secret")

    def _run(self, spec: str, script: str) -> subprocess.CompletedProcess[str]:
        where = ["--mntpoint", str(self.place / "mnt"), "--hosts", spec]
        return self.tell("run", str(self.source), *where, "-", script=script)

    def run(self) -> None:
        """A script runs in two pods, which ask for all that can be asked for."""
        asked = "cpu=2,memory=4Gi,nvidia.com/gpu=8,shm=1Gi"
        done = self._run(f"{POD},{asked}", "cat text")
        assert done.returncode == 0
        assert done.stdout.count("text\n") == 2
        self.await_nothing()

    def template(self) -> None:
        """Pods are made of a template of the user's; the API keeps all of it."""
        file = self.place / "template.yaml"
        file.write_text(TEMPLATE)
        assert self.tell("up", "--hosts", f"{POD},cpu=2,template={file}").returncode == 0
        kept = self.cluster.made()["spec"]["podTemplate"]
        print("-- kept:", yaml.safe_dump(kept["spec"]).replace("\n", "\n   ").rstrip(), sep="\n   ")
        assert kept["spec"]["tolerations"][0]["key"] == "gpu"
        assert len(kept["spec"]["containers"]) == 2
        assert self._run("session:default", "echo $OWN; cat text").stdout.count("own\ntext\n") == 2
        assert self.tell("down").returncode == 0
        self.await_nothing()

    def unknown(self) -> None:
        """What a template has and the cluster does not know is said, and nothing is made."""
        file = self.place / "template.yaml"
        file.write_text("spec: {tolerance: none, nodeSelector: {pool: gpu}}")
        done = self.tell("up", "--hosts", f"{POD},template={file}")
        assert done.returncode == 68
        assert "spec.tolerance" in done.stderr
        file.write_text("spec: {nodeSelector: [pool]}")
        done = self.tell("up", "--hosts", f"{POD},template={file}")
        assert done.returncode == 68
        assert "nodeSelector" in done.stderr
        self.await_nothing()

    def refused(self) -> None:
        """A namespace that is not there or not the account's, and amounts that are none."""
        done = self.tell("up", "--hosts", POD.replace(NAMESPACE, "kube-system"))
        assert done.returncode == 68
        assert "forbidden" in done.stderr
        nowhere = POD.replace(NAMESPACE, "nowhere")
        done = self.tell("up", "--hosts", f"{nowhere},kubeconfig={self.cluster.everything}")
        assert done.returncode == 68
        assert "give namespace=NAME" in done.stderr
        done = self.tell("up", "--hosts", f"{POD},memory=much")
        assert done.returncode == 68
        assert "much" in done.stderr or "memory" in done.stderr
        self.await_nothing()

    @contextlib.contextmanager
    def _running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a script in two pods; the context begins when it runs."""
        started = self.place / "started"
        started.unlink(missing_ok=True)
        command = [sys.executable, "-m", "wheelmount.cli.main", "run", str(self.source)]
        command += ["--hosts", POD, "--mntpoint", str(self.place / "mnt"), "-"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=self.environment) as run:
            assert run.stdin is not None
            run.stdin.write(f"touch {started}; sleep 300".encode())
            run.stdin.close()
            run.stdin = None
            self.cluster.wait("script", started.exists)
            yield run

    def killed(self) -> None:
        """A client that is killed leaves nothing."""
        with self._running() as run:
            print("-- it runs:", *self.cluster.left(), sep="\n   ")
            run.send_signal(signal.SIGKILL)
            run.communicate(timeout=200)
        self.await_nothing()

    def owner(self) -> None:
        """The Secret goes with its MonarchMesh, by the cluster's own garbage collector."""
        assert self.tell("up", "--hosts", POD).returncode == 0
        name = self.cluster.made()["metadata"]["name"]
        secret = self.cluster.core.read_namespaced_secret(name, NAMESPACE)
        (owner,) = secret.metadata.owner_references
        print(f"-- Secret {name}, owned by {owner.kind} {owner.name}")
        print(f"$ kubectl delete monarchmesh {name}")
        self.cluster.delete_mesh()
        self.await_nothing()
        done = self._run("session:default", "cat text")
        assert done.returncode == 68
        assert f"MonarchMesh {name} was deleted" in done.stderr
        assert self.tell("down").returncode == 0

    def lease(self) -> None:
        """A command whose pods another user deletes ends, and says why."""
        with self._running() as run:
            began = time.monotonic()
            print("$ kubectl delete monarchmesh --all    # while a script runs in its pods")
            self.cluster.delete_mesh()
            said = run.communicate(timeout=200)[1].decode()
        print(self._shown(said).rstrip())
        print(f"-- it ended {time.monotonic() - began:.0f} s later")
        assert run.returncode == 68
        assert "was deleted" in said
        self.await_nothing()


CASES = ("run", "template", "unknown", "refused", "killed", "owner", "lease")


def main() -> int:
    definition, *cases = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="wheelmount-kubernetes-", dir="/var/tmp") as directory:
        place = Path(directory)
        with Cluster(place, Path(definition)) as cluster:
            check = Check(cluster, place)
            wrong = []
            for case in cases or CASES:
                test = getattr(check, case)
                print(f"== {case}: {test.__doc__}", flush=True)
                try:
                    test()
                except Exception:
                    traceback.print_exc(file=sys.stdout)
                    wrong.append(case)
                    subprocess.run(
                        [sys.executable, "-m", "wheelmount.cli.main", "down", "--all"],
                        env=check.environment,
                        check=False,
                    )
    print("== wrong:" if wrong else "== all right", *wrong, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("CI", "true")
    sys.exit(main())
