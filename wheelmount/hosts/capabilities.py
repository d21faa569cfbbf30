"""Capabilities of what runs in a host's own user namespace.

The host's processes have all of that namespace's capabilities, because they mount there. They have
them as ambient capabilities, which every program that they start would inherit: see
capabilities(7).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterator

from wheelmount import linux, subordinate

_PR_CAP_AMBIENT, _RAISE, _LOWER = 47, 2, 3  # linux/prctl.h
_SETGID, _SETUID = 6, 7  # linux/capability.h

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    """Take away, from programs that this thread starts in the context, what they need not have.

    In a host's own user namespace they keep what ``newuidmap`` needs there, if the namespace has
    the user's subordinate ids: root's setuid bit gives it nothing where root is not mapped. With
    that, a program may become its user and those ids, as ``newuidmap`` lets it do anyway.
    Elsewhere, nothing changes.
    """
    if linux.maps_root():
        yield
        return
    ids = subordinate.ids()
    kept = {_SETGID, _SETUID} if ids is not None and ids.mapped() else set()
    taken = linux.capabilities("CapAmb") - kept
    _set(_LOWER, taken)
    try:
        yield
    finally:
        _set(_RAISE, taken)


def _set(how: int, numbers: Collection[int]) -> None:
    for number in numbers:
        if _libc.prctl(_PR_CAP_AMBIENT, how, number, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"capability {number} cannot be changed")
