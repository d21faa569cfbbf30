"""Real hosts show, after each refresh, a source that is edited at random as a plain copy says.

Clients, agents and servers are killed, and other clients go on. Examples are few and the same each
time; more, and others each time: see ``test_model``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import psutil
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import CHECKOUT, _mounts, _processes
from tests.model.source import EDITS, Snapshot, Source, pick, snapshot
from tests.model.test_model import EXAMPLES
from tests.model.worlds import KILLS, Read, run_instance
from tests.mount.conformance import Directory
from wheelmount import doctor
from wheelmount.config import Settings
from wheelmount.errors import MountError
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task

BOUND = 150
"""Seconds within which a client must answer, whatever happened."""

HOSTS = 4
"""Hosts at most."""


class FailedError(Exception):
    """An error that a client reports: its kind and message, and the end of the client's log."""


class Client:
    """A client in a process of its own; see ``tests.model.client``."""

    def __init__(self, place: Path) -> None:
        self._log = place / "client.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.model.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=CHECKOUT,
                env={**os.environ, **_variables(place)},
                start_new_session=True,
                bufsize=0,
            )

    def begin(self, *words: object) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")

    def end(self) -> Any:
        """What came of it."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND)[0], "the client hangs"
        line = self.process.stdout.readline()
        assert line, f"the client ended: {self._logged()}"
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(answer["error"], answer["message"], self._logged())
        return answer["value"]

    @property
    def answers(self) -> bool:
        """Whether an answer is there."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def _logged(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def ask(self, *words: object) -> Any:
        """Have it do something."""
        self.begin(*words)
        return self.end()

    def kill(self) -> None:
        """End it and its group by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._close()

    def quit(self) -> None:
        """Have it let go of its mount."""
        self.ask("quit")
        self.process.wait(BOUND)
        self._close()

    def _close(self) -> None:
        self.process.wait(30)
        for pipe in self.process.stdin, self.process.stdout:
            assert pipe is not None
            pipe.close()


def _settings(place: Path) -> Settings:
    return Settings(
        block_size=64 << 10,
        read_timeout=10,
        fetch_timeout=10,
        store=str(place / "store"),
        runtime_dir=str(place / "runtime"),
        cache_dir=str(place / "cache"),
        state_dir=str(place / "state"),
    )


def _variables(place: Path) -> dict[str, str]:
    settings, standard = asdict(_settings(place)), asdict(Settings())
    return {
        f"WHEELMOUNT_{name.upper()}": str(value)
        for name, value in settings.items()
        if value != standard[name]
    }


class Torn(Directory):
    """A mount in which files that were edited on their way cannot be read."""

    def __init__(self, root: Path, expected: Snapshot) -> None:
        super().__init__(root)
        self._expected = expected

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        try:
            return super().read(path, offset, size)
        except OSError as error:
            assert error.errno == errno.EIO
            return self._expected[path].data


class HostsModel(RuleBasedStateMachine):
    """Edits of a source, and what clients, hosts and users do."""

    adapter: str
    sif: ClassVar[Path | None] = None
    """Image of containers that run, if there are to be any."""

    def __init__(self) -> None:
        super().__init__()
        self._place = Path(tempfile.mkdtemp(prefix="wm-", dir="/tmp"))  # short: sockets lie in it
        self._place.chmod(0o755)
        for name in ("runtime", "store", "cache", "state", "views"):
            (self._place / name).mkdir()
        self._source = Source(self._place / "source")
        self._expected: Snapshot = {}
        self._torn = False
        """Whether files may be unreadable, as they were edited while they travelled."""
        self._client: Client | None = None
        self._other: Client | None = None
        self._points: dict[str, str] = {}
        self._held: list[tuple[str, bytes, bytes, Read]] = []
        self._opened: list[int] = []
        self._views: dict[Path, tuple[str, Callable[[], None]]] = {}
        """Other places that show a mount: which one, and how to take them away."""
        self._viewed = False
        """Whether there were views: a container that began meanwhile has copies until it ends."""
        self._kills = 0
        self._lost = False
        """Whether a host was killed: who clears up after it may be killed as well."""

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def _where(self) -> str:
        return f"{self._place}/at-{{host}}"

    def _edit(self, edits: list[Any]) -> None:
        for edit in edits:
            self._source.edit(*edit)

    def _cli(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "wheelmount.cli.main", *words],
            env={**os.environ, **_variables(self._place)},
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert done.returncode == 0, (words, done.returncode, done.stderr)

    def _begin(self, count: int, edits: list[Any]) -> None:
        if self._client is None:
            self._client = Client(self._place)
        self._expected = self._source.snapshot()
        words = "open", str(self._source.path), self._where, count, self.adapter
        self._points = self.client.ask(*words)
        moments = [self._expected]
        for edit in edits:
            self._source.edit(*edit)
            moments.append(self._source.snapshot())
        unreadable = self.client.ask("wait")
        self._torn = bool(unreadable)
        self._take_in(moments)

    def _take_in(self, moments: list[Snapshot]) -> None:
        """Expect of files that were edited on their way, with times put back, what is shown.

        It is what they held at one moment.
        """
        shown = Torn(Path(next(iter(self._points.values()))), self._expected)
        names: dict[bytes, list[bytes]] = {}
        for path, its in self._expected.items():
            names.setdefault(its.same, []).append(path)
        for path, its in self._expected.items():
            if stat.S_ISREG(its.mode):
                data = shown.read(path, 0, len(its.data) + 1)
                every = (at.get(name) for at in moments for name in names[its.same])
                if any(each is not None and each.data == data for each in every):
                    its.data = data

    @initialize(
        before=st.lists(EDITS, max_size=3), count=st.integers(1, 3), after=EDITS | st.just([])
    )
    def mount(self, before: list[list[Any]], count: int, after: list[Any]) -> None:
        for edits in before:
            self._edit(edits)
        self._begin(count, after)

    def _followed(self) -> None:
        self._expected, self._torn = self._source.snapshot(), False

    @rule(edits=EDITS, meanwhile=st.booleans())
    def refresh(self, edits: list[Any], meanwhile: bool) -> None:
        self._edit(edits)
        self.client.begin("refresh")
        while meanwhile and not self.client.answers:
            self._stays_open()
        self.client.end()
        self._followed()

    @rule(edits=EDITS, by_command=st.booleans())
    def refresh_by_another_client(self, edits: list[Any], by_command: bool) -> None:
        self._edit(edits)
        if by_command:
            self._cli("refresh", "-q", str(self._source.path))
        else:
            if self._other is None:
                self._other = self._adopted()
            self._other.ask("refresh")
        self._followed()

    def _adopted(self) -> Client:
        client = Client(self._place)
        try:
            points = client.ask("adopt", str(self._source.path), self._where, self.adapter)
            assert points == self._points
        except BaseException:
            client.kill()
            raise
        return client

    def _let_go_of_the_other(self) -> None:
        """Have no second client, which knows the hosts that were there when it came."""
        if self._other is not None:
            self._other.quit()
            self._other = None

    @precondition(lambda self: len(self._points) < HOSTS)
    @rule()
    def add(self) -> None:
        self._let_go_of_the_other()
        name = next(n for n in (f"host{i}" for i in range(HOSTS)) if n not in self._points)
        self._points = self.client.ask("add", name)
        assert name in self._points
        self._torn = bool(self.client.ask("wait"))

    @precondition(lambda self: len(self._points) > 1)
    @rule(which=pick, edits=EDITS, again=st.booleans(), agent=st.booleans())
    def lose_a_host(self, which: int, edits: list[Any], again: bool, agent: bool) -> None:
        """All of it, or the agent of the mount alone."""
        self._let_go_of_the_other()
        self._lost = True
        name = sorted(self._points)[which % len(self._points)]
        host = psutil.Process(self.client.ask("pids")[name])
        family = [*([] if agent else [host]), *host.children(recursive=True)]
        family = [each for each in family if "wheelmount.mount.serve.server" not in each.cmdline()]
        for process in family:
            process.kill()
        psutil.wait_procs(family, 30)
        self._edit(edits)
        before = self._expected
        try:
            changed = self.client.ask("refresh")
        except FailedError as failed:
            assert failed.args[0] == "HostError", failed
            assert f"{name}: lost, and no longer part" in failed.args[1], failed
            changed = True
        self._followed()
        assert changed or self._expected == before
        for path, (at, _) in list(self._views.items()):
            if at == self._points[name]:
                self._take_away(path)
        self._held = [each for each in self._held if each[0] != self._points[name]]
        if again:
            self._points = self.client.ask("add", name)
            assert name in self._points
            self._torn = bool(self.client.ask("wait"))
        else:
            self._cli("umount", "--force", self._points.pop(name))

    @rule(
        during=st.sampled_from(["", "refresh", "wait", "verify"]),
        after=st.floats(0, 1),
        edits=EDITS,
    )
    def kill_the_client(self, during: str, after: float, edits: list[Any]) -> None:
        self._let_go_of_the_other()
        if during == "refresh":
            self._edit(edits)
        if during:
            self.client.begin(during, *([False] if during == "verify" else []))
            time.sleep(after)
        self._kill_the_client()
        now = self._source.snapshot()
        try:
            self._client = self._adopted()
        except FailedError as failed:
            # A refresh may have ended after the first of several hosts.
            assert during == "refresh", failed
            assert "do not all show the same" in failed.args[1], failed
            self._remount()
            return
        if during == "refresh":
            shown = [snapshot(Torn(Path(at), self._expected)) for at in self._points.values()]
            if any(each.keys() != self._expected.keys() for each in shown):
                self._expected = now
            self.client.ask("refresh")
            self._followed()

    def _kill_the_client(self) -> None:
        self.client.kill()
        self._client = None

    def _remount(self) -> None:
        self._held.clear()
        for path in list(self._views):
            self._take_away(path)
        for directory in processes.find(_settings(self._place), str(self._source.path)):
            processes.stop(directory, force=True)
        self._kills = 0
        self._begin(len(self._points), [])

    @rule(which=pick, edits=EDITS, count=st.integers(1, 3))
    def mount_again(self, which: int, edits: list[Any], count: int) -> None:
        self._let_go_of_the_other()
        for path in list(self._views):
            self._take_away(path)
        self._drop_held()
        if which % 2:
            self._unless_copied(lambda force: self._cli("umount", *force, str(self._source.path)))
            self._kill_the_client()
        else:
            self._unless_copied(lambda force: self.client.ask("close", bool(force)))
        assert not any(map(os.path.exists, self._points.values()))
        self._kills = 0
        self._begin(count, edits)

    def _unless_copied(self, unmount: Callable[[list[str]], object]) -> None:
        """Unmount, by force if a view that was there is still shown in another's namespace."""
        try:
            unmount([])
        except (FailedError, AssertionError) as error:
            if not self._viewed or "is busy: shown by" not in str(error):
                raise
            unmount(["--force"])
        self._viewed = False

    @precondition(lambda self: self._kills < KILLS and self.adapter != "pyfuse3")
    @rule(which=pick)
    def kill_a_server(self, which: int) -> None:
        self._kills += 1
        directories = sorted(processes.find(_settings(self._place), str(self._source.path)))
        directory = directories[which % len(directories)]
        before = processes.status(directory)["server"]
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(MountError):
                if processes.status(directory)["server"] != before:
                    return
            time.sleep(0.01)
        raise AssertionError(f"no server took over from that of {Task.read(directory).host}")

    @rule(other=st.booleans(), repair=st.booleans())
    def verify(self, other: bool, repair: bool) -> None:
        if self._torn:  # no precondition: it depends on how fast bytes travelled
            return
        client = self._other if other and self._other is not None else self.client
        assert not any(client.ask("verify", repair).values()), "nothing was damaged"

    @rule(which=pick, host=pick, mapped=st.booleans())
    def open(self, which: int, host: int, mapped: bool) -> None:
        files = [path for path, its in self._expected.items() if stat.S_ISREG(its.mode)]
        if not files or self._torn:
            return
        at = list(self._points.values())[host % len(self._points)]
        path = files[which % len(files)]
        fd = os.open(os.path.join(os.fsencode(at), path), os.O_RDONLY)
        read: Read = lambda: os.pread(fd, 1 << 30, 0)  # noqa: E731
        if mapped and (data := self._expected[path].data):
            pages = mmap.mmap(fd, len(data), prot=mmap.PROT_READ)
            os.close(fd)
            read = lambda: pages[:]  # noqa: E731
        else:
            self._opened.append(fd)
        self._held.append((at, path, self._expected[path].data, read))

    @precondition(lambda self: len(self._views) < 2)
    @rule(host=pick)
    def view(self, host: int) -> None:
        at = list(self._points.values())[host % len(self._points)]
        path = self._place / "views" / os.urandom(3).hex()
        path.mkdir()
        subprocess.run(["mount", "--bind", at, path], check=True)

        def unmount() -> None:
            subprocess.run(["umount", "--lazy", path], check=True)

        self._views[path] = at, unmount
        self._viewed = True

    @precondition(lambda self: self.sif is not None and len(self._views) < 2)
    @rule(host=pick)
    def run_a_container(self, host: int) -> None:
        assert self.sif is not None
        at = list(self._points.values())[host % len(self._points)]
        name, runtime = os.urandom(3).hex(), self._place / "containers"
        packages, stop = run_instance(runtime, f"i{name}", self.sif, Path(at))
        self._views[packages] = at, stop

    def _take_away(self, path: Path) -> None:
        self._views.pop(path)[1]()

    def _drop_held(self) -> None:
        self._held.clear()
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()

    @invariant()
    def is_shown(self) -> None:
        for place in (*map(Path, self._points.values()), *self._views):
            shown = snapshot(Torn(place, self._expected) if self._torn else Directory(place))
            assert shown.keys() == self._expected.keys(), place
            for path, expected in self._expected.items():
                found = shown[path]
                if self.adapter == "auto" and not stat.S_ISDIR(expected.mode):
                    found.nlink = expected.nlink  # see BindModel
                assert found == expected, (place, path)

    @invariant()
    def stays_open(self) -> None:
        self._stays_open()

    def _stays_open(self) -> None:
        for at, path, data, read in self._held:
            assert read() == data, (at, path)

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            for client in self._client, self._other:
                if client is not None:
                    client.kill()
            with contextlib.suppress(MountError):
                for directory in processes.find(_settings(self._place), str(self._source.path)):
                    processes.stop(directory, force=True)
        deadline = time.monotonic() + 60
        left: set[str] = set()
        while time.monotonic() < deadline:
            if self._lost:
                self._clear()
            left = _mounts(self._place) | _processes(self._place)
            kept = f"wheelmount-{os.getuid()}", "mounts", "stores", "sessions", "instances"
            for name in ("runtime", "store"):
                every = (self._place / name).rglob("*")
                left |= {str(path) for path in every if path.name not in kept}
            if not left:
                break
            time.sleep(0.1)
        assert not left, f"left: {left}"
        shutil.rmtree(self._place)

    def _clear(self) -> None:
        """Clear what killed hosts of killed clients left, as ``wheelmount doctor --fix`` does."""
        for each in doctor.leftovers(_settings(self._place)):
            assert each.text == "hosts that are gone", each
            doctor.clear(each)

    def _end(self) -> None:
        for path in list(self._views):
            self._take_away(path)
        self._drop_held()
        self._let_go_of_the_other()
        if self._client is not None and self._points:
            self._client.ask("close", True)
            self._client.quit()
            self._client = None


