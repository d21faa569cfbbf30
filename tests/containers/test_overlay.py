"""Overlays: one writer, private, and gone when removed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import NOBODY, Cli, SmallDisk
from tests.containers.conftest import make_sif
from wheelmount.config import Settings
from wheelmount.containers import overlay as overlays
from wheelmount.containers import sif
from wheelmount.containers.container import Container
from wheelmount.containers.overlay import MIB, Kind, Overlay, default_kind, remove_tree
from wheelmount.errors import ConfigError, ContainerError, InputError, StoreError
from wheelmount.operations import overlays as operations
from wheelmount.operations.overlays import prune


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path / "state", "mine", "n1")


def test_create_list_remove(overlay: Overlay) -> None:
    assert Overlay.all(overlay.state_dir) == []
    assert overlay.create() == overlay.path
    assert overlay.create() == overlay.path
    assert overlay.path.stat().st_mode & 0o777 == 0o700
    other = Overlay(overlay.state_dir, "mine", "n2")
    other.create()
    assert Overlay.all(overlay.state_dir) == [overlay, other]
    assert overlay.remove()
    assert not overlay.remove()
    assert Overlay.all(overlay.state_dir) == [other]
    other.remove()
    assert list((overlay.state_dir / "overlays").iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a:b", "-x", "a b", "x" * 200])
def test_names_that_are_no_file_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Overlay(tmp_path, name, "n1")
    with pytest.raises(InputError):
        Overlay(tmp_path, "mine", name)


def test_somebody_elses_directory_is_not_taken(overlay: Overlay) -> None:
    overlay.create()
    overlay.path.chmod(0o777)
    with pytest.raises(ConfigError):
        overlay.create()


def test_second_writer_is_told_who_has_it(overlay: Overlay) -> None:
    overlay.create()
    with overlay.lock("pip install x"):
        writer = rf"pip install x \(process {os.getpid()}"
        with pytest.raises(ContainerError, match=writer), overlay.lock("another"):
            pass
        with pytest.raises(ContainerError, match="in use"):
            overlay.remove()
        with Overlay(overlay.state_dir, "mine", "n2").lock("the same on another host"):
            pass
    with overlay.lock("later"):
        pass


def test_lock_lives_as_long_as_the_container(overlay: Overlay) -> None:
    with overlay.lock("container") as descriptor:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    try:
        with pytest.raises(ContainerError), overlay.lock("second"):
            pass
    finally:
        child.kill()
        child.wait()
    with overlay.lock("second"):
        pass


def test_it_is_used_until_the_end_of_a_use(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay.create()
    with overlay.lock("a container") as lock:
        os.utime(lock, (1, 1))
    assert overlay.last_used() > time.time() - 3600
    settings = Settings(state_dir=str(overlay.state_dir))
    monkeypatch.setattr(Overlay, "last_used", lambda _: 1.0)  # and used after prune asked
    assert prune(settings, 3600) == ([], [])
    assert Overlay.all(overlay.state_dir) == [overlay]
    os.utime(overlay.path.with_name(".n1.lock"), (1, 1))
    assert [each["name"] for each in prune(settings, 3600)[0]] == ["mine"]


def test_a_use_whose_end_cannot_be_noted_is_no_failure(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_descriptor: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "utime", stale)
    with overlay.lock("a container"):
        pass


FIRST_USE = """
import sys
from pathlib import Path
from wheelmount.containers.overlay import LEAST, Overlay
state, kind, number = sys.argv[1:]
size = LEAST if kind == "image" else None
for turn in range(int(number)):
    sys.stdin.readline()
    Overlay(Path(state), f"mine{turn}", "n1", kind, size, Path(f"{state}/image.sif")).create()
    print("made", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", overlays.KINDS)
def test_first_users_at_the_same_moment_get_one_overlay(kind: Kind, tmp_path: Path) -> None:
    turns = 3 if kind == "image" else 30
    make_sif(tmp_path / "image.sif", 1)
    code = FIRST_USE.replace("from wheelmount.containers.overlay import", (
        "from wheelmount.containers import overlay\n"
        f"overlay.SHM = Path({str(tmp_path / 'shm')!r})\n"
        "from wheelmount.containers.overlay import"
    ))  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", code, str(tmp_path), kind, str(turns)]
    users = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    try:
        for turn in range(turns):
            for user in users:
                user.stdin.write(b"\n")
                user.stdin.flush()
            assert [user.stdout.readline() for user in users] == [b"made\n"] * 3
            overlay = Overlay(tmp_path, f"mine{turn}", "n1")
            assert overlay.layer.exists()
            assert overlay.path.with_name(".n1.base").exists()
    finally:
        for user in users:
            user.communicate()


def test_lock_after_removal_is_a_new_one(overlay: Overlay) -> None:
    for _ in range(2):
        overlay.create()
        with overlay.lock("write"):
            pass
        assert overlay.remove()


def test_directories_their_owner_may_not_enter_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "work" / "work").mkdir(parents=True)
    (tree / "work" / "work" / "file").touch()
    (tree / "link").symlink_to(tmp_path / "nowhere")
    (tree / "work" / "work").chmod(0)
    remove_tree(tree)
    assert not tree.exists()


