"""Reject other users' connections to the sockets of Monarch's native library.

Monarch listens at abstract Unix sockets of its own choice, in every client and every worker. They
have no permissions, all users see their names in ``/proc/net/unix``, and a process that connects
may run programs there. When the owner of a name ends, another user can take the name, and then
receives messages that were meant for the owner. Monarch has no setting for either, so this module
replaces the ``accept4`` and ``connect`` that its native library calls: the replacements ask the
kernel which user is at the other end (``SO_PEERCRED``, unix(7)) and close connections of all but
this user and root.

Monarch has no setting for its log either, ``/tmp/USER/monarch_log.log``, which it opens even if it
is another user's link to any file, or another user's FIFO, which blocks for ever. So ``open64`` and
``mkdir`` are replaced while the library is loaded, and the log is discarded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import importlib
import importlib.util
import logging
import mmap
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from wheelmount.hosts import deferred, doorway
from wheelmount.hosts.address import SECURE
from wheelmount.hosts.doorway import Doorway

log = logging.getLogger("wheelmount")

LIBRARY = "monarch._rust_bindings"
"""Name of the native library as a module."""

LOG = re.compile(rb"/tmp/[^/]+/monarch_log[^/]*")
"""Where it writes its log."""

LOG_PLACE = re.compile(rb"/tmp/[^/]+/?")
"""Directory of that, which it makes."""

TRIES = 10
"""Attempts to get a free descriptor before Monarch receives the error that there are none."""

SWEEP_INTERVAL = 0.1
"""Seconds between these attempts; callers that are silent for as long are disconnected then."""

CERTIFICATE = "HYPERACTOR_TLS_CERT"
"""Variable of Monarch that has the certificate of a process, after which others are asked."""

NOWHERE = os.devnull.encode()


def _type(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments, use_errno=True)


_number, _pointer, _text = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
_TYPES = {
    "accept4": _type(_number, _pointer, _pointer, _number),
    "connect": _type(_number, _pointer, ctypes.c_uint32),
    "open64": _type(_text, _number, ctypes.c_uint32),
    "mkdir": _type(_text, ctypes.c_uint32),
    "mprotect": _type(_pointer, ctypes.c_size_t, _number),
}
_libc = ctypes.CDLL(None, use_errno=True)
_accept4, _connect, _open64, _mkdir, _mprotect = (
    kind((name, _libc)) for name, kind in _TYPES.items()
)


@functools.cache
def load() -> None:
    """Import Monarch's library, with its log going nowhere; before anything else imports it.

    Does nothing where it is imported already, as in a program of the user's own. A warning is
    logged where the log goes where Monarch wants it.
    """
    if LIBRARY in sys.modules:
        return
    deferred.defer()
    with contextlib.ExitStack() as stack:
        try:
            library = _find()
            ctypes.CDLL(str(library))  # in memory, and nothing of it has run
            stack.enter_context(_replaced(library, _QUIET))
        except (OSError, ValueError, struct.error) as error:
            log.warning("security: Monarch writes its log where others can put links: %s", error)
        importlib.import_module(LIBRARY)


def _find() -> Path:
    """Where the library is, without importing any of Monarch: its package imports the library.

    Raises:
        ValueError: it is not there.
    """
    package = importlib.util.find_spec(LIBRARY.partition(".")[0])
    places = package and package.submodule_search_locations
    spec = PathFinder.find_spec(LIBRARY, places) if places else None
    if spec is None or spec.origin is None:
        raise ValueError("it is not installed")
    return Path(spec.origin)


@functools.cache
def close() -> bool:
    """Have Monarch's library talk to this user and root only. Once, before Monarch starts.

    Returns:
        Whether it does; else a warning was logged.
    """
    load()
    given_back = contextlib.ExitStack()
    try:
        library = Path(str(importlib.import_module(LIBRARY).__file__))
        given_back.enter_context(_replaced(library, _CLOSED))
    except (OSError, ValueError, struct.error) as error:
        log.warning(
            "security: other users of this machine can connect to Monarch's sockets here: %s", error
        )
        return False
    atexit.register(given_back.close)  # native code must not call an interpreter that has ended
    return True


def _accept_own(listening: int, address: int | None, length: int | None, flags: int) -> int:
    tries = TRIES
    while True:
        accepted = int(_accept4(listening, address, length, flags))
        if accepted < 0:
            tries -= 1
            if not tries or not _wait_for_descriptors(ctypes.get_errno()):
                return accepted
            continue
        if _trusted(accepted):
            _watch(accepted)
            return accepted
        os.close(accepted)  # hide it from Monarch, and accept the next one


def _wait_for_descriptors(number: int) -> bool:
    """Pause if descriptors ran out, as Monarch retries at once; return whether they did."""
    if number not in (errno.EMFILE, errno.ENFILE):
        return False
    with contextlib.suppress(Exception):  # native code calls this, and cannot take an exception
        if (door := _doorway()) is not None:
            door.sweep(SWEEP_INTERVAL, urgent=True)
        time.sleep(SWEEP_INTERVAL)
    ctypes.set_errno(number)
    return True


def _watch(accepted: int) -> None:
    """Limit the time in which a caller from the network must show a certificate."""
    networks = socket.AF_INET, socket.AF_INET6
    try:
        with doorway.borrowed(accepted) as peer:
            if peer.family in networks and (door := _doorway()) is not None:
                door.take(peer)
    except Exception:  # the connection is closed already, or no thread can be started
        log.debug("a caller is not watched", exc_info=True)


@functools.cache
def _doorway() -> Doorway | None:
    """Of this process; None where it asks for no certificates."""
    from wheelmount.hosts import runtime  # which has this module closed first

    address, certificate = runtime.address(), runtime.identity().get(CERTIFICATE)
    if address is None or address.scheme != SECURE or certificate is None:
        return None
    return Doorway(doorway.answer(certificate))


def _connect_own(caller: int, address: int | None, length: int) -> int:
    connected = int(_connect(caller, address, length))
    if connected == 0 and not _trusted(caller):
        with contextlib.suppress(OSError), doorway.borrowed(caller) as peer:
            peer.shutdown(socket.SHUT_RDWR)
        ctypes.set_errno(errno.ECONNREFUSED)  # as without a listener
        return -1
    return connected


def _open_nowhere(path: bytes, flags: int, mode: int) -> int:
    return int(_open64(NOWHERE if LOG.fullmatch(path) else path, flags, mode))


def _mkdir_nowhere(path: bytes, mode: int) -> int:
    return 0 if LOG_PLACE.fullmatch(path) else int(_mkdir(path, mode))


def _callbacks(**functions: Callable[..., int]) -> dict[str, Any]:
    return {name: _TYPES[name](function) for name, function in functions.items()}


_CLOSED = _callbacks(accept4=_accept_own, connect=_connect_own)
_QUIET = _callbacks(open64=_open_nowhere, mkdir=_mkdir_nowhere)
"""Kept for ever: native code has their addresses."""


def _trusted(connection: int) -> bool:
    """Return whether the peer is permitted; never raises, as native code calls it."""
    try:
        with doorway.borrowed(connection) as peer:
            return own(peer)
    except Exception:
        log.exception("security: refused a connection")
        return False


def own(peer: socket.socket) -> bool:
    """Return whether the peer of a Unix socket is this user or root."""
    if peer.family != socket.AF_UNIX:
        return True  # of a network, where certificates are asked for: see ``doorway``
    size = struct.calcsize("iII")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("iII", credentials)
    if user in (0, os.getuid()):
        return True
    _tell(user, pid)
    return False


@functools.cache
def _tell(user: int, pid: int) -> None:  # once, as many try again and again
    log.warning("security: refused process %d of user %d", pid, user)


@contextlib.contextmanager
def _replaced(library: Path, functions: Mapping[str, Any]) -> Iterator[None]:
    """Have a loaded library call other functions than the system's, by name, meanwhile."""
    before = {}
    slots = _slots(library)
    for name, function in functions.items():
        for slot in slots[name]:
            before[slot] = ctypes.c_void_p.from_address(slot).value
            _write(slot, ctypes.cast(function, ctypes.c_void_p).value)
    try:
        yield
    finally:
        for slot, value in before.items():
            _write(slot, value)


