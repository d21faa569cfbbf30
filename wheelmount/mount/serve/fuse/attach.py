"""Mount a FUSE file system without libfuse, and return the open ``/dev/fuse`` to serve it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path

from wheelmount import linux
from wheelmount.errors import UnavailableError
from wheelmount.mount.kernel import points, syscalls

NAME = points.FILE_SYSTEM.removeprefix("fuse.")
"""Source of the mount, and its FUSE subtype."""

MOUNT_TIMEOUT = 20.0
"""Seconds in which ``fusermount3`` must mount."""


def attach(mntpoint: str, *, allow_other: bool | None = None) -> int:
    """Mount at a directory, read-only; the mount exists as long as the result is open anywhere.

    Args:
        mntpoint: absolute path of a directory.
        allow_other: whether other users may use it; default: only for root, as ordinary
            users need ``user_allow_other`` in ``/etc/fuse.conf``.

    Returns:
        The file descriptor to serve it with, closed on exec.

    Raises:
        UnavailableError: this process may not mount there; the message says why.
    """
    root = os.geteuid() == 0
    options = "default_permissions" + (
        ",allow_other" if allow_other or (allow_other is None and root) else ""
    )
    direct = linux.may_mount() and os.access("/dev/fuse", os.R_OK | os.W_OK)
    return _mount(mntpoint, options) if direct else _fusermount(mntpoint, options)


def set_read_ahead(mntpoint: str, kibibytes: int) -> None:
    """Set how far the kernel reads ahead in files of a mount. Needs root.

    The kernel limits it to 128 KiB, whatever the server asked for. The mount is found without
    touching it, so that its own server may call this.

    Raises:
        OSError: nothing is mounted there, or this is not root.
    """
    found = points.find(mntpoint)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "nothing is mounted there", mntpoint)
    Path("/sys/class/bdi", found.device, "read_ahead_kb").write_text(str(kibibytes))


def _mount(mntpoint: str, options: str) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UnavailableError(
            f"cannot open /dev/fuse: {error.strerror}",
            hint="load the kernel module (`modprobe fuse`), or give the container the device",
        ) from None
    # Only the type of the root; its permissions are requested like all others.
    options += f",fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    try:
        syscalls.mount_fuse(mntpoint, points.FILE_SYSTEM, options)
    except OSError as error:
        os.close(fd)
        raise UnavailableError(
            f"cannot mount at {mntpoint}: {error.strerror}",
            hint="a container needs CAP_SYS_ADMIN to mount, or a user namespace of its own",
        ) from None
    return fd


def _fusermount(mntpoint: str, options: str) -> int:
    options += f",ro,nosuid,nodev,fsname={NAME},subtype={NAME}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                ["fusermount3", "-o", options, "--", mntpoint],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=MOUNT_TIMEOUT,
                check=False,
            )
        except FileNotFoundError:
            raise UnavailableError(
                "there is no fusermount3 on this host", hint="install the package fuse3"
            ) from None
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"fusermount3 did not mount {mntpoint} within {MOUNT_TIMEOUT:g} s",
                hint="run it by hand to see what it waits for",
            ) from None
        if done.returncode != 0:
            reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise UnavailableError(
                f"cannot mount at {mntpoint}: {reason}",
                hint="you need a mount point of your own, and read and write on /dev/fuse",
            )
        ours.settimeout(MOUNT_TIMEOUT)  # it has ended: all that it sent is there
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.set_inheritable(fds[0], False)
    return fds[0]
