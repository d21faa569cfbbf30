"""The ways to show a tree, best first, and the interface of FUSE servers.

``bind`` shows the store's own directory once all bytes have arrived: the kernel alone answers
readers. Until then, and where mounting is not allowed, ``devfuse`` serves the tree.
``pyfuse3`` does so too, through libfuse; it is slower and can be asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from wheelmount import linux
from wheelmount.config import ADAPTERS
from wheelmount.errors import InputError

if TYPE_CHECKING:
    from wheelmount.mount.serve.vfs import (
        Change,  # it imports the store, but the command line needs only the names
    )

AUTO = "auto"
NAMES = ADAPTERS
"""Values of ``--adapter``."""

SERVERS = ("devfuse", "pyfuse3")
"""Those that serve a tree throughout, by FUSE."""

FOREVER = 10**8
"""Seconds that the kernel may cache names and attributes; a refresh drops those that change."""

Wait = Callable[[int, int, int], Awaitable[bytes | memoryview]]
"""Called with (inode, offset, size); returns the bytes once they arrive, or raises ``OSError``."""


class Adapter(Protocol):
    """A FUSE server. It counts the kernel's references to inodes, and reports inodes with none."""

    name: str
    """One of ``NAMES``."""

    async def serve(self) -> None:
        """Serve until the mount is unmounted."""

    def end(self) -> None:
        """End ``serve`` although the mount is in use."""

    def mounted(self) -> bool:
        """Return whether the file system is still mounted anywhere; the kernel is asked."""

    def knows(self, number: int) -> bool:
        """Return whether the kernel holds an inode."""

    def drop(self, number: int) -> None:
        """Have the kernel forget a file's bytes. Must not run on the threads of ``serve``."""

    def drop_names(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Have the kernel forget names, each of a directory's number.

        Must not run on the threads of ``serve``.
        """

    async def refresh(self, change: Change, flip: Callable[[], None]) -> None:
        """Make the kernel forget names and attributes that change, and call ``flip`` in between.

        No reader may see the old tree after it has seen a part of the new one.
        """


def choose(wanted: str) -> str:
    """Choose the way in which this machine shows a tree whose bytes have all arrived.

    Args:
        wanted: one of ``NAMES``.

    Raises:
        InputError: the name is unknown, or this way does not work here.
    """
    if wanted not in NAMES:
        raise InputError(f"there is no adapter {wanted!r}", hint=f"give one of {', '.join(NAMES)}")
    if wanted == "pyfuse3" and importlib.util.find_spec("pyfuse3") is None:
        raise InputError(
            "this host does not have the Python package pyfuse3",
            hint="install it there: pip install 'wheelmount[pyfuse3]'; or leave it to auto",
        )
    lacks = lacking_for_bind()
    if wanted == "bind" and lacks:
        raise InputError(f"this host cannot show a mount by bind: {lacks}", hint="leave it to auto")
    if wanted != AUTO:
        return wanted
    return "devfuse" if lacks else "bind"


def lacking_for_bind() -> str:
    """Return what is missing for ``bind``; empty if nothing is."""
    if linux.version() < linux.BENEATH:
        return f"Linux is {os.uname().release}, not 6.5 or newer"
    if not linux.may_mount():
        return "mounting is for root, or for users with a mount namespace of their own"
    return ""
