"""The program: ``python -I TREE/install PLAN copy|symlink``, and ``… PLAN uv CACHE``.

The second fills a cache for uv, and prints shell commands that make uv use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import sys
import sysconfig
import time

from .installation import Installation, Refusal, tree_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

MODES = ("copy", "symlink", "uv")

LOCK_TIMEOUT = 300.0
"""Seconds to wait for another run in the same environment."""


def main(arguments: Sequence[str]) -> int:
    """Install; return the exit code: 65 if the environment does not fit, 74 for disk errors."""
    file, mode, *cache = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with open(file, encoding="utf-8") as stream:
            plan = json.load(stream)
        check_python(plan)
        if mode not in MODES or (mode == "uv") != bool(cache):
            raise Refusal(f"invalid mode {mode!r}", f"give one of {', '.join(MODES)} CACHE")
        file = os.path.abspath(file)
        root = tree_of(file)
        if mode == "uv":
            from . import uvcache  # loads slowly, and is seldom needed

            flat = os.path.join(root, "wheels", os.path.splitext(os.path.basename(file))[0])
            for name, value in uvcache.fill(plan["wheels"], root, flat, cache[0]).items():
                print(f"export {name}={shlex.quote(value)}")
        else:
            with _alone():
                Installation(plan["wheels"], file, mode).run()
    except Refusal as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 65
    except OSError as error:
        print(f"error: {error.filename or file}: {error.strerror or error}", file=sys.stderr)
        print("hint: free some space, or make the directory writable", file=sys.stderr)
        return 74
    return 0


def check_python(plan: dict[str, Any]) -> None:
    """Check that the wheels are for this Python and machine.

    Raises:
        Refusal: they are for another Python or machine.
    """
    free = "t" if "t" in getattr(sys, "abiflags", "") else ""
    here = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}{free}"
    if plan["python"] not in (here, ""):
        raise Refusal(
            f"{sys.executable} is {here}, and the wheels are for {plan['python']}",
            "name it with --python-version, or use another environment",
        )
    machine = os.uname().machine
    if plan["machine"] not in (machine, ""):
        raise Refusal(
            f"this host is {machine}, and the wheels are for {plan['machine']}",
            "name it with --platform",
        )
    libc = os.confstr("CS_GNU_LIBC_VERSION") if plan["glibc"] else None
    found = re.fullmatch(r"glibc 2\.(\d+)", libc or "")
    if plan["glibc"] and (found is None or int(found[1]) < plan["glibc"]):
        raise Refusal(
            f"the wheels need glibc 2.{plan['glibc']}, and this host has {libc or 'none'}",
            f"name its platform: --platform manylinux_2_28_{machine}",
        )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Lock the environment against other installations."""
    library = sysconfig.get_path("purelib")
    os.makedirs(library, exist_ok=True)
    descriptor = os.open(library, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Refusal(
                        f"another installation has held {library} for {LOCK_TIMEOUT:.0f} s",
                        "end it, or use another environment",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
