"""Work on hosts in processes of its own."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from wheelmount.errors import HostError, InputError
from wheelmount.operations import apart
from wheelmount.progress import Progress

PROGRAM = """
from functools import partial
from operator import add
from wheelmount.operations import apart
print(apart.alone(partial(add, 1, 2)), flush=True)
"""


def test_a_program_is_not_run_again_by_the_process_that_it_starts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], text=True, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_errors_come_back() -> None:
    with pytest.raises(InputError) as raised:
        apart.alone(partial(_fail, InputError("wrong", hint="another")))
    assert (raised.value.message, raised.value.hint) == ("wrong", "another")
    with pytest.raises(ZeroDivisionError):
        apart.alone(partial(operator.truediv, 1, 0))
    with pytest.raises(HostError, match="was killed"):
        apart.alone(partial(os._exit, 1))


def _fail(error: Exception) -> None:
    raise error


LONG = """
import signal, sys
from functools import partial
from tests.operations.test_apart import wait, interrupt
from wheelmount.operations import apart
from wheelmount.progress import SILENT
signal.signal(signal.SIGTERM, interrupt)
apart.each([partial(wait, sys.argv[1], name) for name in "ab"], SILENT, "wait")
"""


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def wait(place: str, name: str, _progress: Progress) -> None:
    """Wait, and clean up: the last one for longer than the first one works."""
    (Path(place) / name).touch()
    try:
        time.sleep(4 if name == "a" else 60)
        (Path(place) / "done").touch()
    finally:
        time.sleep(0.5 if name == "a" else 6)
        (Path(place) / name).unlink()


def test_a_signal_to_the_command_alone_interrupts_its_processes(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LONG, tmp_path], stderr=subprocess.PIPE)
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert not list(tmp_path.iterdir()), "one did not clean up, or went on"
