"""Find out which Python an image has."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from wheelmount.containers.container import Container
from wheelmount.errors import ContainerError

TIMEOUT = 60.0
"""Seconds that an image may take to answer."""

_QUESTION = """
import json, os, platform, sys
pypy = "pypy" if sys.implementation.name == "pypy" else ""
free = "t" if "t" in getattr(sys, "abiflags", "") else ""
print(json.dumps({
    "version": "%s%d.%d%s" % (pypy, *sys.version_info[:2], free),
    "full": "%d.%d.%d" % sys.version_info[:3],
    "machine": platform.machine(),
    "executable": getattr(sys, "_base_executable", "") or sys.executable,
    "libc": os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None,
}))
"""


@dataclass(frozen=True, slots=True)
class Python:
    """The Python of an image.

    Attributes:
        version: ``3.11``; ``3.14t`` of a free-threaded build, ``pypy3.11``.
        platform: ``manylinux_2_36_x86_64``.
        executable: path of the interpreter.
        full: its version with the patch level, ``3.11.9``.
    """

    version: str
    platform: str
    executable: str = ""
    full: str = ""


def python(image: Path) -> Python:
    """Ask an image for its Python.

    Raises:
        SourceError: the image is missing.
        ContainerError: the image does not start, or has no Python 3 on a glibc.
    """
    with tempfile.TemporaryDirectory(prefix="wheelmount-probe-") as directory:
        answer = Path(directory) / "answer"
        with (
            answer.open("wb") as stdout,
            Container(image, Path(directory) / "container") as container,
        ):
            code = container.run(["python3", "-c", _QUESTION], stdout=stdout, timeout=TIMEOUT)
        try:
            found = json.loads(answer.read_text()) if code == 0 else {}
            libc, _, version = (found.get("libc") or "").partition(" ")
        except ValueError:
            found, libc, version = {}, "", ""
    if libc != "glibc":
        raise ContainerError(
            f"{image} has no Python 3 that wheels can be chosen for",
            hint="say for which Python: --python-version 3.11 --platform manylinux_2_36_x86_64",
        )
    platform = f"manylinux_{version.replace('.', '_')}_{found['machine']}"
    return Python(found["version"], platform, found["executable"], found["full"])
