"""Messages between a mount's serving process and the others on its host: JSON, one a line.

They go over a Unix socket in the mount's private directory. A connection begins with one request:

``{"op": "status"}``              answered by one message; see ``Server.status``
``{"op": "show", "generation": n}`` has a generation shown; answered by ``{"ok": bool}``
``{"op": "drop", "number": n}``   has the kernel forget a file's bytes; answered by ``{"ok": true}``
``{"op": "stop", "force": bool}`` answered by ``{"ok": bool}``; if not ok, the mount is in use
``{"op": "feed", "keep": bool}``  the connection of who delivers: it says ``{"have": block}`` and
                                  ``{"failed": block, "reason": text}`` for blocks that reads wait
                                  for, and is told ``{"want": block}``. ``keep``: go on serving
                                  when it closes, else unmount.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from wheelmount.errors import MountError

SOCKET = "control"
"""Name of the socket in the mount's directory."""

Message = dict[str, Any]

LONGEST = 1 << 20
"""Bytes of a request, at most."""


def encode(message: Message) -> bytes:
    """A message as it goes over the wire."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Inverse of ``encode``.

    Raises:
        ValueError, TypeError: it is no message.
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
        directory: of the mount.
        message: the request.
        timeout: seconds.

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
    if not line:
        raise MountError(f"the serving process of {directory.name} ended")
    return decode(line)
