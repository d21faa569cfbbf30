"""The attacks, as one of the tests; by itself `python -m tests.attacks` prints the table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.attacks.__main__ import CHECKOUT


@pytest.mark.costly
@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, and acts as other users")
def test_no_attack_gets_through() -> None:
    command = [sys.executable, "-m", "tests.attacks"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("withstood") > 10
