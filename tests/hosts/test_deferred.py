"""What Monarch imports and does not use costs nothing, and is there all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import wheelmount.hosts.actor
import monarch.actor
unused = {"tabulate", "wcwidth", "unittest", "monarch._src.actor.debugger.debug_session"}
assert not unused & set(sys.modules), unused & set(sys.modules)

from monarch._src.rdma.rdma import none_throws
assert none_throws(1) == 1
import pyre_extensions.safe_json
from pyre_extensions import none_throws as itself
assert none_throws is not itself
assert "unittest" in sys.modules

from monarch._src.actor.debugger.debug_controller import DebugController
assert DebugController.__module__ == "monarch._src.actor.debugger.debug_controller"
assert "tabulate" in sys.modules
assert type(sys.modules[DebugController.__module__]).__name__ == "module"
"""


@pytest.mark.slow
def test_modules_are_imported_when_they_are_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.hosts
def test_the_debugger_can_be_called() -> None:
    code = (
        "import os, wheelmount.hosts.actor, monarch.actor\n"
        "print(type(monarch.actor.debug_controller()).__name__, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ActorMesh\n"), done.stderr
