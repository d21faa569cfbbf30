from __future__ import annotations

import re
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from wheelmount.errors import WheelError
from wheelmount.wheels.archive import find_clashes, find_faults, read_metadata, requirements_of

from .support import make_wheel, record_row, spoil

INFO = "a-1.0.dist-info"
METADATA = b"Metadata-Version: 2.1\nName: a\nVersion: 1.0\n"
WHEEL = b"Wheel-Version: 1.0\nTag: py3-none-any\n"


def with_record(wheel: Path, path: str, data: bytes, info: str = INFO) -> Path:
    """Add or change a file, and have RECORD say so."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"{info}/RECORD").decode().splitlines()
    rows = [line for line in lines if not line.startswith(f"{path},")]
    record = "\n".join([record_row(path, data), *rows, ""]).encode()
    return spoil(wheel, {path: data, f"{info}/RECORD": record})


def cut(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-9])


def flip(wheel: Path) -> None:
    data = wheel.read_bytes()
    where = data.index(b"VALUE")
    wheel.write_bytes(data[:where] + b"v" + data[where + 1 :])


def prefix(wheel: Path) -> None:
    data = wheel.read_bytes()
    wheel.write_bytes(b"#!/bin/sh\n" + data)


def entry(wheel: Path, line: str, section: str = "console_scripts") -> Path:
    return with_record(wheel, f"{INFO}/entry_points.txt", f"[{section}]\n{line}\n".encode())


def nul(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes().replace(b"a.py", b"a\0py"))


def changed(wheel: Path, **attributes: object) -> None:
    """Write the wheel anew, with attributes of the entry of ``a.py``."""
    with zipfile.ZipFile(wheel) as archive:
        contents = [(entry, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for entry, data in contents:
            for name, value in attributes.items() if entry.filename == "a.py" else ():
                setattr(entry, name, value)
            archive.writestr(entry, data)


def listed(wheel: Path, row: str) -> None:
    """Put a row ahead of all others in RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read(f"{INFO}/RECORD")
    spoil(wheel, {f"{INFO}/RECORD": f"{row}\n".encode() + record})


def bomb(wheel: Path) -> None:
    """Add 30 files that say they are of 100 MB, and are of 20 KB."""
    zeros = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = zeros.compress(bytes(100_000_000)) + zeros.flush()
    with zipfile.ZipFile(wheel, "a") as archive:
        for number in range(30):
            entry = zipfile.ZipInfo(f"zeros{number}")
            archive.writestr(entry, piece)
            entry.compress_type, entry.file_size = zipfile.ZIP_DEFLATED, 100_000_000


Spoiler = Callable[[Path], object]

