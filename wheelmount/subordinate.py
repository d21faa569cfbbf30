"""Further ids that an administrator has given a user, for namespaces: subuid(5), subgid(5)."""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

COUNT = 65536
"""Number of ids in a range that a container needs."""

USERS, GROUPS = Path("/etc/subuid"), Path("/etc/subgid")


@dataclass(frozen=True, slots=True)
class Ids:
    """Ranges of ids of this user.

    Attributes:
        user: first user id.
        group: first group id.
        count: number of user ids, and of group ids.
    """

    user: int
    group: int
    count: int = COUNT

    def mapped(self) -> bool:
        """Return whether this process's namespace maps each id to itself, and does not map root."""
        both = (("uid", self.user), ("gid", self.group))
        return all([str(first)] * 2 + [str(self.count)] in _map(kind) for kind, first in both)


def ids() -> Ids | None:
    """Return this user's ranges; None if there are none, or fewer ids than a container needs."""
    user, group = (_first(file) for file in (USERS, GROUPS))
    return None if user is None or group is None else Ids(user, group)


def _map(kind: str) -> list[list[str]]:
    text = Path(f"/proc/self/{kind}_map").read_text(encoding="ascii")
    return [line.split() for line in text.splitlines()]


def _first(file: Path) -> int | None:
    names = {str(os.geteuid())}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, *numbers = line.split(":")
        if name in names and len(numbers) == 2 and all(map(str.isdecimal, numbers)):
            first, count = map(int, numbers)
            if count >= COUNT:
                return first
    return None
