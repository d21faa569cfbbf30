"""Refresh a mount of this machine without hosts: this process writes their stores itself.

Hosts take seconds to start, and then only copy some files from one directory of the machine to
another. Where this process sees the stores, it makes the next generation as an agent does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wheelmount.errors import MountError, TransferError, WheelmountError
from wheelmount.mount.client.seen import Seen
from wheelmount.mount.kernel.points import View
from wheelmount.mount.serve import processes
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.traffic import CLIENT, LOCAL, Traffic
from wheelmount.mount.snapshot.diff import Doubt, Succession
from wheelmount.mount.snapshot.source import Source, file_digest
from wheelmount.mount.store.store import Store
from wheelmount.progress import Progress, number_of

log = logging.getLogger("wheelmount")

MOST = 64 << 20
"""Most bytes of new files. For more, several processes are faster, in spite of their start."""


def possible(directories: Sequence[Path], seen: Seen) -> bool:
    """Return whether ``refresh`` may do the work of the hosts.

    Args:
        directories: private directories of the mount, one for each host, all on this machine.
        seen: what the hosts show, and the directory now.
    """
    inodes = seen.tree.inodes
    new = inodes.keys() - seen.shown.tree.inodes.keys()
    here = View.here().namespace
    with contextlib.suppress(WheelmountError):  # a host does not answer
        return sum(inodes[number].held for number in new) <= MOST and all(
            processes.status(directory)["namespace"] == here for directory in directories
        )
    return False


def refresh(directories: Sequence[Path], seen: Seen, progress: Progress) -> bool:
    """Have all hosts show the directory; none of them does after a failure ahead of the last step.

    Args:
        directories: private directories of the mount, one for each host, all on this machine.
        seen: what the hosts show, and the directory now; its tree is changed.
        progress: told about the bytes that are sent.

    Returns:
        False if this failed. Hosts have to do it then, and say what is wrong.
    """
    try:
        with contextlib.ExitStack() as stack:
            _refresh(directories, seen, progress, stack)
    except (OSError, WheelmountError) as error:
        log.debug("hosts refresh the mount: %s", error)
        return False
    return True


def _refresh(
    directories: Sequence[Path], seen: Seen, progress: Progress, stack: contextlib.ExitStack
) -> None:
    tasks, shown = list(map(Task.read, directories)), seen.shown
    stores = [
        Store(Path(task.store), generation, shown)
        for task, generation in zip(tasks, seen.generations, strict=True)
    ]
    for directory, store in zip(directories, stores, strict=True):
        stack.enter_context(store.growing())
        if processes.status(directory)["generation"] != store.generation:
            raise MountError("the mount was refreshed by another client meanwhile")
    root = os.fsencode(tasks[0].source)
    succession = Succession(shown.tree, seen.tree)
    layout = succession.settle(_same(succession, stores, root), shown.block_size)
    description = layout.encode(shown)
    made: dict[Path, Store] = {}  # by directory of the mount, until it is shown
    stack.callback(lambda: list(itertools.starmap(processes.forget, made.items())))
    pool = stack.enter_context(ThreadPoolExecutor(len(stores)))

    def make(directory: Path, task: Task, store: Store) -> None:
        made[directory] = store.next(description, set_attributes=task.adapter == "bind")

    list(pool.map(make, directories, tasks, stores))
    _send(Source(root, layout), list(made.values()), pool, progress)
    list(pool.map(Store.finish, made.values()))
    for directory in directories:
        processes.show(directory, made[directory].generation)
        del made[directory]
        traffic = Traffic()
        if layout.size:
            traffic.note(CLIENT, layout.size, LOCAL)
        traffic.write(directory)


def _same(succession: Succession, stores: Sequence[Store], root: bytes) -> list[Doubt]:
    """Return the doubtful files of which all stores have the bytes, as an earlier file."""
    same = []
    for doubt in succession.doubts:
        digest = file_digest(root + b"/" + succession.path(doubt))
        held = (file_digest(store.path(doubt.earlier)) for store in stores)
        if digest and all(each == digest for each in held):
            same.append(doubt)
    return same


def _send(
    source: Source, stores: Sequence[Store], pool: ThreadPoolExecutor, progress: Progress
) -> None:
    """Write all blocks to the stores."""
    layout = source.layout
    with progress.task("send", unit="B") as task:
        task.total(layout.size * len(stores))
        for block in range(layout.blocks):
            data = memoryview(bytearray(layout.length(block)))
            digest, changed = source.fill(block, data)
            if changed:
                path = layout.tree.inodes[changed[0]].path
                raise TransferError(f"{os.fsdecode(path)} changed while it was copied")
            write = functools.partial(Store.write, block=block, data=data, digest=digest)
            list(pool.map(write, stores))
            task.advance(len(data) * len(stores))
        task.note(f"{layout.size / 1e6:.1f} MB to {number_of(len(stores), 'host')}")
