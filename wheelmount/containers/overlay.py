"""Overlays: the directories in which what a container installs stays.

A directory and not an ext3 file: it is as fast for root, four times faster for ordinary users, and
needs no size. One container writes to an overlay at a time; a lock says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from wheelmount.config import private_directory
from wheelmount.errors import ContainerError, InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True)
class Overlay:
    """One overlay of one host.

    Args:
        state_dir: directory under which the overlays of this user are kept.
        name: what the user calls it.
        host: the host that writes to it; hosts may share ``state_dir``, never an overlay.

    Raises:
        InputError: a name that is no plain file name.
    """

    state_dir: Path
    name: str
    host: str

    def __post_init__(self) -> None:
        for what, value in (("overlay", self.name), ("host", self.host)):
            if not _NAME.fullmatch(value):
                raise InputError(
                    f"{value!r} is no name for the directory of an overlay ({what})",
                    hint="use letters, digits, dots, dashes and underscores",
                )

    @classmethod
    def all(cls, state_dir: Path) -> list[Overlay]:
        """Every overlay under ``state_dir``, by name and host."""
        folders = sorted((state_dir / "overlays").glob("*/[!.]*"))
        return [cls(state_dir, f.parent.name, f.name) for f in folders if f.is_dir()]

    @property
    def path(self) -> Path:
        """The directory itself."""
        return self.state_dir / "overlays" / self.name / self.host

    def create(self) -> Path:
        """Make the directory, for this user only, or take the one that is there.

        Raises:
            ConfigError: somebody else's directory is in the way.
        """
        private_directory(self.state_dir / "overlays")
        return private_directory(self.path)

    def remove(self) -> bool:
        """Delete the overlay with everything installed in it.

        Returns:
            Whether there was one.

        Raises:
            ContainerError: a container is using it.
        """
        if not self.path.is_dir():
            return False
        with self.lock("remove"):
            remove_tree(self.path)
            self._lock_file.unlink()
        with contextlib.suppress(OSError):  # other hosts' overlays of this name are still there
            self.path.parent.rmdir()
        return True

    @contextlib.contextmanager
    def lock(self, purpose: str) -> Iterator[int]:
        """Be the only writer while the context is open.

        Args:
            purpose: what for; others are told.

        Yields:
            The descriptor that holds the lock. A child process that inherits it keeps the overlay
            locked until it ends too, even if this process dies before.

        Raises:
            ContainerError: another writer has it, naming that one.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._acquire()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor,
                f"{purpose} (process {os.getpid()} on {socket.gethostname()})".encode(),
                0,
            )
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def _lock_file(self) -> Path:
        # No overlay's name starts with a dot.
        return self.path.with_name(f".{self.host}.lock")

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
                os.close(descriptor)
                raise ContainerError(
                    f"overlay {self.name} is in use by {holder or 'another container'}",
                    hint="wait for it to end, or use another overlay",
                ) from None
            # It may have been removed, or removed and made again, since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._lock_file.stat()):
                    return descriptor
            os.close(descriptor)


def remove_tree(tree: Path) -> None:
    """Delete ``tree``, opening the directories that their owner may not enter.

    The kernel keeps such a directory in every overlay, and packages unpack read-only ones.

    Raises:
        ContainerError: some of it belongs to somebody else.
    """
    for folder, names, _ in os.walk(tree):
        for name in names:
            inner = Path(folder, name)
            if not inner.is_symlink() and inner.stat().st_mode & 0o700 != 0o700:
                with contextlib.suppress(PermissionError):
                    inner.chmod(0o700)
    try:
        shutil.rmtree(tree)
    except PermissionError as error:
        raise ContainerError(
            f"{error.filename} cannot be removed: it belongs to another user",
            hint=f"a container's own users may own it: apptainer exec --fakeroot … rm -r {tree}",
        ) from None
