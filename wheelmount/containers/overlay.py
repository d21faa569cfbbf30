"""Overlays: keep packages and files that containers install or write.

Three kinds. A directory is as fast as an ext3 image for root and four times faster for ordinary
users, and needs no size. An image is one file of a given size, for file systems on which a
directory cannot be an overlay (NFS, or another overlay) or where many small files are unwelcome.
An overlay in memory is gone when the machine restarts. A lock admits one container at a time to an
overlay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from wheelmount import disk
from wheelmount.config import check_place, private_directory
from wheelmount.containers import apptainer, sif
from wheelmount.errors import ContainerError, InputError, OverlayInUseError
from wheelmount.lock import flock
from wheelmount.owned import make_folders, unlock_folders

Kind = Literal["directory", "image", "memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MIB = 1 << 20
LEAST = 64 * MIB
"""Size in bytes of the smallest image that apptainer makes."""

DEFAULT_SIZE = 16 << 30
"""Default size of an image in bytes. It is sparse: unused parts take no room."""

LINGER = 0.5
"""Seconds that a container's lock may outlive it: helpers of apptainer, and a process that another
thread is just starting, have it open as well."""

CREATE_TIMEOUT = 60.0
"""Seconds in which another process must have made an overlay that is to be used."""

SHM = Path("/dev/shm")  # noqa: S108 - a private directory is made in it

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_IMAGE = "overlay.img"
_MEMORY = "memory"

_REMOVED = ".removed-"
"""In the names of directories that are no overlays any more, and are being deleted."""


@dataclasses.dataclass(frozen=True)
class Overlay:
    """One overlay of one host.

    Args:
        state_dir: directory under which the overlays of this user are kept.
        name: the user's name of the overlay.
        host: the host that writes to it; hosts may share ``state_dir``, never an overlay.
        kind: how it is made; None for an existing one's kind, or the best for ``state_dir``.
        size: bytes of an image.
        base: path of the container's image that it goes with; None for whatever it went with.

    Raises:
        InputError: a name that is no plain file name, a size that cannot be.
    """

    state_dir: Path
    name: str
    host: str
    kind: Kind | None = None
    size: int | None = None
    base: Path | None = None

    def __post_init__(self) -> None:
        for what, value in (("overlay", self.name), ("host", self.host)):
            check_name(f"the directory of an overlay ({what})", value)
        if self.size is not None and (self.size < LEAST or self.kind in ("directory", "memory")):
            raise InputError(
                f"an overlay of {self.size / MIB:.0f} MiB cannot be made",
                hint=f"only an image has a size, of {LEAST // MIB} MiB or more",
            )

    @classmethod
    def all(cls, state_dir: Path) -> list[Overlay]:
        """Every overlay under ``state_dir``, by name and host."""
        folders = sorted((state_dir / "overlays").glob("*/[!.]*"))
        return [cls(state_dir, f.parent.name, f.name) for f in folders if f.is_dir()]

    @classmethod
    def half_removed(cls, state_dir: Path) -> list[Overlay]:
        """Overlays under ``state_dir`` of which a removal that failed has left a part."""
        folders = sorted((state_dir / "overlays").glob(f"*/.*{_REMOVED}*"))
        hosts = ((f.parent.name, f.name[1:].rpartition(_REMOVED)[0]) for f in folders)
        return [cls(state_dir, name, host) for name, host in dict.fromkeys(hosts)]

    @property
    def path(self) -> Path:
        """The overlay's private directory."""
        return self.state_dir / "overlays" / self.name / self.host

    @property
    def found(self) -> Kind | None:
        """Kind of the overlay; None if it does not exist yet."""
        if (self.path / _IMAGE).exists():
            return "image"
        if (self.path / _MEMORY).is_symlink():
            return "memory"
        return "directory" if (self.path / "upper").is_dir() else None

    @property
    def layer(self) -> Path:
        """Path of the overlay for apptainer: a directory, or an image."""
        kind = self.found
        if kind == "image":
            return self.path / _IMAGE
        return (self.path / _MEMORY).readlink() if kind == "memory" else self.path

    def create(self) -> Path:
        """Make the overlay, for this user only, unless it exists.

        Returns:
            The path of the overlay for apptainer.

        Raises:
            ConfigError: another user's directory has this name.
            ContainerError: an image cannot be made.
            InputError: it exists with another kind or size, or for another image.
            UnavailableError: apptainer is missing.
        """
        with disk.explained(self.state_dir):
            deadline = time.monotonic() + CREATE_TIMEOUT
            while self.found is None:
                try:
                    with self.lock("create"):
                        if self.found is None:
                            self._create()
                    break
                except OverlayInUseError:  # another process makes it, or is its first user
                    if time.monotonic() > deadline:
                        raise
            private_directory(self.path)
            self._compare_base()
            self.check()
            self._restore()
            return self.layer

    def _create(self) -> None:
        made = [each for each in (self.path, self._base_file) if not each.exists()]
        try:
            private_directory(self.path)
            self._compare_base()
            if (self._wanted or default_kind(self.path)) == "image":
                self._make_image()
            elif self._wanted == "memory":
                # Not by its name alone: another state directory may have an overlay of that name,
                # or have had one that is still in memory.
                name = f"{self.name}={self.host}={secrets.token_hex(8)}"
                target = SHM / f"wheelmount-{os.getuid()}-overlays" / name
                (self.path / _MEMORY).symlink_to(target)
                self._restore()
        except BaseException:
            self._discard(made)  # an empty one would count as made
            raise

    def _restore(self) -> None:
        """Make the directory in memory, which is deleted when the machine restarts."""
        if self.found == "memory":
            private_directory(self.layer.parent)
            private_directory(self.layer)

    def _discard(self, made: Sequence[Path]) -> None:
        memory = self.layer if self.found == "memory" else None
        folders = [memory] if memory is not None else []
        files = [self.path / _MEMORY]
        files += [each for each in made if each != self.path]
        if self.path in made:
            folders.append(self.path)
            files.append(self._lock_file)
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
        for folder in (*folders, self.path.parent):
            with contextlib.suppress(OSError):  # not made, or others are in it
                folder.rmdir()

    @property
    def _wanted(self) -> Kind | None:
        return self.kind or ("image" if self.size is not None else None)

    def check(self) -> None:
        """Check that the overlay is of the kind and size that are given, if it exists.

        Raises:
            InputError: it is not.
        """
        found = self.found
        size = self.layer.stat().st_size if found == "image" else None
        if found is not None and self._wanted not in (None, found):
            what = f"is of another kind: {found}"
        elif found is not None and self.size is not None and size != _whole(self.size):
            what = f"has another size: {(size or 0) // MIB} MiB"
        else:
            return
        raise InputError(
            f"overlay {self.name} of {self.host} {what}",
            hint=f"use another name, or first: wheelmount overlay rm {self.name}",
        )

    def _compare_base(self) -> None:
        """Check that the overlay was made for this image, whose changes it keeps."""
        identity = None if self.base is None else sif.identity(self.base)
        if identity is None:
            return
        known, path = self._known_base()
        if known in ("", sif.NONE):  # or an old version took all reproducible builds for one
            disk.write(self._base_file, f"{identity} {self.base}")
            return
        if known != identity:
            raise InputError(
                f"overlay {self.name} of {self.host} goes with another image: {path}",
                hint="leave --overlay out for one of this image's own, or use another name, or "
                f"first: wheelmount overlay rm {self.name}",
            )

    def _known_base(self) -> tuple[str, str]:
        """Return the id and the path of its image."""
        try:
            known, _, path = self._base_file.read_text(errors="surrogateescape").partition(" ")
        except FileNotFoundError:  # it is new, or an old version did not record the image
            return "", ""
        return known, path

    @property
    def image_id(self) -> str:
        """The id of the image that it goes with, see ``sif.identity``; empty if it is unknown."""
        return self._known_base()[0]

    @property
    def _base_file(self) -> Path:
        return self.path.with_name(f".{self.host}.base")

    def _make_image(self) -> None:
        fresh = self.path / f".{_IMAGE}"
        fresh.unlink(missing_ok=True)  # left by a killed process
        try:
            apptainer.make_overlay(fresh, _whole(self.size or DEFAULT_SIZE) // MIB)
            fresh.replace(self.path / _IMAGE)
        finally:
            fresh.unlink(missing_ok=True)

    def used(self) -> int:
        """Return the bytes that the overlay takes on the disk or in memory, as far as is known.

        Files that are being deleted, or that this user may not see, do not count.
        """
        layer = self.layer
        files = (Path(place, name) for place, *names in os.walk(layer) for name in chain(*names))
        total = 0
        for file in chain([layer], files):
            with contextlib.suppress(OSError):
                total += file.lstat().st_blocks * 512
        return total

    def last_used(self) -> float:
        """Return the time of its last use, or else of its creation, in seconds since 1970."""
        file = self._lock_file if self._lock_file.exists() else self.path
        return file.stat().st_mtime

    def user(self) -> str:
        """Return the process that writes to the overlay now; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not flock(descriptor, fcntl.LOCK_SH):
                    return _holder(descriptor)
            finally:
                os.close(descriptor)
        return ""

    def remove(self, unused: float = 0.0) -> bool:
        """Delete the overlay with everything installed in it.

        Args:
            unused: seconds that must have passed since a container last used it.

        Returns:
            Whether there was one, or a part of one whose removal had failed.

        Raises:
            OverlayInUseError: a container is using it, or has just used it.
            ContainerError: a part of it cannot be deleted, as another user's. No container will use
                the rest.
        """
        if not (self.path.is_dir() or self._removed()):
            return False
        with self._removing(unused):
            if self.path.is_dir():
                # In one step, because it must not be used once a part of it is deleted.
                mark = f"{_REMOVED}{secrets.token_hex(4)}"
                self.path.rename(self.path.with_name(f".{self.host}{mark}"))
        return True

    def clear(self) -> None:
        """Delete what a removal that failed, or was killed, has left.

        Raises:
            OverlayInUseError: a container is using a new overlay of this name.
            ContainerError: a part of it cannot be deleted.
        """
        with self._removing():
            pass

    @contextlib.contextmanager
    def _removing(self, unused: float = 0.0) -> Iterator[None]:
        """Lock the overlay during the context, and delete what is removed in it.

        Raises:
            OverlayInUseError: a container is using it, or has just used it.
            ContainerError: a part of it cannot be deleted.
        """
        try:
            with self.lock("remove", unused):
                yield
                if not self.path.is_dir():  # also what a removal that was killed has left
                    self._base_file.unlink(missing_ok=True)
                for left in self._removed():
                    link = left / _MEMORY
                    memory = link.readlink() if link.is_symlink() else None
                    if memory is not None and memory.is_dir():
                        remove_tree(memory)
                        with contextlib.suppress(OSError):  # other overlays are still there
                            memory.parent.rmdir()
                    remove_tree(left)
                if not self.path.is_dir():
                    self._lock_file.unlink()
        except OSError as error:
            raise ContainerError(
                f"overlay {self.name} of {self.host} cannot be deleted: {error}"
            ) from error
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _removed(self) -> list[Path]:
        return list(self.path.parent.glob(f".{glob.escape(self.host)}{_REMOVED}*"))

    @contextlib.contextmanager
    def lock(self, purpose: str, unused: float = 0.0) -> Iterator[int]:
        """Lock the overlay during the context, as its only writer.

        The times of the lock's file are those of the overlay's last use: a process that keeps the
        lock longer than the context has to set them when it ends.

        Args:
            purpose: shown to other commands that wait for it.
            unused: seconds that must have passed since a process last held the lock.

        Yields:
            The descriptor that holds the lock. A child process that inherits it keeps the overlay
            locked until it ends too, even if this process dies before.

        In a file system without locks, nothing keeps two containers from one overlay.

        Raises:
            OverlayInUseError: another writer, named in the message, holds the lock, or has had it.
            ConfigError: other users may replace the directory of overlays.
        """
        check_place(self.state_dir / "overlays", "state_dir")
        private_directory(self.state_dir / "overlays")
        descriptor = self._acquire()
        try:
            state = os.fstat(descriptor)
            # An empty one is new.
            if state.st_size and time.time() - state.st_mtime < unused:
                raise OverlayInUseError(
                    f"overlay {self.name} has just been used by {_holder(descriptor)}",
                    hint="leave it until it is unused for some time",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor,
                f"{purpose} (process {os.getpid()} on {socket.gethostname()})".encode(
                    errors="replace"
                ),
                0,
            )
            try:
                yield descriptor
            finally:
                # Used until now; if its file system fails, the result of the use counts.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        finally:
            os.close(descriptor)

    @property
    def _lock_file(self) -> Path:
        # No overlay's name starts with a dot.
        return self.path.with_name(f".{self.host}.lock")

    def _acquire(self) -> int:
        deadline = time.monotonic() + LINGER
        while True:
            try:
                make_folders(self.path.parent)
                descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last overlay of this name has just been removed
                if time.monotonic() < deadline:
                    continue
                raise
            if not flock(descriptor, fcntl.LOCK_EX):
                holder = _holder(descriptor)
                os.close(descriptor)
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                raise OverlayInUseError(
                    f"overlay {self.name} is in use by {holder}",
                    hint="wait for it to end, or use another overlay",
                )
            # The lock file may have been removed, or removed and made again, since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._lock_file.stat()):
                    return descriptor
            os.close(descriptor)


def name_for(image: Path) -> str:
    """Return the name of the overlay that an image uses if none is named."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", image.stem).lstrip("._-")[:60] or "image"
    identity = sif.identity(image)
    return plain if identity is None else f"{plain}-{identity[:8]}"


