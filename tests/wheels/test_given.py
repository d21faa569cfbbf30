"""Files of requirements from standard input and URLs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import CHECKOUT
from wheelmount.wheels.given import file_of, is_fetched, recorded

from .support import Index

OTHER = """
import sys
from pathlib import Path
from wheelmount.wheels.given import file_of, recorded
file = file_of(sys.argv[1], Path("given").absolute())
assert file.read_text() == "a\\n"
print(recorded(file))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["url", "standard input"])
def test_a_process_that_ends_leaves_the_file_of_another(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (index.directory / "r.txt").write_text("a\n")
    text = f"{index.address}/files/r.txt" if how == "url" else "-"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a\n")))
    file = file_of(text, tmp_path / "given")
    assert is_fetched(file) == (how == "url")
    done = subprocess.run(
        [sys.executable, "-c", OTHER, text],
        input="a\n", capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert file.read_text() == "a\n"
    assert done.stdout == f"{recorded(file)}\n"
    left = [path for path in (tmp_path / "given").iterdir() if path not in file.parents]
    assert left == []