def test_one_that_is_deleted_in_part_is_not_used_again(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tree: Path) -> None:
        (tree / "upper" / "first").unlink()
        raise KeyboardInterrupt

    overlay.create()
    for name in ("first", "second"):
        (overlay.path / "upper").mkdir(exist_ok=True)
        (overlay.path / "upper" / name).touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(overlays, "remove_tree", interrupted)
        overlay.remove()
    assert Overlay.all(overlay.state_dir) == []
    assert Overlay.half_removed(overlay.state_dir) == [overlay]
    assert not list(overlay.create().iterdir())
    overlay.clear()
    assert Overlay.half_removed(overlay.state_dir) == []
    assert overlay.remove()
    assert list((overlay.state_dir / "overlays").iterdir()) == []


def test_one_that_cannot_be_deleted_does_not_keep_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tree: Path) -> None:
        if tree.name.startswith(".n1"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(tree))
        shutil.rmtree(tree)

    monkeypatch.setattr(overlays, "remove_tree", fails)
    state = Path(settings.state_dir)
    for host in ("n1", "n2"):
        Overlay(state, "mine", host).create()
    gone, failed = operations.remove(settings, ["mine"], None)
    assert [each["host"] for each in gone] == ["n2"]
    assert "overlay mine of n1 cannot be deleted" in failed[0].message
    assert "n1" in operations.prune(settings, 0.0)[1][0].message


@pytest.mark.skipif(os.getuid() != 0, reason="acts as another user")
def test_why_one_is_not_deleted_is_said(cli: Cli, workplace: Path) -> None:
    state = workplace / "state"
    for name in ("good", "shared"):
        (Overlay(state, name, "n1").create() / "upper").mkdir()
    foreign = state / "overlays" / "shared" / "n1" / "upper" / "foreign"
    foreign.mkdir(mode=0o744)  # its files may be listed, and not looked at
    (foreign / "file").touch()
    own = [workplace / "runtime", state, *state.rglob("*")]
    for path in own:
        if foreign not in (path, path.parent):
            os.chown(path, NOBODY, NOBODY)
    for command in (("prune", "--unused", "0"), ("prune",), ("rm", "shared")):
        done = cli("overlay", *command, user=NOBODY)
        assert done.returncode == ContainerError.exit_code
        assert "file cannot be removed: it belongs to another user" in done.stderr
        assert ("good n1 removed" in done.stdout) == ("--unused" in command)
        assert Overlay.all(state) == []
    os.chown(next(state.rglob("foreign")), NOBODY, NOBODY)
    assert cli("overlay", "prune", user=NOBODY).returncode == 0
    assert not list((state / "overlays").iterdir())


