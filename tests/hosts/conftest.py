"""What tests of hosts share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_source


@pytest.fixture(scope="module")
def shared_source() -> Iterator[Path]:
    """A directory to mount, in one that the hosts of a lab see as well."""
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        yield make_source(Path(place) / "source")


@pytest.fixture
def source(shared_source: Path) -> Path:
    """The same by the name that tests elsewhere have a directory by."""
    return shared_source
