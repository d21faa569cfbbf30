"""The generations of a mount, beside a FUSE server whose kernel forgets inodes at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.mount.test_store import BLOCK, arrive, follow
from wheelmount.mount.serve import generations
from wheelmount.mount.serve.control import Task
from wheelmount.mount.serve.generations import Generations
from wheelmount.mount.serve.vfs import Change
from wheelmount.mount.snapshot.layout import Layout
from wheelmount.mount.snapshot.scan import scan
from wheelmount.mount.store.store import Store, current


class ForgettingFuse:
    """Stands in for a FUSE server: the kernel forgets each inode just after it was asked about.

    A real one reports this on a thread of its own, so now and then at that moment.
    """

    name = "devfuse"

    def __init__(self) -> None:
        self.forgotten: Callable[[int], None] = lambda _: None
        self.flipped: Callable[[], None] = lambda: None
        self._gone: set[int] = set()

    async def serve(self) -> None:
        await trio.sleep_forever()

    def end(self) -> None: ...

    def mounted(self) -> bool:
        return True

    def knows(self, number: int) -> bool:
        if number in self._gone:
            return False
        self._gone.add(number)
        self.forgotten(number)
        return True

    def drop(self, number: int) -> None: ...

    def drop_names(self, entries: Iterable[tuple[int, bytes]]) -> None: ...

    async def refresh(self, _change: Change, flip: Callable[[], None]) -> None:
        flip()
        self.flipped()


def test_a_generation_goes_though_its_files_are_forgotten_while_the_next_is_shown(
    source: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "AGAIN", 0.05)
    layout = Layout(scan(os.fsencode(source)), BLOCK)
    store = Store.create(workplace / "kept", layout.encode(), mounted=False)
    arrive(store, source, layout)
    (source / "page").unlink()
    (source / "package" / "sub" / "module.py").unlink()
    (source / "package" / "sub").rmdir()
    at, kept = str(workplace / "m"), str(store.directory)
    task = Task("host", str(source), at, kept, "devfuse", read_timeout=60, made=True)
    mount, adapter = Generations(workplace, task), ForgettingFuse()
    adapter.forgotten = mount.forgotten
    noted: list[int] = []
    # A server that dies from now on is followed by one that must show no earlier generation.
    adapter.flipped = lambda: noted.append(current(store.directory))
    follow(store, layout, source, set_attributes=False)

    async def show() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.serve, adapter, nursery)
            await trio.testing.wait_all_tasks_blocked()
            await mount.show(2)
            with trio.fail_after(30):
                while mount.kept().generations:
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    trio.run(show)
    assert noted == [2]
    assert len(list(store.directory.glob("*.tree"))) == 1
