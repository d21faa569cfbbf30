"""A mount whose directories have no room left, or none to write in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Cli, SmallDisk
from tests.mount.conformance import mounted_on_two
from wheelmount.config import MEMORY, Settings
from wheelmount.errors import MountError, WheelmountError
from wheelmount.mount.client.remote import RemoteMount

pytestmark = [pytest.mark.fuse, pytest.mark.hosts]

Disks = Callable[[Path], SmallDisk]


@pytest.fixture
def runtime_disk(small_disk: Disks, workplace: Path) -> SmallDisk:
    """The file system of ``runtime_dir``."""
    return small_disk(workplace / "runtime")


@pytest.fixture(params=["bind", "devfuse"])
def mount(
    runtime_disk: SmallDisk,
    workplace: Path,
    settings: Settings,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RemoteMount]:
    """A mount of a small directory on two hosts, complete."""
    monkeypatch.setenv("WHEELMOUNT_ADAPTER", request.param)
    (workplace / "source").mkdir()
    (workplace / "source" / "file").write_text("first")
    settings = replace(settings, adapter=request.param)
    with mounted_on_two(workplace / "source", workplace, settings) as made:
        yield made


def _shown(mount: RemoteMount) -> list[str]:
    return [Path(path, "file").read_text() for path in mount.mntpoints.values()]


def _generations(mount: RemoteMount) -> set[str]:
    """Numbers of the generations in the stores."""
    store = mount._settings.private_store(mounted=mount._settings.store == MEMORY)
    stores = [store / f"{mount.identity}-{name}" for name in mount.mntpoints]
    return {file.stem for each in stores for file in each.glob("*.tree")}


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_refresh_without_room_for_notes_fails_and_hinders_no_later_one(
    mount: RemoteMount, runtime_disk: SmallDisk, workplace: Path, cli: Cli, what: str
) -> None:
    file = workplace / "source" / "file"
    file.write_text("second")
    runtime_disk.fill(what)
    with pytest.raises(WheelmountError, match="space"):
        mount.refresh()
    assert _shown(mount) == ["first", "first"]
    assert _generations(mount) == {"1"}, "what was fetched takes no room"
    runtime_disk.free()
    for text in ("third", "fourth and longer"):
        file.write_text(text)
        done = cli("refresh", workplace / "source")
        assert done.returncode == 0, done.stderr
        assert _shown(mount) == [text, text]
    file.write_text("fifth")
    assert mount.refresh()
    assert _shown(mount) == ["fifth", "fifth"]


@pytest.mark.costly
@pytest.mark.parametrize("note", ["delivery", "current"])
def test_what_is_shown_is_not_deleted_when_a_note_cannot_be_written(
    mount: RemoteMount, workplace: Path, cli: Cli, note: str
) -> None:
    file = workplace / "source" / "file"
    settings = mount._settings
    place = settings.private_runtime() / "mounts"
    if note == "current":
        place = settings.private_store(mounted=False)
    blocks = [place / f"{mount.identity}-{name}" / f"{note}.new" for name in mount.mntpoints]
    for each in blocks:
        (each / "inside").mkdir(parents=True)
    for text in ("second", "third and longer"):
        file.write_text(text)
        if note == "delivery":  # written when the new generation is shown
            assert mount.refresh()
            assert _shown(mount) == [text, text]
        else:
            with pytest.raises(MountError, match="cannot be shown"):
                mount.refresh()
            assert _shown(mount) == ["first", "first"]
            assert _generations(mount) == {"1"}
    for each in blocks:
        (each / "inside").rmdir()
        each.rmdir()
    file.write_text("fourth")
    done = cli("refresh", workplace / "source")
    assert done.returncode == 0, done.stderr
    assert _shown(mount) == ["fourth", "fourth"]
    file.write_text("fifth!")
    assert mount.refresh()
    assert _shown(mount) == ["fifth!", "fifth!"]
