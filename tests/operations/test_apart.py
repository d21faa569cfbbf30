"""Work on hosts in processes of its own."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from wheelmount.errors import HostError, InputError
from wheelmount.operations import apart

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