class BindHosts(HostsModel):
    adapter = "auto"


class DevfuseHosts(HostsModel):
    adapter = "devfuse"


class Pyfuse3Hosts(HostsModel):
    adapter = "pyfuse3"


class ContainedHosts(HostsModel):
    """Hosts whose mounts are ``/packages`` of containers that keep running as well."""

    adapter = "auto"


def _run(model: Callable[[], HostsModel]) -> None:
    phases = set(hypothesis.Phase) if EXAMPLES else {hypothesis.Phase.generate}
    settings = hypothesis.settings(
        max_examples=EXAMPLES or 1,
        stateful_step_count=20 if EXAMPLES else 5,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.debug if EXAMPLES else hypothesis.Verbosity.normal,
        phases=phases - {hypothesis.Phase.explain, hypothesis.Phase.shrink},
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(model, settings=settings)  # type: ignore[arg-type]


@pytest.mark.costly
@pytest.mark.fuse
@pytest.mark.hosts
@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("model", [BindHosts, DevfuseHosts, Pyfuse3Hosts])
def test_hosts(model: Callable[[], HostsModel]) -> None:
    _run(model)


@pytest.mark.fuse
@pytest.mark.hosts
@pytest.mark.containers
@pytest.mark.timeout(0 if EXAMPLES else 600)
def test_hosts_with_running_containers(sif: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContainedHosts, "sif", sif)
    _run(ContainedHosts)