def test_sizes_and_kinds_that_cannot_be(overlay: Overlay, fake_apptainer: Path) -> None:
    for arguments in ((None, 1), ("directory", 100 * MIB), ("memory", 100 * MIB)):
        with pytest.raises(InputError, match="cannot be made"):
            Overlay(overlay.state_dir, "x", "n1", *arguments)
    overlay.create()
    (overlay.path / "upper").mkdir()
    for wanted in ("image", "memory"):
        with pytest.raises(InputError, match="of another kind: directory") as error:
            Overlay(overlay.state_dir, "mine", "n1", wanted).create()
        assert "overlay rm mine" in str(error.value.hint)


def test_a_directory_only_where_one_can_be_an_overlay(tmp_path: Path) -> None:
    assert default_kind(tmp_path) == "directory"
    (tmp_path / "over").mkdir()
    script = (
        "import sys; from pathlib import Path\n"
        "from wheelmount.containers.overlay import default_kind\n"
        "print(default_kind(Path(sys.argv[1])))"
    )
    for kind, options in (
        ("ramfs", ""),  # knows no extended attributes
        ("overlay", "-o lowerdir=/usr,upperdir=/run/u,workdir=/run/w"),
    ):
        mount = f"mkdir -p /run/u /run/w; mount -t {kind} {options} {kind} {tmp_path}/over"
        shell = f"mount -t tmpfs t /run; {mount}; {sys.executable} -c '{script}' {tmp_path}/over"
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", shell],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "image\n", done.stderr


@pytest.mark.containers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", overlays.KINDS)
def test_what_is_written_stays_in_each_kind(
    kind: Kind, sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "memory":
        monkeypatch.setattr(overlays, "SHM", tmp_path / "shm")
    size = 64 * MIB if kind == "image" else None
    overlay = Overlay(tmp_path / "state", "mine", "n1", kind, size)
    with Container(sif, tmp_path / "work", overlay) as container:
        assert container.run(["sh", "-c", "echo kept > /usr/kept"]) == 0
    assert overlay.found == kind
    again = Overlay(tmp_path / "state", "mine", "n1")
    with Container(sif, tmp_path / "work", again) as container:
        assert container.run(["grep", "-q", "kept", "/usr/kept"]) == 0
    assert again.used() < 32 * MIB, "it takes what is used, not its size"
    if kind == "image":
        with pytest.raises(InputError, match="another size: 64 MiB"):
            Overlay(tmp_path / "state", "mine", "n1", None, 100 * MIB).create()
    assert again.user() == ""
    with again.lock("a writer"):
        assert "a writer" in again.user()
    assert again.remove()
    assert not list((tmp_path / "state" / "overlays").iterdir())
    assert not (tmp_path / "shm").exists() or not list((tmp_path / "shm").iterdir())


def test_memory_is_not_shared_with_an_overlay_of_another_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlays, "SHM", tmp_path / "shm")
    one, two = (Overlay(tmp_path / state, "mine", "n1", "memory") for state in ("one", "two"))
    layers = [each.create() for each in (one, two)]
    for number, layer in enumerate(layers):
        (layer / "kept").write_text(f"{number}")
    assert one.remove()
    assert (layers[1] / "kept").read_text() == "1"
    assert not list(one.create().iterdir())
    shutil.rmtree(tmp_path / "one")  # with what is in memory left behind
    assert not list(one.create().iterdir())
    assert one.remove()
    assert two.remove()


@pytest.mark.containers
@pytest.mark.timeout(600)
def test_nothing_is_lost_when_it_is_full(sif: Path, tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "state", "mine", "n1", None, 64 * MIB)
    with (
        Container(sif, tmp_path / "work", overlay) as container,
        (tmp_path / "said").open("w+") as said,
    ):
        fill = "echo kept > /usr/kept && head -c 100M /dev/zero > /usr/large"
        assert container.run(["sh", "-c", fill], stderr=said) != 0
        said.seek(0)
        assert "No space left on device" in said.read()
        assert container.run(["sh", "-c", "grep -q kept /usr/kept && rm /usr/large"]) == 0
        assert container.run(["sh", "-c", "head -c 10M /dev/zero > /usr/small"]) == 0


