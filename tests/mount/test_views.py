"""Whoever is in a tree that a refresh replaces, and all places that show it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.mount.test_server import Served
from wheelmount import entry, linux
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import MountError
from wheelmount.mount.kernel import points, syscalls, users, views
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.fuse.attach import attach
from wheelmount.mount.serve.generations import AGAIN, Generations
from wheelmount.mount.serve.server import Server
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import Source
from wheelmount.mount.store.store import Store
from wheelmount.mount.transfer.ring import Ring

pytestmark = pytest.mark.fuse


class Following(Served):
    """A mount that follows its source by hand, on this machine alone."""

    def __init__(
        self, source: Path, place: Path, settings: Settings, adapter: str = "bind"
    ) -> None:
        super().__init__(source, place, settings, adapter)
        self.source = source
        self.arrive_all()

    def arrive_all(self) -> None:
        for block in self.store.missing():
            self.arrive(block)
        self.store.finish()

    def follow(self) -> None:
        """Show what the source is now."""
        tree = scan(os.fsencode(self.source), self.layout.tree)
        block_size = self.layout.block_size
        succession = Succession(self.layout.tree, tree)
        layout = succession.settle(succession.doubts, block_size)
        with self.store.growing():
            made = self.store.next(
                layout.encode(self.layout), set_attributes=self.adapter == "bind"
            )
            self._source = Ring(Source(os.fsencode(self.source), layout), slots=4, lease=5)
            self.store, self.layout = made, layout
            self.arrive_all()
            processes.show(self.directory, made.generation)

    def show(self) -> None:
        processes.show(self.directory, self.store.generation)
        assert processes.status(self.directory)["adapter"] == self.adapter

    @property
    def generations(self) -> int:
        return len(list(self.store.directory.glob("*.tree")))


def until(reached: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@pytest.fixture
def tree(workplace: Path) -> Path:
    """A source of a few files."""
    for name in ("a", "b", "sub/c"):
        path = workplace / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    return workplace / "source"


@pytest.fixture(params=["memory", "disk"])
def served(
    tree: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Following]:
    """A mount of ``tree`` whose bytes are all there, through FUSE; ``show`` has it bound."""
    if not linux.may_mount():
        pytest.skip("needs root")
    if request.param == "memory":
        settings = replace(settings, store=MEMORY)
    mount = Following(tree, workplace, settings)
    mount.feed(keep=True)
    yield mount
    mount.end()


def _kept(served: Following) -> dict[str, Any]:
    kept: dict[str, Any] = processes.status(served.directory)["kept"]
    return kept


def _edit(tree: Path, text: str) -> None:
    for name in ("a", "sub/c"):
        (tree / name).write_text(text)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that answers each line on its standard input; ended with the test."""
    begun = []

    def start(*command: str | Path, **options: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options)
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


SHELL = "while read -r line; do eval $line 2>&1 | tr '\\n' ' '; echo; done"


