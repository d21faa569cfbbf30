"""What an installation makes, and by which names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.conftest import make_sif
from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts import spec
from wheelmount.operations.image import Image
from wheelmount.operations.installs import _growing_tree


def test_all_links_of_an_overlay_lead_to_one_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image, other = make_sif(tmp_path / "a.sif", 1), make_sif(tmp_path / "b.sif", 2)
    (tmp_path / "sub").mkdir()

    def tree(overlay: str | None = None, **paths: Path) -> str | None:
        into = Image({host.strip("_"): path for host, path in paths.items()}, overlay=overlay)
        return _growing_tree(spec.parse("local:2"), into, "symlink", Settings())

    first = tree(_=image)
    for path in (Path("a.sif"), Path("sub/../a.sif")):
        assert tree(_=path) == tree(host0=path, host1=image) == first
    assert len({first, tree(_=other), tree(host0=image, host1=other)}) == 3
    assert tree("mine", _=image) == tree("mine", host0=image, host1=Path("a.sif"))
    assert tree("mine") == tree("mine", _=image)
    with pytest.raises(InputError, match="no image to install in"):
        tree()
