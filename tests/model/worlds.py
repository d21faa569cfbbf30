"""Ways to show a source: by the tree and its store alone, or by mounts, each fed by hand."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil

from tests.mount.conformance import Bare, Directory, Shown
from tests.mount.test_server import Served
from tests.mount.test_store import arrive
from wheelmount.config import Settings
from wheelmount.containers.container import PACKAGES, Container
from wheelmount.containers.instance import Instance
from wheelmount.errors import MountError
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.vfs import Vfs
from wheelmount.mount.snapshot.diff import Succession
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.snapshot.source import file_digest
from wheelmount.mount.snapshot.tree import ROOT
from wheelmount.mount.store import store as stores
from wheelmount.mount.store.store import Store

BLOCK = 64 << 10

KILLS = 3
"""A server that dies more often in a minute is given up."""

Read = Callable[[], bytes]
"""Reads again what was opened."""

List = Callable[[], set[bytes]]
"""Lists again what was opened."""


class World:
    """A source that is shown, and followed as a client does.

    Args:
        source: the directory.
        place: an empty directory for all else.
    """

    set_attributes = True
    layout: Layout
    store: Store
    """As it is filled."""

    def __init__(self, source: Path, place: Path) -> None:
        self._source, self._place = source, place

    def refresh(self) -> None:
        """Show what the source is now."""
        made = self._prepare()
        if made is not None:
            after, store = made
            arrive(store, self._source, after)
            self._show(store)
            self.layout, self.store = after, store

    def abandon(self) -> None:
        """Begin to refresh, and give up when some blocks have arrived."""
        made = self._prepare()
        if made is not None:
            made[1].forget()

    def _prepare(self) -> tuple[Layout, Store] | None:
        tree = scan(os.fsencode(self._source), self.layout.tree)
        succession = Succession(self.layout.tree, tree)
        if not succession:
            return None
        same = [
            doubt
            for doubt in succession.doubts
            if file_digest(self.store.path(doubt.earlier))
            == file_digest(os.path.join(os.fsencode(self._source), succession.path(doubt)))
        ]
        layout = succession.settle(same, BLOCK)
        return layout, self.store.next(
            layout.encode(self.layout), set_attributes=self.set_attributes
        )

    def another_client(self) -> None:
        """Go on with what a client knows that was not there before."""
        self.layout = Layout.decode(self.store.description.read_bytes())
        self.store = Store.open(self.store.directory, self.store.generation)

    def _show(self, store: Store) -> None:
        raise NotImplementedError

    def shown(self) -> Shown:
        """What is shown now."""
        raise NotImplementedError

    def open(self, path: bytes) -> Read:
        """Open a file; what was opened stays what it is."""
        raise NotImplementedError

    def map(self, path: bytes) -> Read:
        """Map a file, which is not empty."""
        return self.open(path)

    def open_directory(self, path: bytes) -> List:
        """Open a directory; whoever has it open sees it as it was then, or as it is now."""
        raise NotImplementedError

    def view(self) -> Shown | None:
        """A second place where the same is shown (a bind mount), if this can have one."""
        return None

    def kill(self) -> None:
        """Kill what serves."""

    def end(self) -> None:
        """Take all down."""
        raise NotImplementedError


class Alone(World):
    """The tree and the store, without a mount."""

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__(source, place)
        self.layout = Layout(scan(os.fsencode(source)), BLOCK)
        directory = place / "store"
        self.store = Store.create(
            directory, self.layout.encode(), mounted=False, set_attributes=True
        )
        arrive(self.store, source, self.layout)
        self._vfs = Vfs(Store.open(directory))  # as a serving process has it

    def _show(self, store: Store) -> None:
        before, after = self._vfs.store, self._vfs.store.reopen(store.generation)
        change = self._vfs.changes(after)
        dropped = set(change.entries)
        for directory, names in before.tree.names.items():  # what the kernel may have kept
            if directory in after.tree.names:
                now = after.tree.names[directory]
                assert all(
                    now.get(name) == number
                    for name, number in names.items()
                    if (directory, name) not in dropped
                )
                assert directory in change.directories or (
                    names == now and before.tree.inodes[directory] == after.tree.inodes[directory]
                )
        for number in before.tree.inodes.keys() & after.tree.inodes.keys():
            was, its = before.tree.inodes[number], after.tree.inodes[number]
            if not was.is_directory:
                assert was._replace(path=b"") == its._replace(path=b"") or was.is_symlink
        gone = before.tree.inodes.keys() - after.tree.inodes.keys()
        assert gone == set(before.tree.inodes) - set(after.tree.inodes)
        self._vfs.replace(after)

    def shown(self) -> Shown:
        return Bare(self._vfs)

    def _number(self, path: bytes) -> int:
        number: int | None = ROOT
        for name in path.split(b"/") if path else []:
            assert number is not None
            number = self._vfs.lookup(number, name)
        assert number is not None
        return number

    def open(self, path: bytes) -> Read:
        number = self._number(path)

        def read() -> bytes:
            data = self._vfs.read(number, 0, 1 << 30)
            assert data is not None
            return data

        return read

    def open_directory(self, path: bytes) -> List:
        number = self._number(path)
        return lambda: {name for name, _ in self._vfs.entries(number)}

    def kill(self) -> None:
        earlier = stores.earlier(self.store.directory, self.store.generation)
        kept = [Store.open(self.store.directory, number) for number in earlier]
        self._vfs = Vfs(Store.open(self.store.directory, self.store.generation), kept)

    def end(self) -> None:
        stores.remove(self.store.directory)


class Mount(World):
    """A mount, served by a process of its own."""

    adapter = "devfuse"

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__(source, place)
        self._opened: list[int] = []
        self._views: list[Path] = []
        self._kills = 0
        self.set_attributes = self.adapter == "bind"
        for name in ("runtime", "store", "cache", "state"):
            (place / name).mkdir()
        settings = Settings(
            block_size=BLOCK,
            read_timeout=10,
            store=str(place / "store"),
            runtime_dir=str(place / "runtime"),
            cache_dir=str(place / "cache"),
            state_dir=str(place / "state"),
        )
        self._served = Served(source, place, settings, self.adapter)
        self._served.feed(keep=True)
        self.layout, self.store = self._served.layout, self._served.store
        for block in range(self.layout.blocks):
            self._served.arrive(block)
        if self.set_attributes:
            self.store.finish()
            self._show(self.store)

    def _show(self, store: Store) -> None:
        processes.show(self._served.directory, store.generation)

    def shown(self) -> Shown:
        return Directory(self._served.mount)

    def open(self, path: bytes) -> Read:
        fd = os.open(os.path.join(os.fsencode(self._served.mount), path), os.O_RDONLY)

        def read() -> bytes:
            return os.pread(fd, 1 << 30, 0)

        self._opened.append(fd)
        return read

    def map(self, path: bytes) -> Read:
        place = os.path.join(os.fsencode(self._served.mount), path)
        with open(place, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return lambda: mapped[:]

    def open_directory(self, path: bytes) -> List:
        place = os.path.join(os.fsencode(self._served.mount), path)
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        self._opened.append(fd)
        return lambda: set(map(os.fsencode, os.listdir(fd)))

    def kill(self) -> None:
        if self.adapter == "pyfuse3" or self._kills == KILLS:
            return  # nothing starts it again
        self._kills += 1
        before = processes.status(self._served.directory)["server"]
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(MountError):
                if processes.status(self._served.directory)["server"] != before:
                    return
            time.sleep(0.01)
        raise AssertionError("no server took over")

    def view(self) -> Shown | None:
        place = self._place / f"view{len(self._views)}"
        place.mkdir()
        subprocess.run(["mount", "--bind", self._served.mount, place], check=True)
        self._views.append(place)
        return Directory(place)

    def end(self) -> None:
        for fd in self._opened:
            os.close(fd)
        for place in self._views:
            subprocess.run(["umount", "--lazy", place], check=True)
        self._served.end()


class Libfuse(Mount):
    """The same by pyfuse3."""

    adapter = "pyfuse3"


class Bound(Mount):
    """A mount that the kernel shows alone."""

    adapter = "bind"


class _Instances(Mount):
    """A mount whose other places are ``/packages`` of containers that keep running."""

    sif: ClassVar[Path]
    """Image of the containers."""

    def __init__(self, source: Path, place: Path) -> None:
        super().__init__(source, place)
        self._stops: list[Callable[[], None]] = []

    def view(self) -> Shown:
        name = f"i{len(self._stops)}"
        runtime, packages = self._place / "containers", self._served.mount
        path, stop = run_instance(runtime, name, self.sif, packages)
        self._stops.append(stop)
        return Directory(path)

    def end(self) -> None:
        for stop in self._stops:
            stop()
        super().end()


def run_instance(
    runtime: Path, name: str, sif: Path, packages: Path
) -> tuple[Path, Callable[[], None]]:
    """Start a container that keeps running; its ``/packages`` as seen from here, and its end."""
    instance = Instance(runtime, name, "here")
    container = Container(sif, instance.workdir, packages=packages)
    record = instance.ensure(container)
    assert instance.run(container, ["test", "-d", PACKAGES]) == 0
    (inside,) = psutil.Process(record.pid).children()

    def stop() -> None:
        assert instance.stop()

    return Path(f"/proc/{inside.pid}/root{PACKAGES}"), stop


class ContainedFuse(_Instances):
    """Running containers that show a mount by FUSE."""


class Contained(_Instances):
    """Running containers that show a mount which the kernel shows alone."""

    adapter = "bind"