def check_name(what: str, name: str) -> None:
    """Refuse names that are not plain file names.

    Raises:
        InputError: ``name`` is none.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name for {what}",
            hint="use letters, digits, dots, dashes and underscores",
        )


def default_kind(directory: Path) -> Kind:
    """Return the fastest persistent kind of overlay that works in a directory.

    A directory needs extended attributes there, ``trusted.*`` for root, whose overlays the kernel
    makes, and ``user.*`` for others, and must not lie in an overlay itself (Linux:
    ``Documentation/filesystems/overlayfs.rst``).
    """
    import psutil  # only here: every container would wait for it to be imported

    mounts = psutil.disk_partitions(all=True)
    real = directory.resolve()
    above = [m for m in mounts if real.is_relative_to(m.mountpoint)]
    if above and max(above, key=lambda m: len(m.mountpoint)).fstype == "overlay":
        return "image"
    name = f"{'trusted' if os.geteuid() == 0 else 'user'}.wheelmount"
    try:
        os.setxattr(directory, name, b"")
        os.removexattr(directory, name)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return "image"
        if error.errno != errno.ENODATA:  # another process has just asked the same
            raise
    return "directory"


def _whole(size: int) -> int:
    """Return a size in whole MiB, the unit of apptainer's option."""
    return size // MIB * MIB


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace") or "another container"


def remove_tree(tree: Path) -> None:
    """Delete a directory tree, with directories that their owner may not enter.

    The kernel keeps such a directory in every overlay, and packages unpack read-only ones.

    Raises:
        ContainerError: a part of it belongs to another user.
    """
    unlock_folders(tree)
    try:
        shutil.rmtree(tree)
    except PermissionError as error:
        raise ContainerError(
            f"{error.filename} cannot be removed: it belongs to another user",
            hint=f"a container's own users may own it: apptainer exec --fakeroot … rm -r {tree}",
        ) from None
