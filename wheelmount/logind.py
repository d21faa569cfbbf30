"""Find out whether systemd-logind deletes a user's files in ``/dev/shm`` at the last logout.

Its ``RemoveIPC``, see logind.conf(5): on in upstream's builds, off in those of some distributions,
never in force for root, system users, and users with lingering enabled.
"""

from __future__ import annotations

import contextlib
import pwd
import re
from pathlib import Path

_PLACES = "usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd"
"""Directories with logind's settings; a later one overrides earlier ones."""

_LAST_SYSTEM_USER = 999
"""``SYS_UID_MAX`` where login.defs(5) does not say."""


def clears_memory(user: int, root: Path = Path("/")) -> bool:
    """Return whether a user's files in ``/dev/shm`` are deleted at the last logout.

    Args:
        user: id of the user.
        root: root directory of the system to inspect.
    """
    if user <= _last_system_user(root) or not (root / "run/systemd/system").is_dir():
        return False
    with contextlib.suppress(KeyError):
        if (root / "var/lib/systemd/linger" / pwd.getpwuid(user).pw_name).exists():
            return False
    set_to, built_in = None, "yes"
    for file in _files(root):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in file.read_text().splitlines():
                if match := re.match(r"(#?)RemoveIPC\s*=\s*(\S+)\s*$", line):
                    if match[1]:  # a comment states the built-in default
                        built_in = match[2]
                    else:
                        set_to = match[2]
    return (set_to or built_in).lower() in ("yes", "true", "on", "1")


def _files(root: Path) -> list[Path]:
    mains = [root / place / "logind.conf" for place in _PLACES]
    parts = {
        part.name: part
        for place in _PLACES
        for part in sorted((root / place / "logind.conf.d").glob("*.conf"))
    }
    return [*mains, *(parts[name] for name in sorted(parts))]


def _last_system_user(root: Path) -> int:
    try:
        text = (root / "etc/login.defs").read_text()
    except (OSError, UnicodeDecodeError):
        return _LAST_SYSTEM_USER
    match = re.search(r"^SYS_UID_MAX\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else _LAST_SYSTEM_USER


def memory_place(user: int, root: Path = Path("/")) -> Path:
    """Return a directory in memory that all users may use, if possible one kept at a logout."""
    shared, temporary = root / "dev/shm", root / "tmp"
    if clears_memory(user, root) and _in_memory(temporary, root):
        return temporary
    return shared


def _in_memory(place: Path, root: Path) -> bool:
    mounted = f" {Path('/') / place.relative_to(root)} tmpfs "
    return mounted in (root / "proc/self/mounts").read_text(errors="surrogateescape")