@functools.cache
def _slots(library: Path) -> dict[str, list[int]]:
    """Addresses of the pointers by which a loaded library calls the functions that are replaced.

    Formats: elf(5), of 64 bits and little-endian.

    Raises:
        OSError, ValueError, struct.error: it lacks one, or is of another format.
    """
    base = _base(library)  # before it is mapped here once more
    names = {name.encode(): name for name in (*_CLOSED, *_QUIET)}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{library} is not of a known format")
        (start,) = struct.unpack_from("<Q", image, 0x28)
        (count,) = struct.unpack_from("<H", image, 0x3C)
        sections = list(struct.iter_unpack("<IIQQQQIIQQ", image[start : start + 64 * count]))

        def content(section: tuple[int, ...]) -> bytes:
            return image[section[4] : section[4] + section[5]]

        symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
        text = content(sections[symbols[6]])
        wanted = {}
        for number, (offset, *_) in enumerate(struct.iter_unpack("<IBBHQQ", content(symbols))):
            name = names.get(text[offset : text.index(b"\0", offset)])
            if name is not None:
                wanted[number] = name
        dynamic = next(section for section in sections if section[1] == 6)  # SHT_DYNAMIC
        tags = dict(struct.iter_unpack("<qQ", content(dynamic)))
        found: dict[str, list[int]] = {name: [] for name in names.values()}
        for section in sections:
            if section[1] != 4:  # SHT_RELA
                continue
            records = content(section)
            if section[3] == tags.get(7):  # DT_RELA
                # Of 300,000, all but some hundred are of no symbol; linkers put these first.
                records = records[24 * tags.get(0x6FFFFFF9, 0) :]  # DT_RELACOUNT
            for offset, info, addend in struct.iter_unpack("<QQq", records):
                if info >> 32 in wanted and addend == 0:
                    found[wanted[info >> 32]].append(base + int(offset))
    for name, places in found.items():
        if not places:
            raise ValueError(f"{library} does not call {name}")
    return found


def _base(library: Path) -> int:
    """Where a library is loaded."""
    for line in _maps():
        span, _, offset, *_ = line.split()
        if line.endswith(f" {library}") and int(offset, 16) == 0:
            return int(span.partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def _maps() -> list[str]:
    # Not by ``splitlines``: paths may contain any character but a newline, which is escaped.
    return os.fsdecode(Path("/proc/self/maps").read_bytes()).removesuffix("\n").split("\n")


def _write(slot: int, value: int | None) -> None:
    page = slot - slot % mmap.PAGESIZE
    sealed = not _writable(page)  # as linkers leave it once it is filled in
    if sealed:
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.c_void_p.from_address(slot).value = value
    if sealed:
        _protect(page, mmap.PROT_READ)


def _writable(page: int) -> bool:
    for line in _maps():
        span, rights, *_ = line.split()
        start, _, end = span.partition("-")
        if int(start, 16) <= page < int(end, 16):
            return "w" in rights
    raise ValueError("the slot is in no memory")


def _protect(page: int, protection: int) -> None:
    if _mprotect(page, mmap.PAGESIZE, protection):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
