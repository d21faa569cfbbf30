"""A stand-in for a target's interpreter, so that uv can resolve without that interpreter.

uv learns implementation and ABI by running an interpreter; its options only set version and
platform. The stand-in is the running Python with another answer to uv's question. It is a program,
run by path.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from wheelmount.wheels.target import Target

_MARKERS = ("implementation_name", "implementation_version", "platform_python_implementation")


@contextlib.contextmanager
def interpreter(target: Target) -> Iterator[str]:
    """Yield the path of an interpreter of the target's implementation and ABI, or a stand-in."""
    here = sys.implementation.name, "t" in getattr(sys, "abiflags", "")
    if here == (target.implementation, target.free_threaded):
        yield sys.executable  # uv's options say the rest
        return
    environment = target.environment()
    facts = {
        "gil_disabled": target.free_threaded,
        "markers": {name: environment[name] for name in _MARKERS},  # type: ignore[literal-required]
    }
    command = [sys.executable, "-I", __file__, json.dumps(facts)]
    with tempfile.TemporaryDirectory(prefix="wheelmount-standin-") as place:
        program = Path(place) / "python"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        program.chmod(0o700)
        yield str(program)


def main(facts: str, arguments: Sequence[str]) -> int:
    """Run Python with these arguments, and replace the facts in its JSON output."""
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=False)
    said = done.stdout
    with contextlib.suppress(ValueError):
        told: Any = json.loads(said)
        if isinstance(told, dict) and "markers" in told:
            changed = json.loads(facts)
            told["markers"].update(changed.pop("markers"))
            said = json.dumps({**told, **changed}).encode()
    sys.stdout.buffer.write(said)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
