"""What commands leave is brought back, and what a host sends instead does no harm."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wheelmount.errors import InputError, SourceError, TransferError, WheelmountError
from wheelmount.hosts import collection
from wheelmount.hosts.collection import LONGEST, OUTPUT, Collection, Inbox

pytestmark = pytest.mark.timeout(120)


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, 0o6777
    return member


def _archive(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for member in members:
            data = b"data" if member.isreg() and not member.size else b""
            member.size = member.size or len(data)
            archive.addfile(member, io.BytesIO(data or bytes(member.size)))
    return file.getvalue()


def _take(place: Path, data: bytes, code: int | None = 0) -> WheelmountError | None:
    place.mkdir(exist_ok=True)
    inbox = Inbox(place)
    try:
        inbox("host0", "stdout", data)
    except TransferError:
        code = None
    return inbox.close(code)


@pytest.mark.parametrize(
    "members",
    [
        [_member("/absolute")],
        [_member("../above")],
        [_member("inside/../../above")],
        [_member("link", tarfile.SYMTYPE, "/etc")],
        [_member("link", tarfile.SYMTYPE, "..")],
        [_member("link", tarfile.LNKTYPE, "../other")],
        [_member("link", tarfile.LNKTYPE, "/etc/passwd")],
        [_member("link", tarfile.LNKTYPE, "not-there")],
        [_member("device", tarfile.CHRTYPE)],
        [_member("device", tarfile.BLKTYPE)],
        [_member("pipe", tarfile.FIFOTYPE)],
        [_member("here", tarfile.SYMTYPE, "."), _member("out", tarfile.SYMTYPE, "here/..")],
        [_member("link", tarfile.SYMTYPE, ".."), _member("link/above")],
        [_member(".", tarfile.SYMTYPE, "deep")],
        [_member(".")],
        [_member("n/" * 2100)],
        [_member("link", tarfile.SYMTYPE, "n/" * 2100)],
        [_member("link", tarfile.SYMTYPE, "."), _member("link/file")],
    ],
    ids=lambda members: " ".join(each.name[:20] for each in members),
)
def test_nothing_leads_out(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "other").write_text("before")
    place = tmp_path / "host0"
    lacking = _take(place, _archive(_member("first"), *members, _member("deep/last")))
    assert isinstance(lacking, TransferError)
    assert "not all that was sent is taken: " in lacking.message
    assert (place / "first").read_text() == (place / "deep" / "last").read_text() == "data"
    assert (place / "first").stat().st_mode & 0o7022 == 0
    assert {path.name for path in tmp_path.iterdir()} == {"host0", "other"}
    assert (tmp_path / "other").read_text() == "before"
    for path in place.rglob("*"):
        assert place in path.resolve().parents or path.resolve() == place
        assert path.is_file() or path.is_dir()


def test_a_link_that_python_cannot_resolve_leads_nowhere(tmp_path: Path) -> None:
    """Older Pythons take it for one that stays inside (CVE-2025-4517)."""
    (tmp_path / "other").write_text("before")
    place = tmp_path / "host0"
    steps = "abcdefghijklmnopqrstuvwxyz"
    folder = "d" * ((LONGEST - 100 - len(str(place))) // len(steps) - 1)
    members = [_member("first")]
    deep = ""
    for step in steps:
        members += [_member(deep + folder, tarfile.DIRTYPE)]
        members += [_member(deep + step, tarfile.SYMTYPE, folder)]
        deep += f"{folder}/"
    assert len(str(place)) + len(deep) < LONGEST < len(str(place)) + len(deep) + 254
    long = f"{'/'.join(steps)}/{'l' * 254}"
    members += [_member(long, tarfile.SYMTYPE, "../" * len(steps))]
    members += [_member("out", tarfile.SYMTYPE, f"{long}/..")]
    members += [_member(f"out/{name}", tarfile.SYMTYPE, "host0/first") for name in ("other", "new")]
    assert isinstance(_take(place, _archive(*members)), TransferError)
    assert {path.name for path in tmp_path.iterdir()} == {"host0", "other"}
    assert not (tmp_path / "other").is_symlink()
    assert (tmp_path / "other").read_text() == "before"
    assert (place / "first").read_text() == "data"


def test_a_hard_link_to_an_earlier_link_does_not_lead_out(tmp_path: Path) -> None:
    place = tmp_path / "host0"
    assert _take(place, _archive(_member("a/b/link", tarfile.SYMTYPE, "../../other"))) is None
    link = _member("link", tarfile.LNKTYPE, "a/b/link")
    assert isinstance(_take(place, _archive(link)), TransferError)
    assert not (place / "link").is_symlink()


def test_what_is_refused_removes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "own").symlink_to("/etc/hostname")
    members = [
        _member("out/own", tarfile.SYMTYPE, "/absolute"),
        _member("out", tarfile.SYMTYPE, "here/.."),
        _member("here", tarfile.SYMTYPE, "."),
    ]
    assert isinstance(_take(tmp_path / "host0", _archive(*members)), TransferError)
    assert (tmp_path / "own").is_symlink()
    assert not (tmp_path / "host0" / "out").is_symlink()


PARTS = st.sampled_from(["a", "b", "c", "..", "."])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
MEMBERS = st.lists(
    st.builds(_member, PATHS, KINDS, PATHS | PATHS.map("/{}".format)), min_size=1, max_size=8
)


@given(archives=st.lists(MEMBERS, min_size=1, max_size=2))
def test_no_sequence_of_members_leads_out(archives: list[list[tarfile.TarInfo]]) -> None:
    with tempfile.TemporaryDirectory() as made:
        around = Path(os.path.realpath(made))
        for name in ("a", "b"):
            (around / name).mkdir()
            (around / name / "c").write_text("before")
        (around / "c").symlink_to("/etc/hostname")
        before = _described(around)
        place = around / "host0"
        for members in archives:
            _take(place, _archive(*members))
            assert _described(around) == before
        for path in place.rglob("*"):
            real = Path(os.path.realpath(path))
            assert real == place or place in real.parents


def _described(directory: Path) -> dict[str, tuple[int, ...]]:
    """All that is in a directory, without what comes from the host."""
    paths = [path for path in directory.rglob("*") if "host0" not in path.parts]
    return {
        str(path): (found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns)
        for path in paths
        if (found := path.lstat())
    }


def _header(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    member = _member("header", kind)
    member.size = len(data) if size is None else size
    return member.tobuf(tarfile.GNU_FORMAT) + data.ljust(-(-len(data) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive" * 1000,
        _archive(_member("first"))[:600],
        _header(b"x", b"", size=8 << 30) + bytes(1 << 20),
        _header(b"L", b"", size=8 << 30) + bytes(1 << 20),
        _header(b"S", b"", size=512),
        _header(b"g", b"11 path=aa\n"),
        5000 * _header(b"x", b"11 path=aa\n"),
    ],
    ids=["empty", "other", "cut", "pax", "name", "sparse", "global", "nested"],
)
def test_what_is_no_archive_is_said(tmp_path: Path, data: bytes) -> None:
    lacking = _take(tmp_path / "host0", data)
    assert isinstance(lacking, TransferError)
    assert "no archive" in lacking.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["header", "link"])
def test_an_archive_takes_no_memory(tmp_path: Path, kind: str) -> None:
    """Each of these would be more that is kept."""
    text = b"v" * (60 << 10)
    records = b"%d comment=%s\n" % (len(text) + 15, text)
    place = tmp_path / "host0"
    place.mkdir()
    inbox = Inbox(place)
    link = _member("link", tarfile.SYMTYPE, "n" * (1 if kind == "header" else 4000))
    before = _resident()
    with contextlib.suppress(TransferError):
        for number in range(20_000 if kind == "link" else 2_000):
            link.name = f"link{number}"
            given = _header(b"x", records) if kind == "header" else b""
            inbox("host0", "stdout", given + link.tobuf(tarfile.GNU_FORMAT))
        inbox("host0", "stdout", bytes(1024))
    lacking = inbox.close(0)
    assert (lacking is None) == (kind == "header")
    assert _resident() - before < (64 << 20 if kind == "header" else 160 << 20)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_pipe_in_the_place_of_a_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "host0").mkdir()
    os.mkfifo(tmp_path / "host0" / "first")
    assert _take(tmp_path / "host0", _archive(_member("first"))) is None
    assert (tmp_path / "host0" / "first").read_text() == "data"


@pytest.mark.slow
def test_what_cannot_be_written_ends_it(tmp_path: Path) -> None:
    script = """if True:
        import pathlib, resource, sys
        from tests.hosts.test_collection import _archive, _member, _take
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        large = _member("large")
        large.size = 32 << 20
        print(repr(_take(pathlib.Path(sys.argv[1]), _archive(large))))
    """
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "host0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "cannot be written: File too large" in done.stdout, done.stderr
    assert done.stdout.startswith("SourceError")


def _send(path: str, start: Path, output: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "wheelmount.hosts.collection", path, start, output],
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_all_kinds_of_files_come(source: Path, tmp_path: Path) -> None:
    sent = _send(source.name, source.parent, tmp_path)
    assert (sent.returncode, sent.stderr) == (0, b"")
    assert _take(tmp_path / "all", sent.stdout) is None
    subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "all"], check=True)
    module, hardlink = (tmp_path / "all" / name for name in ("package/sub/module.py", "hardlink"))
    assert module.samefile(hardlink)
    assert (tmp_path / "all" / "page").stat().st_mtime == (source / "page").stat().st_mtime
    # A second time, over what is there.
    assert _take(tmp_path / "all", sent.stdout) is None
    subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "all"], check=True)
    # One file; what is no file; nothing.
    sent = _send(str(source / "page"), tmp_path, tmp_path)
    assert sent.returncode == 0
    assert _take(tmp_path / "one", sent.stdout) is None
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["page"]
    os.mkfifo(source / "package" / "pipe")
    sent = _send(str(source / "package"), tmp_path, tmp_path)
    lacking = _take(tmp_path / "package", sent.stdout, sent.returncode) if sent.returncode else None
    assert b"left out: pipe (a device, a pipe or a socket)" in sent.stderr
    assert isinstance(lacking, SourceError)
    assert (tmp_path / "package" / "sub" / "module.py").exists()
    # Both ends may leave something out.
    (source / "package" / "out").symlink_to("/etc/passwd")
    inbox = Inbox(tmp_path / "package")
    for stream, data in (
        ("stderr", sent.stderr),
        ("stdout", _send(str(source / "package"), tmp_path, tmp_path).stdout),
    ):
        inbox("", stream, data)
    lacking = inbox.close(1)
    assert lacking is not None
    assert "pipe (a device, a pipe or a socket)" in lacking.message
    assert "'out' (it leads out)" in lacking.message
    sent = _send("nothing", source, tmp_path)
    assert (sent.returncode, sent.stdout, sent.stderr) == (1, b"", b"there is nothing at nothing\n")


def test_a_link_of_a_container_s_output_is_not_followed_out(tmp_path: Path) -> None:
    output = tmp_path / "output"
    (output / "in").mkdir(parents=True)
    (output / "out").symlink_to("/etc")
    (output / "link").symlink_to("in")
    assert collection._find(f"{OUTPUT}/link", "/", str(output)) == str(output / "in")
    for path in ("out", "out/passwd", "..", "in/../.."):
        assert collection._find(f"{OUTPUT}/{path}", "/", str(output)) is None


def test_where_it_comes_to(tmp_path: Path) -> None:
    (tmp_path / "a" / "host1").mkdir(parents=True)
    Collection("x", tmp_path / "a").prepare(["host0", "host1"])
    (tmp_path / "a" / "host1" / "file").touch()
    with pytest.raises(InputError, match="host1 has something in it already"):
        Collection("x", tmp_path / "a").prepare(["host0", "host1"])
    Collection("x", tmp_path / "a", overwrite=True).prepare(["host0", "host1"])
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="nothing can be collected in"):
        Collection("x", tmp_path / "file").prepare(["host0"])
