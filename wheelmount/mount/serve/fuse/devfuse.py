"""Serves the tree through /dev/fuse itself, without a library and without OPEN.

A thread answers requests that can be answered at once; a read whose bytes are missing waits as
a trio task. The kernel keeps names, attributes, listings and bytes for ever, asks for each once,
and opens files without asking, so that a second read runs at the kernel's speed.

**Refresh.** All readers change to the new tree at one moment, and none waits for it.
Delaying answers would not work: the kernel locks a directory while it looks up a name
in it or lists it, and needs the same lock to drop a name of it. So all requests are answered at
once:

1. Answers are from the old tree, and must not be cached.
2. Names that change are dropped from the kernel's memory, and attributes and listings of
   directories that do. Up to Linux 6.18 this waits for look-ups in progress in the same directory,
   whose answers may still be cacheable; later versions do not, so there is a short pause first.
3. Now nothing that changes is cached: every use of it is a request. From one answer to the next
   these are from the new tree, and may be cached again.

Listings need more care, because the kernel may cache them whatever the answer says. Their positions
carry the generation of the tree: a listing that began in an old tree goes on in that tree, and
leaves nothing in the kernel, its first page being dropped before each of its answers. Where
several processes list a directory at that moment, a slow one may still leave its listing to
the kernel; unless the time of the directory tells, it is served until it is dropped again, which
happens within seconds.

``FUSE_NOTIFY_INC_EPOCH`` (7.44) would drop all names by one message, also those that stay:
each would be looked up again, open and mapped files would be shown as deleted, and whatever is
mounted below would be unmounted. It is not used.

**Restart.** A process that is given the descriptor of a dead server continues: requests that were
not answered are sent again (Linux >= 6.9; before, they stay unanswered until their users are
killed). A refresh that was interrupted has to be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol

import trio

from wheelmount.mount.serve.adapters import FOREVER, Wait
from wheelmount.mount.serve.fuse import abi
from wheelmount.mount.serve.fuse.abi import Flag, Op
from wheelmount.mount.serve.fuse.references import References
from wheelmount.mount.serve.fuse.wire import Agreement, Pending, Session, Wire
from wheelmount.mount.serve.vfs import Change, Usage
from wheelmount.mount.snapshot.tree import Inode

log = logging.getLogger("wheelmount")

SETTLE = 0.02
"""Seconds for the kernel to process answers that it was given before a refresh."""

LISTERS = 0.1, 1.0, 5.0
"""Pauses in seconds after a refresh, after each of which listings are dropped once more."""

_READ = int(Op.READ)


class Shown(Protocol):
    """The interface of ``Vfs``. Failures are ``OSError``; calls come from several threads."""

    def inode(self, number: int) -> Inode: ...
    def lookup(self, directory: int, name: bytes) -> int | None: ...
    def entries(self, directory: int) -> list[tuple[bytes, int]]: ...
    def readlink(self, number: int) -> bytes: ...
    def usage(self) -> Usage: ...
    def read(self, number: int, offset: int, size: int) -> bytes | memoryview | None: ...


class DirectFuse:
    """Serves a mount. Inodes are numbered as in the tree; the kernel calls them one higher.

    Args:
        fd: the open ``/dev/fuse`` of the mount.
        vfs: the tree that is shown.
        wait: called for a read whose bytes are missing.
        owner: user and group of all files.
        session: the state that an earlier server of ``fd`` stored.
        on_session: called with the state to store, whenever it changes.
        on_forget: called with the number of an inode that the kernel has forgotten. Both are called
            in the thread that serves, and must not wait.
        counted_from: with ``session``, the least number that the earlier server cannot have told
            the kernel; None if unknown. See ``References``.
    """

    name = "devfuse"

    def __init__(
        self,
        fd: int,
        vfs: Shown,
        wait: Wait,
        owner: tuple[int, int],
        *,
        session: Session | None = None,
        on_session: Callable[[Session], None] = lambda _: None,
        on_forget: Callable[[int], None] = lambda _: None,
        counted_from: int | None = None,
    ) -> None:
        self.vfs = vfs
        self.agreed = Agreement(session, on_session)
        self._wire = Wire(fd)
        self._wait = wait
        self._owner = owner
        least = sys.maxsize if counted_from is None else counted_from
        self._references = References(on_forget, 0 if session is None else least)
        self._resumed = session is not None
        generation = session["generation"] + 1 if session else 1
        self._listings = Listings(vfs.entries, generation)
        self._valid = FOREVER
        # Held while a name, an attribute or a count is sent or changed; never by READ.
        self._lock = threading.Lock()
        self._handlers = {
            **dict.fromkeys(abi.WRITING, self._refuse),
            Op.INIT: self._init,
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.READLINK: self._readlink,
            Op.READDIR: self._readdir,
            Op.READDIRPLUS: self._readdirplus,
            Op.OPEN: self._open,
            Op.OPENDIR: self._opendir,
            Op.STATFS: self._statfs,
            Op.GETXATTR: self._getxattr,
            Op.LISTXATTR: self._listxattr,
            Op.LSEEK: self._lseek,
            Op.FORGET: self._forget,
            Op.BATCH_FORGET: self._batch_forget,
            Op.INTERRUPT: self._interrupt,
            Op.RELEASE: self._done,
            Op.RELEASEDIR: self._done,
            Op.DESTROY: self._done,
        }

    async def serve(self) -> None:
        """Serve until it is unmounted.

        Cancelling this leaves a thread that takes one more request: end the process then.
        """
        async with trio.open_nursery() as self._nursery:
            self._pending = Pending(self._wire, self._nursery)
            if self._resumed:
                self._wire.resend()
            await trio.to_thread.run_sync(self._loop, abandon_on_cancel=True)
            self._nursery.cancel_scope.cancel()

    def end(self) -> None:
        """Have ``serve`` return although the mount is in use; the process has to end then."""
        self._nursery.cancel_scope.cancel()

    def mounted(self) -> bool:
        """Return whether the file system is still mounted anywhere; the kernel is asked."""
        return self._wire.connected()

    def references(self, number: int) -> int:
        """Return the kernel's references to an inode; see the class."""
        return self._references.of(number)

    def knows(self, number: int) -> bool:
        """Whether the kernel holds an inode."""
        return self.references(number) > 0

    async def refresh(self, change: Change, flip: Callable[[], None]) -> None:
        """Change to a new tree at one moment for all readers, as the module describes.

        Args:
            change: names and attributes to drop; ``directories`` may include other inodes whose
                attributes change.
            flip: makes ``vfs`` show the new tree; must not wait.
        """
        with self.paused():
            await trio.sleep(SETTLE)
            await trio.to_thread.run_sync(self.invalidate, change.entries, change.directories)
            self.agreed.change(self._listings.generation + 1)
            with self._lock:
                self._listings.change(change.directories, flip)
                self._valid = FOREVER
        self._nursery.start_soon(self._drop_again, change.directories)

    async def _drop_again(self, directories: Iterable[int]) -> None:
        for pause in LISTERS:
            await trio.sleep(pause)
            await trio.to_thread.run_sync(self.invalidate, (), directories)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Answer requests during the context so that the kernel caches no answer."""
        with self._lock:
            self._valid = 0
        try:
            yield
        finally:
            self._valid = FOREVER

    def invalidate(self, entries: Iterable[tuple[int, bytes]], directories: Iterable[int]) -> None:
        """Make the kernel drop cached names and attributes.

        Waits for requests in progress, so it must not run on the threads of ``serve``.

        Args:
            entries: directory and name, of existing names and of names cached as missing.
            directories: inodes whose attributes are dropped, with the listing of a directory.
        """
        for directory, name in entries:
            self._wire.drop_entry(directory + abi.ROOT_ID, name)
        for number in directories:
            self._drop_inode(number)

    def drop(self, number: int) -> None:
        """Have the kernel forget a file's bytes, as ``Adapter`` says."""
        with contextlib.suppress(OSError):  # the kernel does not know it
            self._wire.drop_inode(number + abi.ROOT_ID, pages=True)

    def drop_names(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Have the kernel forget names, as ``Adapter`` says."""
        self.invalidate(entries, ())

    def _drop_inode(self, number: int) -> None:
        with contextlib.suppress(OSError):  # no tree has it any more
            pages = self.vfs.inode(number).is_directory
            self._wire.drop_inode(number + abi.ROOT_ID, pages=pages)

    # ---- requests and answers

    def _loop(self) -> None:
        buffer = bytearray(abi.BUFFER)
        view = memoryview(buffer)
        while self._wire.receive(buffer):
            length, opcode, unique, node, *_ = abi.IN_HEADER.unpack_from(buffer)
            number, body = node - abi.ROOT_ID, view[abi.IN_HEADER.size : length]
            try:
                if opcode == _READ:
                    self._read(unique, number, body)
                else:
                    handler = self._handlers.get(opcode, self._unknown)
                    with self._lock:
                        handler(unique, number, body)
            except OSError as error:
                self._wire.fail(unique, error)
            except Exception:
                log.exception("cannot answer request %d for inode %d", opcode, number)
                self._wire.answer(unique, error=errno.EIO)

    def _init(self, unique: int, _number: int, body: memoryview) -> None:
        self._wire.answer(unique, self.agreed.init(body, self._listings.generation))

    def _open(self, unique: int, _number: int, _body: memoryview) -> None:
        if self.agreed.offered(Flag.NO_OPEN_SUPPORT):
            raise OSError(errno.ENOSYS, "")  # answered once, it is never asked again
        self._wire.answer(unique, abi.OPEN_OUT.pack(0, abi.KEEP_CACHE))

    def _opendir(self, unique: int, _number: int, _body: memoryview) -> None:
        if self.agreed.offered(Flag.NO_OPENDIR_SUPPORT):
            raise OSError(errno.ENOSYS, "")
        self._wire.answer(unique, abi.OPEN_OUT.pack(0, abi.KEEP_CACHE | abi.CACHE_DIR))

    def _done(self, unique: int, _number: int, _body: memoryview) -> None:
        self._wire.answer(unique)

    # ---- names and attributes

    def _attributes(self, number: int, inode: Inode) -> bytes:
        return abi.attributes(number, inode, self._owner)

    def _entry(self, number: int, inode: Inode) -> bytes:
        valid = self._valid
        head = abi.ENTRY_OUT.pack(number + abi.ROOT_ID, 0, valid, valid, 0, 0)
        return head + self._attributes(number, inode)

    def _lookup(self, unique: int, number: int, body: memoryview) -> None:
        found = self.vfs.lookup(number, bytes(body[:-1]))
        if found is None:  # node 0: the kernel may cache that the name is missing
            absent = abi.ENTRY_OUT.pack(0, 0, self._valid, 0, 0, 0)
            self._wire.answer(unique, absent, bytes(abi.ATTR.size))
        elif self._wire.answer(unique, self._entry(found, self.vfs.inode(found))):
            self._references.add(found)

    def _getattr(self, unique: int, number: int, _body: memoryview) -> None:
        attributes = self._attributes(number, self.vfs.inode(number))
        self._wire.answer(unique, abi.ATTR_OUT.pack(self._valid, 0), attributes)

    def _readlink(self, unique: int, number: int, _body: memoryview) -> None:
        self._wire.answer(unique, self.vfs.readlink(number))

    def _forget(self, _unique: int, number: int, body: memoryview) -> None:
        self._references.forget(number, *abi.FORGET_IN.unpack_from(body))

    def _batch_forget(self, _unique: int, _number: int, body: memoryview) -> None:
        (count,) = abi.BATCH_FORGET_IN.unpack_from(body)
        start, size = abi.BATCH_FORGET_IN.size, abi.FORGET_ONE.size
        for node, times in abi.FORGET_ONE.iter_unpack(body[start : start + count * size]):
            self._references.forget(node - abi.ROOT_ID, times)

    # ---- listings

    def _readdir(self, unique: int, number: int, body: memoryview) -> None:
        self._list(unique, number, body, plus=False)

    def _readdirplus(self, unique: int, number: int, body: memoryview) -> None:
        self._list(unique, number, body, plus=True)

    def _list(self, unique: int, number: int, body: memoryview, *, plus: bool) -> None:
        _, position, size, *_ = abi.READ_IN.unpack_from(body)
        if self._valid and self._listings.is_current(position):
            self._answer_list(unique, number, position, size, plus=plus, keep=True)
        else:
            self._pending.start(self._list_unkept, unique, number, position, size, plus)

    async def _list_unkept(
        self, unique: int, number: int, position: int, size: int, plus: bool
    ) -> None:
        def answer() -> None:
            # Not in the thread that serves: copying from such a page may need a read first.
            self._drop_inode(number)
            with self._lock:
                self._answer_list(unique, number, position, size, plus=plus, keep=False)

        await trio.to_thread.run_sync(answer)

    def _answer_list(
        self, unique: int, number: int, position: int, size: int, *, plus: bool, keep: bool
    ) -> None:
        parts: list[bytes] = []
        told: list[int] = []
        for after, name, child in self._listings.walk(number, position, size // abi.DIRENT.size):
            ino, inode = abi.UNKNOWN_INO, None
            if child != DOT:
                ino, inode = child + abi.ROOT_ID, self._known(child)
            entry = abi.NO_ENTRY if plus else b""
            if plus and keep and inode is not None:
                entry = self._entry(child, inode)
            mode = inode.mode if inode is not None else stat.S_IFDIR if child == DOT else 0
            head = abi.DIRENT.pack(ino, after, len(name), mode >> 12)
            padding = bytes(-len(name) % 8)
            size -= len(entry) + len(head) + len(name) + len(padding)
            if size < 0:
                break
            parts += entry, head, name, padding
            if plus and keep and inode is not None:
                told.append(child)
        if self._wire.answer(unique, b"".join(parts)):
            for child in told:
                self._references.add(child)

    def _known(self, number: int) -> Inode | None:
        try:
            return self.vfs.inode(number)
        except OSError:  # an old listing that names an entry removed since
            return None

    # ---- bytes

    def _read(self, unique: int, number: int, body: memoryview) -> None:
        _, offset, size, *_ = abi.READ_IN.unpack_from(body)
        data = self.vfs.read(number, offset, size)
        if data is None:
            self._pending.start(self._read_later, unique, number, offset, size)
        else:
            self._wire.answer(unique, data)

    async def _read_later(self, unique: int, number: int, offset: int, size: int) -> None:
        self._wire.answer(unique, await self._wait(number, offset, size))

    def _interrupt(self, _unique: int, _number: int, body: memoryview) -> None:
        self._pending.end(*abi.INTERRUPT_IN.unpack_from(body))

    # ---- the rest

    def _refuse(self, unique: int, _number: int, _body: memoryview) -> None:
        self._wire.answer(unique, error=errno.EROFS)

    def _unknown(self, unique: int, _number: int, _body: memoryview) -> None:
        # The kernel takes it as "never ask again", or does the work itself. Not so for IOCTL,
        # which Python sends for every file it opens, to see whether it is a terminal.
        self._wire.answer(unique, error=errno.ENOSYS)

    def _statfs(self, unique: int, _number: int, _body: memoryview) -> None:
        usage = self.vfs.usage()
        self._wire.answer(unique, abi.statistics(usage.bytes, usage.inodes))

    def _getxattr(self, unique: int, number: int, body: memoryview) -> None:
        # Never ENOSYS: the kernel would not ask again, whatever a refresh brings.
        name, value = bytes(body[abi.GETXATTR_IN.size : -1]), None
        if name.startswith(b"user."):
            value = dict(self.vfs.inode(number).xattrs).get(name)
        if value is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        self._answer_sized(unique, body, value)

    def _listxattr(self, unique: int, number: int, body: memoryview) -> None:
        names = dict(self.vfs.inode(number).xattrs)
        self._answer_sized(unique, body, b"".join(name + b"\0" for name in names))

    def _lseek(self, unique: int, number: int, body: memoryview) -> None:
        _, offset, whence = abi.LSEEK_IN.unpack_from(body)
        found = self.vfs.inode(number).seek(offset, hole=whence == os.SEEK_HOLE)
        if found is None:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        self._wire.answer(unique, abi.LSEEK_OUT.pack(found))

    def _answer_sized(self, unique: int, body: memoryview, value: bytes) -> None:
        (size,) = abi.GETXATTR_IN.unpack_from(body)
        if size == 0:  # asks for the length
            value = abi.GETXATTR_OUT.pack(len(value))
        elif size < len(value):
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
        self._wire.answer(unique, value)


Entries = list[tuple[bytes, int]]

DOT = -1
"""In place of the inode number of ``.`` and ``..``."""

_SPAN = 1 << 32
"""A position is the generation of the listing times this, plus the index of the next entry."""

_DOTS: Entries = [(b".", DOT), (b"..", DOT)]


class Listings:
    """Lists directories, each listing as of the time when it began.

    Only the last change of a directory is kept: an older listing goes on at the same
    position of a later one.

    Args:
        entries: returns names and numbers of a directory as it is now, always in the same order.
        generation: of the current tree, counted from 1.
    """

    def __init__(self, entries: Callable[[int], Entries], generation: int) -> None:
        self._entries = entries
        self.generation = generation
        self._former: dict[int, tuple[int, Entries]] = {}

    def change(self, directories: Iterable[int], flip: Callable[[], None]) -> None:
        """Change to the next generation by ``flip``; ``directories`` have other entries in it."""
        former = {}
        for number in directories:
            with contextlib.suppress(OSError):  # there was no such directory
                former[number] = self.generation, self._entries(number)
        flip()
        self._former |= former
        self.generation += 1

    def is_current(self, position: int) -> bool:
        """Return whether a listing at ``position`` (0: the beginning) is of the current tree."""
        return position // _SPAN in (0, self.generation)

    def walk(self, number: int, position: int, limit: int) -> Iterator[tuple[int, bytes, int]]:
        """Return about ``limit`` entries of a directory at most.

        ``.`` and ``..`` come first: so no listing is empty, and the kernel can be made to drop it.

        Returns:
            For each entry the position after it, its name and its number.
        """
        generation, place = divmod(position, _SPAN)
        generation = generation or self.generation
        last, former = self._former.get(number, (0, []))
        entries = former if generation <= last else self._entries(number)
        after = generation * _SPAN + place
        for name, child in chain(_DOTS[place:], entries[max(place - 2, 0) : place + limit]):
            after += 1
            yield after, name, child
