"""Sockets that other users of a machine cannot come in by.

Monarch listens at abstract Unix sockets of its own choice, in every client and every worker. They
have no permissions, all users see their names in ``/proc/net/unix``, and whoever connects may run
programs there. Monarch has no setting for that, so its native library is given another
``accept4``: one that asks the kernel who is calling (``SO_PEERCRED``, unix(7)) and hangs up on
everybody but this user and root.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import mmap
import os
import socket
import struct
from pathlib import Path

log = logging.getLogger("wheelmount")

_Accept = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, use_errno=True
)
_libc = ctypes.CDLL(None, use_errno=True)
_accept4 = _Accept(("accept4", _libc))
_mprotect = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, use_errno=True
)(("mprotect", _libc))


@functools.cache
def close() -> bool:
    """Have Monarch's library accept only this user and root. Once, before Monarch starts.

    Returns:
        Whether it does; else a warning was logged.
    """
    import monarch._rust_bindings as library

    try:
        slot = _slot(Path(str(library.__file__)), b"accept4")
        before = ctypes.c_void_p.from_address(slot).value
        _write(slot, ctypes.cast(_replacement, ctypes.c_void_p).value)
    except (OSError, ValueError, struct.error) as error:
        log.warning(
            "security: other users of this machine can connect to Monarch's sockets here: %s", error
        )
        return False
    atexit.register(_write, slot, before)  # Python is not there to be called any more
    return True


def _accept_own(listening: int, address: int | None, length: int | None, flags: int) -> int:
    while True:
        accepted = int(_accept4(listening, address, length, flags))
        if accepted < 0:
            return accepted
        try:
            if _own(accepted):
                return accepted
        except Exception:  # whatever it is: native code would take it for a connection
            log.exception("security: refused a connection")
        os.close(accepted)  # as if it had never been: on to the next who waits


_replacement = _Accept(_accept_own)
"""Kept for ever: native code has its address."""


def _own(connection: int) -> bool:
    peer = socket.socket(fileno=connection)
    try:
        return own(peer)
    finally:
        peer.detach()


def own(peer: socket.socket) -> bool:
    """Whether who is connected may come in: this user or root, if it is by a Unix socket."""
    if peer.family != socket.AF_UNIX:
        return True  # of a network, where certificates are asked for
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


def _slot(library: Path, name: bytes) -> int:
    """Address of the pointer by which a loaded library calls a function of another one.

    Formats: elf(5), of 64 bits and little-endian.

    Raises:
        OSError, ValueError, struct.error: it has none, or is of another format.
    """
    base = _base(library)  # before it is mapped here once more
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{library} is not of a known format")
        (start,) = struct.unpack_from("<Q", image, 0x28)
        (count,) = struct.unpack_from("<H", image, 0x3C)
        sections = list(struct.iter_unpack("<IIQQQQIIQQ", image[start : start + 64 * count]))

        def content(section: tuple[int, ...]) -> bytes:
            return image[section[4] : section[4] + section[5]]

        symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
        names = content(sections[symbols[6]])
        wanted = name + b"\0"
        number = next(
            number
            for number, (offset, *_) in enumerate(struct.iter_unpack("<IBBHQQ", content(symbols)))
            if names[offset : offset + len(wanted)] == wanted
        )
        for section in sections:
            if section[1] != 4:  # SHT_RELA
                continue
            for offset, info, addend in struct.iter_unpack("<QQq", content(section)):
                if info >> 32 == number and addend == 0:
                    return base + int(offset)
    raise ValueError(f"{library} does not call {name.decode()}")


def _base(library: Path) -> int:
    """Where a library is loaded."""
    for line in _maps():
        span, _, offset, *_ = line.split()
        if line.endswith(f" {library}") and int(offset, 16) == 0:
            return int(span.partition("-")[0], 16)
    raise ValueError(f"{library} is not loaded")


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


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