BAD: dict[str, tuple[Spoiler, str]] = {
    "empty": (lambda w: w.write_bytes(b""), "broken archive"),
    "cut": (cut, "broken archive"),
    "flipped": (flip, "CRC"),
    "prefix": (prefix, "other bytes before"),
    "twice": (lambda w: spoil(w, {}, ("a.py", b"other")), "2 entries of the name 'a.py'"),
    "upwards": (lambda w: with_record(w, "../evil.py", b""), r"'\.\./evil\.py' leads out"),
    "hidden": (lambda w: with_record(w, "a/../../evil", b""), r"'a/\.\./\.\./evil' leads out"),
    "absolute": (lambda w: with_record(w, "/etc/evil", b""), "'/etc/evil' leads out"),
    "backslash": (lambda w: with_record(w, "..\\evil", b""), "leads out"),
    "interpreter": (
        lambda w: with_record(w, "a-1.0.data/scripts/python3", b"#!python\n"),
        "'python3' would take the place of the interpreter",
    ),
    "interpreter as data": (
        lambda w: with_record(w, "a-1.0.data/data/bin/python", b""),
        "'python' would take the place of the interpreter",
    ),
    "interpreter without a console": (lambda w: entry(w, "pythonw = a:b"), "the interpreter"),
    "configuration as data": (
        lambda w: with_record(w, "a-1.0.data/data/pyvenv.cfg", b""),
        "would take the place of the environment's own",
    ),
    **{
        f"interpreter as {section} {name}": (
            lambda w, section=section, name=name: entry(w, f"{name} = a:b", section),  # type: ignore[misc]
            f"the script '{name}' would take the place of the interpreter",
        )
        for section in ("console_scripts", "gui_scripts")
        for name in ("python", "python3", "python3.11", "Python3.13t", "pypy3")
    },
    "code as entry point": (lambda w: entry(w, "a = a:b; import os"), "'a' is no function"),
    "module as entry point": (lambda w: entry(w, "a = a"), "'a' is no function"),
    "script upwards": (lambda w: entry(w, "../a = a:b"), "'../a' leads out"),
    "script absolute": (lambda w: entry(w, "/etc/a = a:b"), "'/etc/a' leads out"),
    "script with NUL": (lambda w: entry(w, "a\0b = a:b"), r"'a\\x00b' has a control character"),
    "script with colour": (lambda w: entry(w, "a\x1b[31m = a:b"), "has a control character"),
    "script of 300 characters": (lambda w: entry(w, "a" * 300 + " = a:b"), "a name of 300 bytes"),
    "script twice": (lambda w: entry(w, "a = a:b\na = a:c"), "entry_points.txt cannot be read"),
    "scripts without a section": (
        lambda w: with_record(w, f"{INFO}/entry_points.txt", b"a = a:b\n"),
        "entry_points.txt cannot be read",
    ),
    "scheme": (
        lambda w: with_record(w, "a-1.0.data/root/etc/passwd", b""),
        "unknown scheme 'root'",
    ),
    "control character": (lambda w: with_record(w, "a\x07b.py", b""), "has a control character"),
    "NUL": (nul, r"'a\\x00py' has a control character"),
    "name of 300 characters": (
        lambda w: with_record(w, "a" * 300, b""),
        "has a name of 300 bytes",
    ),
    "long path": (lambda w: with_record(w, "/".join("a" * 600), b""), "a path of 1199"),
    "file and directory": (
        lambda w: with_record(w, "a.py/b.py", b""),
        "'a.py' is a file and a directory",
    ),
    "behind": (lambda w: w.write_bytes(w.read_bytes() + b"more"), "other bytes behind"),
    "method": (lambda w: changed(w, compress_type=zipfile.ZIP_LZMA), "'a.py' is compressed by"),
    "second name": (
        lambda w: changed(w, extra=struct.pack("<HHBL", 0x7075, 9, 1, 0) + b"b.py"),
        "'a.py' has another name too",
    ),
    "dot": (lambda w: with_record(w, "./a.py", b""), r"'\./a\.py' is another way to write 'a\.py'"),
    "slashes": (lambda w: with_record(w, "b//a.py", b""), "another way to write 'b/a.py'"),
    "hidden info": (lambda w: with_record(w, f"./{INFO}/INSTALLER", b""), "another way to write"),
    "file and directory entry": (
        lambda w: spoil(w, {}, ("a.py/", b"")),
        "'a.py' is a file and a directory",
    ),
    "reversed name": (lambda w: with_record(w, "a\u202eyp.txt", b""), "has a control character"),
    "control character of 8 bits": (lambda w: with_record(w, "a\x9bm", b""), "has a control char"),
    "data of another wheel": (
        lambda w: with_record(w, "b-1.0.data/scripts/b", b""),
        r"'b-1\.0\.data/scripts/b' is in the \.data of another wheel",
    ),
    "data of no wheel": (
        lambda w: with_record(w, "evil.data/scripts/python3", b"#!python\n"),
        "of another wheel",
    ),
    "directory of scripts": (
        lambda w: with_record(w, "a-1.0.data/scripts/b/c", b""),
        "is a directory of scripts",
    ),
    **{
        f"data as {path}": (
            lambda w, path=path: with_record(w, f"a-1.0.data/data/{path}", b""),  # type: ignore[misc]
            "would take the place of the environment's own",
        )
        for path in ("bin", "lib", "lib64", "lib/python3.11", "lib/python3.11/site-packages")
    },
    **{
        f"metadata of {info} in {scheme}": (
            lambda w, path=f"a-1.0.data/{scheme}/{info}/RECORD": with_record(w, path, b""),  # type: ignore[misc]
            "would change what is known of a package",
        )
        for scheme in ("purelib", "platlib", "data/lib/python3.11/site-packages")
        for info in (INFO, "b-1.0.dist-info")
    },
    "listed twice": (lambda w: listed(w, "a.py,sha256=AAAA,3"), "is mentioned 2 times in RECORD"),
    "bomb": (bomb, "it unpacks to 3.0 GB"),
    "much metadata": (
        lambda w: with_record(w, f"{INFO}/LICENSE", b" " * 70_000_000),
        "'a-1.0.dist-info/LICENSE' has 70 MB",
    ),
    "no info": (
        lambda w: spoil(w, dict.fromkeys(f"{INFO}/{n}" for n in ("METADATA", "WHEEL", "RECORD"))),
        "0 directories .dist-info",
    ),
    "two infos": (lambda w: with_record(w, "b-1.0.dist-info/METADATA", METADATA), "2 directories"),
    "no metadata": (lambda w: spoil(w, {f"{INFO}/METADATA": None}), "METADATA"),
    "name": (
        lambda w: with_record(w, f"{INFO}/METADATA", METADATA.replace(b": a", b": b")),
        "METADATA has the name 'b'",
    ),
    "version": (
        lambda w: with_record(w, f"{INFO}/METADATA", METADATA.replace(b"1.0", b"1.1")),
        "METADATA has the version '1.1'",
    ),
    "no version": (
        lambda w: with_record(w, f"{INFO}/METADATA", b"Name: a\n"),
        "METADATA has the version ''",
    ),
    "tags": (
        lambda w: with_record(w, f"{INFO}/WHEEL", WHEEL.replace(b"py3", b"cp311")),
        "WHEEL has the tags cp311-none-any",
    ),
    "no tags": (lambda w: with_record(w, f"{INFO}/WHEEL", WHEEL[:19]), "WHEEL has the tags none"),
    "format": (
        lambda w: with_record(w, f"{INFO}/WHEEL", WHEEL.replace(b"1.0", b"2.0")),
        "WHEEL has the version '2.0', not 1",
    ),
    "no record": (lambda w: spoil(w, {f"{INFO}/RECORD": None}), "RECORD"),
    "hash": (lambda w: spoil(w, {"a.py": b"VALUE = '9.9'\n"}), r"hash / size of a\.py"),
    "unlisted": (lambda w: spoil(w, {"evil.py": b""}), r"evil\.py is not mentioned in RECORD"),
    "gone": (lambda w: spoil(w, {"a.py": None}), r"a\.py is mentioned in RECORD and not there"),
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, "a", requires=["b>=1"])


