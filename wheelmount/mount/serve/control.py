"""The task of a serving process, and the messages that processes of its host send to it.

Messages are JSON, one a line, over a Unix socket in the mount's private directory. A connection
begins with one request:

``{"op": "status"}``              answered by one message; see ``Server.status``
``{"op": "reads"}``               answered by ``{"reads": parts}``; see ``Trace.end``
``{"op": "show", "generation": n}`` shows a generation; answered by ``{"ok": bool}``
``{"op": "shown"}``               answered by ``{"generation": n}``, the one that is shown, once
                                  no change is in progress
``{"op": "drop", "number": n}``   has the kernel forget a file's bytes; answered by ``{"ok": true}``
``{"op": "stop", "force": bool}`` answered by ``{"ok": bool}``; if not ok, the mount is in use
``{"op": "feed", "keep": bool}``  the connection of the agent that delivers: it sends
                                  ``{"have": block}`` and ``{"failed": block, "reason": text}``
                                  for blocks that reads wait for, and is sent
                                  ``{"want": block}``. ``keep``: go on serving when the connection
                                  closes, else unmount.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wheelmount import disk
from wheelmount.errors import MountError

TASK = "task.json"

PROCESS = "process"
"""Name of the file with the id of the mount's first process, which leads their group."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a serving process; stored in its directory as ``TASK``.

    Attributes:
        host: name of the host.
        source: the mounted directory, to be shown to users.
        mntpoint: its mount point.
        store: directory of the store.
        adapter: the final way to show the tree; one of ``adapters.NAMES`` but not ``auto``.
        read_timeout: seconds a read waits for its bytes.
        made: whether the mount point was made for this mount and is deleted with it.
        verify_rate: bytes a second at which a store on a disk is verified repeatedly; 0: never.
    """

    host: str
    source: str
    mntpoint: str
    store: str
    adapter: str
    read_timeout: float
    made: bool
    verify_rate: float = 0.0

    def write(self, directory: Path) -> None:
        """Write the task to the mount's private directory."""
        disk.write(directory / TASK, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Task:
        """Read the task from the mount's private directory; fields of later versions are ignored.

        Raises:
            FileNotFoundError: the mount is gone.
            ValueError: the file is not a task.
        """
        try:
            said = json.loads((directory / TASK).read_text())
            return cls(**{each.name: said[each.name] for each in fields(cls) if each.name in said})
        except TypeError as error:
            raise ValueError(f"it is of another version of wheelmount: {error}") from None


SOCKET = "control"
"""Name of the socket in the mount's directory."""

Message = dict[str, Any]

LONGEST = 1 << 20
"""Longest request, in bytes."""


def encode(message: Message) -> bytes:
    """Encode a message for the socket."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a message that ``encode`` made.

    Raises:
        ValueError, TypeError: the line is not a message.
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(message, dict):
        raise TypeError("no message")
    return message


def ask(directory: Path, message: Message, timeout: float) -> Message:
    """Send a request and wait for its answer.

    Args:
        directory: private directory of the mount.
        message: the request.
        timeout: seconds to wait.

    Raises:
        MountError: the serving process is gone or does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(directory / SOCKET))
            connection.sendall(encode(message))
            with connection.makefile("rb") as answers:
                line = answers.readline()
    except OSError as error:
        raise MountError(
            f"the serving process of {directory.name} does not answer: {error.strerror or error}",
            hint="run `wheelmount umount --force` on the mount",
        ) from None
    if not line.endswith(b"\n"):
        raise MountError(f"the serving process of {directory.name} ended")
    return decode(line)