@pytest.mark.costly
@pytest.mark.parametrize("early", [False, True], ids=["bound", "served"])
def test_all_views_follow_and_memory_is_freed(
    served: Following, tree: Path, workplace: Path, started: Any, early: bool
) -> None:
    """Views of the mount as the kernel shows it alone, and of the server that came before."""
    if not early:
        served.show()
    mount, view, part = served.mount, workplace / "view", workplace / "part"
    for path, shown in ((view, mount), (part, mount / "sub")):
        path.mkdir()
        subprocess.run(["mount", "--bind", shown, path], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro,noexec", view], check=True)
    private = started("unshare", "-m", "--propagation", "private", "sh", "-c", SHELL)
    slave = started("unshare", "-m", "--propagation", "slave", "sh", "-c", SHELL)
    user = started("unshare", "-Urm", "sh", "-c", SHELL)
    look = f"cat {mount}/a {view}/a {part}/c"
    for process in (private, slave, user):
        assert _ask(process, look) == "111"
    if early:
        served.show()
    for text in ("22", "333"):
        _edit(tree, text)
        served.follow()
        assert (view / "a").read_text() == (part / "c").read_text() == text
        for process in (private, slave, user):
            assert _ask(process, look) == text * 3
    assert _ask(slave, f"grep -c ' {mount} ' /proc/self/mountinfo") == "1"
    options = next(each.options for each in points.table() if each.path == str(view))
    assert {"ro", "nosuid", "nodev", "noexec"} <= options
    if early:  # the server goes on for that: its mount may only be covered there, not taken away
        user.kill()
        user.wait()
    until(lambda: served.generations == 1)
    assert _kept(served) == {"generations": 0, "bytes": 0, "users": []}
    for path in (view, part):
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("early", [False, True], ids=["bound", "served"])
def test_a_copy_that_could_only_be_covered_keeps_no_mount(
    served: Following, tree: Path, started: Any, early: bool
) -> None:
    """A container of an ordinary user has a copy of what is mounted in ``/tmp``."""
    if not early:
        served.show()
    user = started("unshare", "-Urm", "sh", "-c", SHELL)
    assert _ask(user, f"cat {served.mount}/a") == "1"
    if early:
        served.show()
    for text in ("22", "333"):
        _edit(tree, text)
        served.follow()
        assert _ask(user, f"cat {served.mount}/a") == text
    if early:  # its server serves the copy
        user.kill()
        user.wait()
    processes.stop(served.directory, force=False)


def test_a_view_of_what_is_gone_keeps_it(served: Following, tree: Path, workplace: Path) -> None:
    served.show()
    (workplace / "view").mkdir()
    subprocess.run(["mount", "--bind", served.mount / "sub", workplace / "view"], check=True)
    shutil.rmtree(tree / "sub")
    (tree / "sub").symlink_to("/etc")
    served.follow()
    until(lambda: f"the mount at {workplace}/view" in _kept(served)["users"])
    time.sleep(2 * AGAIN)
    assert (workplace / "view" / "c").read_text() == "1"
    subprocess.run(["umount", workplace / "view"], check=True)


def test_a_mount_in_the_mount_stays(served: Following, tree: Path) -> None:
    served.show()
    inside = served.mount / "sub"
    subprocess.run(["mount", "-t", "tmpfs", "inside", inside], check=True)
    (inside / "file").touch()
    for text in ("22", "333"):
        _edit(tree, text)
        served.follow()
        assert (served.mount / "a").read_text() == text
        assert os.listdir(inside) == ["file"]
    subprocess.run(["umount", inside], check=True)
    assert (inside / "c").read_text() == "333"
    subprocess.run(["mount", "-t", "tmpfs", "inside", inside], check=True)
    shutil.rmtree(tree / "sub")
    served.follow()
    assert sorted(os.listdir(served.mount)) == ["a", "b"]
    until(lambda: served.generations == 1)


WALKER = """
import os, sys
names = os.listdir(".") if sys.argv[1] == "cwd" else None
top = os.open("." if names else sys.argv[1], os.O_RDONLY)
if names: os.close(top)
else: os.chdir("/")
for line in sys.stdin:
    at = {} if names else {"dir_fd": top}
    file = os.open("sub/c", os.O_RDONLY, **at)
    print(os.read(file, 10).decode(), flush=True)
    os.close(file)
"""


@pytest.mark.costly
@pytest.mark.parametrize("served", ["memory"], indirect=True)
@pytest.mark.parametrize("how", ["cwd", "descriptor"])
def test_who_is_in_a_tree_goes_on_with_all_of_it(
    served: Following, tree: Path, started: Any, how: str
) -> None:
    served.show()
    place = "cwd" if how == "cwd" else str(served.mount)
    walker = started(sys.executable, "-S", "-c", WALKER, place, cwd=served.mount)
    assert _ask(walker, "") == "1"
    (tree / "large").write_bytes(b"x" * (4 << 20))
    shutil.rmtree(tree / "sub")
    served.follow()
    (tree / "large").unlink()
    served.follow()
    until(lambda: served.generations == 2)
    (user,) = _kept(served)["users"]
    assert f"({walker.pid})" in user
    time.sleep(2 * AGAIN)
    assert _ask(walker, "") == "1"
    walker.kill()
    walker.wait()
    until(lambda: served.generations == 1)


EVALUATOR = """
import os, sys
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.mark.parametrize("adapter", ["devfuse", "pyfuse3"])
def test_who_is_in_a_directory_that_is_gone_goes_on_in_all_of_it(
    tree: Path, workplace: Path, settings: Settings, started: Any, adapter: str
) -> None:
    """By a server: what was never looked up before the refresh is there all the same."""
    (tree / "sub" / "deep").mkdir()
    (tree / "sub" / "deep" / "d").write_text("d")
    (tree / "sub" / "moved").write_text("m")
    served = Following(tree, workplace, settings, adapter)
    try:
        served.feed(keep=True)
        walker = started(sys.executable, "-S", "-c", EVALUATOR, cwd=served.mount / "sub")
        assert _ask(walker, "sorted(os.listdir())") == "['c', 'deep', 'moved']"
        (tree / "sub" / "moved").rename(tree / "moved")
        shutil.rmtree(tree / "sub")
        served.follow()
        assert not (served.mount / "sub").exists()
        (tree / "moved").unlink()
        served.follow()
        until(lambda: served.generations == 2)
        assert _ask(walker, "sorted(os.listdir())") == "['c', 'deep', 'moved']"
        for path, text in (("c", "1"), ("deep/d", "d"), ("moved", "m")):
            assert _ask(walker, f"open('{path}').read()") == text
        assert _ask(walker, "os.chdir('deep')") == "None"
        assert _ask(walker, "open('d').read()") == "d"
        walker.kill()
        walker.wait()
        until(lambda: served.generations == 1)
    finally:
        served.end()


@pytest.mark.costly
@pytest.mark.parametrize("served", ["memory"], indirect=True)
def test_many_refreshes_leave_nothing(served: Following, tree: Path) -> None:
    served.show()
    for number in range(100):
        _edit(tree, f"{number}")
        served.follow()
    until(lambda: served.generations == 1)
    assert (served.mount / "a").read_text() == "99"
    if served.store.owned:

        def used() -> int:
            usage = os.statvfs(served.store.directory)
            return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

        until(lambda: used() < 256 << 10)
    assert len([each for each in points.table() if each.path == str(served.mount)]) == 1


@pytest.mark.parametrize("served", ["memory"], indirect=True)
def test_an_unmounted_store_stays_in_no_namespace(
    served: Following, workplace: Path, started: Any
) -> None:
    served.show()
    other = started("unshare", "-m", "sh", "-c", SHELL)
    count = f"grep -c {served.store.directory} /proc/self/mountinfo"
    assert _ask(other, count) == "1"
    processes.stop(served.directory, force=False)
    assert _ask(other, count) == "0"


def _stops(served: Following) -> bool:
    try:
        processes.stop(served.directory, force=False)
    except MountError:
        return False
    return True


@pytest.fixture(params=["devfuse", "pyfuse3"])
def by_server(
    tree: Path, workplace: Path, settings: Settings, request: pytest.FixtureRequest
) -> Iterator[Following]:
    """A mount of ``tree`` whose bytes are all there, which stays with its server."""
    if not linux.may_mount():
        pytest.skip("needs root")
    mount = Following(tree, workplace, settings, request.param)
    try:
        mount.feed(keep=True)
        yield mount
    finally:
        mount.end()


@pytest.mark.costly
def test_a_view_of_a_server_keeps_it(by_server: Following, tree: Path, workplace: Path) -> None:
    (workplace / "view").mkdir()
    subprocess.run(["mount", "--bind", by_server.mount, workplace / "view"], check=True)
    with pytest.raises(MountError, match=f"busy: shown by the mount at {workplace}/view"):
        processes.stop(by_server.directory, force=False)
    _edit(tree, "22")
    by_server.follow()
    assert (workplace / "view" / "a").read_text() == "22"
    subprocess.run(["umount", workplace / "view"], check=True)
    # Another test's namespace, as it began meanwhile, may have a copy of the view for a while.
    until(lambda: _stops(by_server))
    assert not by_server.directory.exists()


def test_a_copy_of_a_directory_above_keeps_no_server(
    by_server: Following, workplace: Path, started: Any
) -> None:
    """``apptainer build``, of any user, binds ``/tmp`` with all mounts in it to another path."""
    (above := workplace / "above").mkdir()
    other = started("unshare", "-m", "--propagation", "private", "sh", "-c", SHELL)
    _ask(other, f"mount --rbind {workplace} {above}; echo")
    copy = above / by_server.mount.relative_to(workplace)
    assert _ask(other, f"cat {copy}/a") == "1"
    processes.stop(by_server.directory, force=False)
    assert _ask(other, f"grep -c {copy} /proc/self/mountinfo") == "0"


@pytest.mark.timeout(60)
def test_a_copy_that_another_mount_covers_keeps_no_server(
    by_server: Following, workplace: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service with a ``/tmp`` of its own has a copy of what is mounted in the machine's."""
    other = started("unshare", "-m", "--propagation", "private", "sh", "-c", SHELL)
    assert _ask(other, f"mount -t tmpfs none {workplace}") == ""
    monkeypatch.setattr(processes, "STOP_TIMEOUT", 300.0)  # after which the server is killed
    processes.stop(by_server.directory, force=False)


@pytest.mark.parametrize("by_server", ["devfuse"], indirect=True)
def test_a_view_at_the_same_path_of_another_directory_keeps_its_server(
    by_server: Following, workplace: Path, started: Any
) -> None:
    """A container that binds the mount to the same path has it on a directory of its own."""
    mount = by_server.mount
    other = started("unshare", "-m", "--propagation", "private", "sh", "-c", SHELL)
    steps = (
        f"mount --bind {mount} /mnt",
        f"mount -t tmpfs none {workplace}",
        f"mkdir {mount}",
        f"mount --move /mnt {mount}",
    )
    assert _ask(other, " && ".join(steps)) == ""
    where = f"shown by sh \\({other.pid}\\) at {mount}$"
    with pytest.raises(MountError, match=f"busy: {where}"):
        processes.stop(by_server.directory, force=False)
    assert _ask(other, f"cat {mount}/a") == "1"
    assert _ask(other, f"umount {mount}") == ""
    until(lambda: _stops(by_server))


@pytest.mark.containers
@pytest.mark.parametrize("served", ["memory"], indirect=True)
@pytest.mark.parametrize("privileges", [["--no-privs"], ["--userns"], ["--fakeroot"]])
def test_containers_follow(
    served: Following, tree: Path, sif: Path, started: Any, privileges: list[str]
) -> None:
    options = ["--containall", *privileges, "--bind", f"{served.mount}:/packages:ro"]
    inside = started("apptainer", "-s", "exec", *options, sif, "sh", "-c", SHELL)
    assert _ask(inside, "cat /packages/a") == "1"
    served.show()
    assert _ask(inside, "cat /packages/a") == "1"
    (tree / "new").write_text("new")
    for text in ("22", "333"):
        _edit(tree, text)
        served.follow()
        assert _ask(inside, "cat /packages/a /packages/new /packages/sub/c") == f"{text}new{text}"
    assert "Read-only" in _ask(inside, "touch /packages/x")
    inside.communicate()
    until(lambda: served.generations == 1)


@pytest.mark.parametrize("served", ["memory"], indirect=True)
@pytest.mark.parametrize("refreshed", [False, True])
def test_a_view_of_the_server_that_begins_while_the_kernel_takes_over_follows(
    served: Following, tree: Path, workplace: Path, refreshed: bool
) -> None:
    """A container that starts may hold the mount where no search finds it."""
    (view := workplace / "view").mkdir()
    with syscalls.clone(served.mount) as held:
        served.show()
        syscalls.attach(held, view)
    assert points.mounted(str(view)) == points.FILE_SYSTEM
    if refreshed:
        _edit(tree, "22")
        served.follow()
        assert (view / "a").read_text() == "22"
    until(lambda: points.mounted(str(view)) != points.FILE_SYSTEM)
    subprocess.run(["umount", view], check=True)


def test_a_view_that_begins_during_a_refresh_follows(
    served: Following, tree: Path, workplace: Path
) -> None:
    served.show()
    (view := workplace / "view").mkdir()
    with syscalls.clone(served.mount) as held:
        _edit(tree, "22")
        served.follow()
        syscalls.attach(held, view)
    until(lambda: (view / "a").read_text() == "22")
    _edit(tree, "333")
    served.follow()
    assert (view / "a").read_text() == "333"
    subprocess.run(["umount", view], check=True)


@pytest.fixture
def standing(tree: Path, workplace: Path, settings: Settings) -> Iterator[tuple[Path, Task]]:
    """The directory and the task of a mount of ``tree`` through FUSE, which this process holds."""
    if not linux.may_mount():
        pytest.skip("needs root")
    directory, place = processes.directory(settings) / "test-host0", workplace / "shown"
    directory.mkdir()
    entry.make(directory)
    place.mkdir()
    layout = Layout(scan(os.fsencode(tree)), settings.block_size)
    store = settings.private_store(mounted=False) / directory.name
    made = Store.create(store, layout.encode(), mounted=False, set_attributes=True)
    with contextlib.closing(
        Ring(Source(os.fsencode(tree), layout), slots=layout.blocks, lease=5)
    ) as ring:
        for block in made.missing():
            staged = ring.stage(block)
            made.write(block, ring.slots[staged.slot][: staged.length])
    made.finish()
    task = Task("host0", str(tree), str(place), str(store), "bind", 10.0, made=False)
    task.write(directory)
    server = attach(task.mntpoint)
    found = points.find(task.mntpoint)
    assert found is not None
    points.remember(directory, (found.id, found.device, found.root))
    yield directory, task
    os.close(server)
    points.unmount(task.mntpoint, force=True)
    processes.discard(directory, store, None)


def test_a_mount_that_takes_over_leaves_others_alone_that_begin_meanwhile(
    standing: tuple[Path, Task], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives a new mount the number of the device of one that has just gone."""
    exchange, others = views.exchange, [workplace / str(number) for number in range(4)]
    servers: list[int] = []

    def exchange_beside_others(*arguments: Any) -> bool:
        done = exchange(*arguments)
        if not servers:
            for other in others:
                other.mkdir()
                servers.append(attach(str(other)))
        return done

    monkeypatch.setattr(views, "exchange", exchange_beside_others)
    directory, task = standing
    try:
        trio.run(Generations(directory, task).show, 1)
        assert (Path(task.mntpoint) / "a").read_text() == "1"
        assert [points.mounted(str(other)) for other in others] == [points.FILE_SYSTEM] * len(
            others
        )
    finally:
        for server, other in zip(servers, others, strict=True):
            os.close(server)
            syscalls.unmount(other, detach=True)


def test_a_mount_stays_for_a_process_that_enters_while_another_takes_over(
    standing: tuple[Path, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, task = standing
    enters = iter([False, True])  # between the first search for processes and the change
    monkeypatch.setattr(users, "inhabited", lambda _mount: next(enters))
    trio.run(Generations(directory, task).show, 1)
    assert points.mounted(task.mntpoint) == points.FILE_SYSTEM
    found = points.standing(directory)
    assert found is not None
    assert found.kind == points.FILE_SYSTEM


def test_a_mount_stays_while_a_command_starts(
    standing: tuple[Path, Task], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, task = standing
    generations = Generations(directory, task)
    monkeypatch.setattr(entry, "PATIENCE", 0.1)
    with entry.starting(settings):
        trio.run(generations.show, 1)
        assert points.mounted(task.mntpoint) == points.FILE_SYSTEM
    trio.run(generations.show, 1)
    assert points.mounted(task.mntpoint) != points.FILE_SYSTEM


def test_a_mount_that_goes_leaves_others_alone_that_begin_meanwhile(
    standing: tuple[Path, Task],
    workplace: Path,
    started: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One at the same path in another namespace, as hosts of one machine have it."""
    directory, task = standing
    program = (
        "import sys\n"
        "from wheelmount.mount.kernel import points\n"
        "from wheelmount.mount.serve.fuse.attach import attach\n"
        "points.unmount(sys.argv[1], force=True); print(flush=True); input()\n"
        "server = attach(sys.argv[1]); print(flush=True)\n"
        "while input(): print(points.mounted(sys.argv[1]), flush=True)\n"
    )
    other = started("unshare", "--mount", sys.executable, "-c", program, task.mntpoint)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdout.readline()

    def answer() -> str:
        assert other.stdin is not None
        assert other.stdout is not None
        print("go on", file=other.stdin, flush=True)
        return other.stdout.readline().strip()

    take_down = points.take_down

    def take_down_beside_another(mount: points.Mounted, *, force: bool) -> None:
        take_down(mount, force=force)
        answer()

    monkeypatch.setattr(points, "take_down", take_down_beside_another)
    trio.run(partial(Server(directory, task)._take_down, force=True))
    assert points.mounted(task.mntpoint) is None
    assert answer() == points.FILE_SYSTEM