def test_a_sound_one(wheel: Path) -> None:
    assert find_faults(wheel) == []


@pytest.mark.parametrize("how", BAD)
def test_bad_ones(wheel: Path, how: str) -> None:
    spoiler, expected = BAD[how]
    spoiler(wheel)
    started = time.process_time()
    faults = find_faults(wheel)
    assert time.process_time() - started < 3  # a bomb is not unpacked
    assert any(re.search(expected, fault) for fault in faults), faults
    assert "\n" not in faults[0]
    assert str(wheel.parent) not in faults[0]


@pytest.mark.parametrize("how", ["hash", "unlisted", "gone", "no record"])
def test_without_record(wheel: Path, how: str) -> None:
    BAD[how][0](wheel)
    assert find_faults(wheel, record=False) == []
    flip_last = wheel.read_bytes()
    where = flip_last.index(b"Requires-Dist")
    wheel.write_bytes(flip_last[:where] + b"r" + flip_last[where + 1 :])
    assert "broken archive" in find_faults(wheel, record=False)[0]


def test_good_entry_points(wheel: Path) -> None:
    entry(wheel, "a-b.c = a.b:c.d\nspaced = a : b [more, other-one]\npython-a = a:b")
    assert find_faults(wheel) == []


def test_a_file_where_another_has_a_directory(tmp_path: Path, wheel: Path) -> None:
    other = with_record(make_wheel(tmp_path, "b"), "a.py/c.py", b"", "b-1.0.dist-info")
    ((late, fault),) = find_clashes([wheel, other])
    assert late == other
    assert fault == f"'a.py' is a directory here and a file in {wheel.name}"
    assert find_clashes([wheel, make_wheel(tmp_path, "c")]) == []


def test_names(tmp_path: Path, wheel: Path) -> None:
    other = wheel.rename(tmp_path / "b-1.0-py3-none-any.whl")
    assert find_faults(other) != []
    assert find_faults(other, "a-1.0-py3-none-any.whl") == []
    assert "Invalid wheel filename" in find_faults(wheel, "a.whl")[0]
    assert find_faults(tmp_path / wheel.name)[0].startswith("broken archive")  # gone


def test_a_renamed_platform(tmp_path: Path) -> None:
    linux = make_wheel(tmp_path, "a", tag="cp311-cp311-linux_x86_64")
    assert find_faults(linux, "a-1.0-cp311-cp311-manylinux_2_17_x86_64.whl") == []
    assert find_faults(linux, "a-1.0-cp312-cp312-manylinux_2_17_x86_64.whl") != []


def test_metadata(wheel: Path) -> None:
    assert b"Name: a\n" in read_metadata(wheel)
    assert [str(one) for one in requirements_of(wheel)] == ["b>=1"]
    wheel.write_bytes(b"")
    assert requirements_of(wheel) == []
    with pytest.raises(WheelError, match=wheel.name) as caught:
        read_metadata(wheel)
    assert caught.value.hint


def test_packages_inside_a_package(wheel: Path) -> None:
    inner = "_vendor/inner-2.0.dist-info/METADATA"
    with_record(wheel, inner, b"Name: inner\nVersion: 2.0\nRequires-Dist: outer\n")
    with zipfile.ZipFile(wheel) as archive:  # the inner one first
        contents = sorted(archive.namelist())
        data = {path: archive.read(path) for path in contents}
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in contents:
            archive.writestr(path, data[path])
    assert contents[0] == inner
    assert find_faults(wheel) == []
    assert [str(one) for one in requirements_of(wheel)] == ["b>=1"]
