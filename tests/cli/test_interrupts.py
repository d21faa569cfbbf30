"""^C at moments when nothing catches it by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wheelmount.cli.main import INTERRUPTED

AT_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "module",
    ["click", "rich.console", "wheelmount.errors", "wheelmount.cli.settings", "platformdirs.unix"],
)
def test_while_modules_are_imported(workplace: Path, module: str) -> None:
    place = workplace / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(AT_IMPORT)
    done = subprocess.run(
        [sys.executable, "-m", "wheelmount.cli.main", "config"],
        env={**os.environ, "PYTHONPATH": str(place), "AT": module},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr
