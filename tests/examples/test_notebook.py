"""``examples/notebook.ipynb``, run as a notebook is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import CHECKOUT

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

NOTEBOOK = CHECKOUT / "examples" / "notebook.ipynb"


def _printed(notebook: Any) -> list[str]:
    """What each cell that has a program printed to standard output."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(each.text for each in cell.outputs if each.get("name") == "stdout")
        for cell in cells
    ]


@pytest.mark.costly
def test_the_notebook_prints_what_it_shows(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(workplace / "jupyter"))
    monkeypatch.setenv("TMPDIR", str(workplace / "work"))
    shown = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=240).execute()
    assert _printed(notebook) == _printed(shown)