def test_an_overlay_goes_with_one_image(tmp_path: Path) -> None:
    first, second = make_sif(tmp_path / "a.sif", 1), make_sif(tmp_path / "b.sif", 2)
    state = tmp_path / "state"
    own = Overlay(state, "mine", "n1", base=first)
    own.create()
    moved = first.rename(tmp_path / "moved.sif")
    Overlay(state, "mine", "n1", base=moved).create()
    with pytest.raises(InputError, match=f"goes with another image: {first}") as error:
        Overlay(state, "mine", "n1", base=second).create()
    assert "wheelmount overlay rm mine" in str(error.value.hint)
    Overlay(state, "mine", "n2", base=second).create()
    Overlay(state, "mine", "n1").create()
    assert own.remove()
    Overlay(state, "mine", "n1", base=second).create()


def test_a_removal_that_is_killed_leaves_the_name_to_others(tmp_path: Path) -> None:
    first, second = make_sif(tmp_path / "a.sif", 1), make_sif(tmp_path / "b.sif", 2)
    own = Overlay(tmp_path / "state", "mine", "n1", base=first)
    own.create()
    own.path.rename(own.path.with_name(".n1.removed-01234567"))  # the first step of a removal
    own.clear()
    Overlay(tmp_path / "state", "mine", "n1", base=second).create()


def test_reproducible_images_have_overlays_of_their_own(tmp_path: Path) -> None:
    one, other, large = (make_sif(tmp_path / f"{n}.sif", 0) for n in ("one", "other", "large"))
    with other.open("ab") as file:
        file.write(b"another")
    with large.open("ab") as file:
        file.truncate(5 * MIB)
        file.seek(0, os.SEEK_END)
        file.write(b"its end")
    middle = Path(shutil.copy(large, tmp_path / "middle.sif"))
    with middle.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"another" * (MIB // 10))
    made = {sif.identity(each) for each in (one, other, large, middle)}
    assert len(made) == 4
    assert None not in made
    copied = Path(shutil.copy(one, tmp_path / "copied.sif"))
    state = tmp_path / "state"
    Overlay(state, "mine", "n1", base=one).create()
    Overlay(state, "mine", "n1", base=copied).create()
    with pytest.raises(InputError, match="goes with another image"):
        Overlay(state, "mine", "n1", base=other).create()
    (state / "overlays" / "mine" / ".n1.base").write_text(f"{sif.NONE} {one}")  # an old version's
    Overlay(state, "mine", "n1", base=one).create()
    with pytest.raises(InputError, match="goes with another image"):
        Overlay(state, "mine", "n1", base=other).create()


def test_each_image_has_a_name_of_its_own(tmp_path: Path) -> None:
    first, second = make_sif(tmp_path / "my image:1.sif", 1), make_sif(tmp_path / "b.sif", 2)
    names = {overlays.name_for(each) for each in (first, second, Path("/nowhere/x.sif"))}
    assert names == {"my-image-1-01010101", "b-02020202", "x"}
    for name in names:
        Overlay(tmp_path, name, "n1")


def test_an_overlay_that_has_no_room_is_not_left_half_made(
    small_disk: Callable[[Path], SmallDisk], workplace: Path
) -> None:
    disk = small_disk(workplace / "state")
    settings = Settings(state_dir=str(disk.path), runtime_dir=str(workplace / "runtime"))
    disk.fill("inodes")
    fillers = iter(sorted((disk.path / "filling").iterdir()))
    overlay = Overlay(Path(settings.state_dir), "own", "host0", kind="memory")
    for _ in range(4):  # enough for some of its directories, but not for all
        with pytest.raises(StoreError, match=r"no (inodes|space) left") as error:
            overlay.create()
        assert "WHEELMOUNT_STATE_DIR" in str(error.value.hint)
        assert Overlay.all(disk.path) == []
        next(fillers).unlink()
    disk.free()
    overlay.create()
    assert Overlay.all(disk.path) == [Overlay(disk.path, "own", "host0")]
    overlay.remove()
