"""A tree that a host has, in other blocks than it came in."""

from __future__ import annotations

from wheelmount.errors import TransferError
from wheelmount.mount.layout import Layout
from wheelmount.mount.store import Store


class Recut:
    """All of a store that is whole, to be given to hosts that are added later.

    What ``Receiver`` asks of a ``Store``, but nothing is ever missing.

    Args:
        store: has the files.
        block_size: bytes of a block.
    """

    def __init__(self, store: Store, block_size: int) -> None:
        layout = store.layout
        self.layout = Layout(layout.tree, block_size, identity=layout.identity)
        self._store = store

    def missing(self) -> list[int]:
        """See ``Store.missing``."""
        return []

    def has(self, _block: int) -> bool:
        """See ``Store.has``."""
        return True

    def read_block(self, block: int, view: memoryview) -> None:
        """See ``Store.read_block``."""
        self._store.read_block(block, view, self.layout)

    def write(self, _block: int, _data: memoryview, _digest: bytes) -> None:
        """Nothing is ever brought."""
        raise TransferError("this host has all blocks")

    def mark_changed(self, inode: int) -> None:
        """See ``write``."""
