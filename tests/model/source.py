"""A source that is edited at random, and what it was at a moment: by the kernel's calls alone."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.mount.conformance import Directory, Shown

NAMES = [b"a", b"b", b"c", b"\xc3\xbc", b"not-utf8-\xff", b"x" * 100]
SIZES = [0, 1, 100, 4096, 4097, 65_536, 70_001, 200_000]
MODES = [0o644, 0o600, 0o755, 0o444, 0o4711]
XATTRS = [b"user.one", b"user.two"]

pick = st.integers(0, 1 << 16)
"""Chooses among what there is."""

EDIT = st.one_of(
    st.tuples(st.just("write"), pick, st.sampled_from(NAMES), st.sampled_from(SIZES), pick),
    st.tuples(st.just("overwrite"), pick, st.sampled_from(SIZES), pick, st.booleans()),
    st.tuples(st.just("truncate"), pick, st.sampled_from(SIZES), st.booleans()),
    st.tuples(st.just("sparse"), pick, st.sampled_from(NAMES), st.lists(pick, max_size=3)),
    st.tuples(st.just("replace"), pick, pick, st.booleans()),
    st.tuples(st.just("rename"), pick, pick, st.sampled_from(NAMES)),
    st.tuples(st.just("hardlink"), pick, pick, st.sampled_from(NAMES)),
    st.tuples(st.just("symlink"), pick, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("directory"), pick, st.sampled_from(NAMES)),
    st.tuples(st.just("chmod"), pick, st.sampled_from(MODES)),
    st.tuples(st.just("xattr"), pick, st.sampled_from(XATTRS), st.none() | st.binary(max_size=9)),
    st.tuples(st.just("touch"), pick, pick),
    st.tuples(st.just("delete"), pick),
    st.tuples(st.just("swap"), pick, pick),
)
"""One edit: the name of a method of ``Source`` and its arguments."""

EDITS = st.lists(EDIT, min_size=1, max_size=6)


@dataclass(slots=True)
class Entry:
    """One path at a moment; ``same`` is the first path of the same file."""

    mode: int
    mtime_ns: int
    nlink: int
    same: bytes
    data: bytes
    """A file's bytes, a symlink's target."""
    xattrs: dict[bytes, bytes]


Snapshot = dict[bytes, Entry]


def snapshot(shown: Shown) -> Snapshot:
    """All that is shown; the root is b""."""
    entries: Snapshot = {}
    first: dict[int, bytes] = {}
    pending = [b""]
    while pending:
        path = pending.pop(0)
        its = shown.attributes(path)
        data, xattrs = b"", {}
        if stat.S_ISDIR(its.mode):
            names = sorted(shown.names(path))
            assert len(set(names)) == len(names), f"{path!r} lists a name twice"
            pending += [path + b"/" + name if path else name for name in names]
        elif stat.S_ISLNK(its.mode):
            data = shown.target(path)
        else:
            data = shown.read(path, 0, its.size + 1)
            assert len(data) == its.size, path
        if not stat.S_ISLNK(its.mode):
            xattrs = shown.xattrs(path)
        same = first.setdefault(its.number, path)
        entries[path] = Entry(its.mode, its.mtime_ns, its.nlink, same, data, xattrs)
    return entries


class Source:
    """A directory, and edits of it; one that cannot be done changes nothing."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.path = root
        self._root = os.fsencode(root)

    def snapshot(self) -> Snapshot:
        """What it is now."""
        return snapshot(Directory(self.path))

    def edit(self, name: str, *arguments: Any) -> None:
        """Do an edit."""
        with contextlib.suppress(OSError):
            getattr(self, name)(*arguments)

    def _all(self) -> list[bytes]:
        found = []
        for folder, names, files in os.walk(self._root):
            found += [os.path.join(folder, name) for name in sorted(names + files)]
        return sorted(found)

    def _some(self, which: int, kind: int | None = None) -> bytes:
        found = self._all()
        if kind is not None:
            found = [path for path in found if stat.S_IFMT(os.lstat(path).st_mode) == kind]
        if kind == stat.S_IFDIR:
            found.append(self._root)
        if not found:
            raise FileNotFoundError
        return found[which % len(found)]

    def _file(self, which: int) -> bytes:
        return self._some(which, stat.S_IFREG)

    def _place(self, which: int, name: bytes) -> bytes:
        return os.path.join(self._some(which, stat.S_IFDIR), name)

    def write(self, where: int, name: bytes, size: int, seed: int) -> None:
        with open(self._place(where, name), "wb") as file:
            file.write(random.Random(seed).randbytes(size))  # noqa: S311 - bytes to tell apart

    def overwrite(self, which: int, offset: int, seed: int, put_back: bool) -> None:
        path = self._file(which)
        before = os.stat(path)
        with open(path, "r+b") as file:
            file.seek(min(offset, before.st_size // 2))
            file.write(b"%d" % seed)
        if put_back:
            os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))

    def truncate(self, which: int, size: int, put_back: bool) -> None:
        path = self._file(which)
        before = os.stat(path)
        os.truncate(path, size)
        if put_back:
            os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))

    def sparse(self, where: int, name: bytes, offsets: list[int]) -> None:
        with open(self._place(where, name), "wb") as file:
            file.truncate(600_000)
            for offset in offsets:
                file.seek(offset * 8)
                file.write(b"%d" % offset)

    def replace(self, which: int, seed: int, put_back: bool) -> None:
        """Another file of the same size takes the place of one, perhaps with its times."""
        path = self._file(which)
        before = os.stat(path)
        new = path + b".new"
        with open(new, "wb") as file:
            file.write(random.Random(seed).randbytes(before.st_size))  # noqa: S311
        if put_back:
            os.utime(new, ns=(before.st_mtime_ns, before.st_mtime_ns))
        os.replace(new, path)

    def rename(self, which: int, where: int, name: bytes) -> None:
        os.rename(self._some(which), self._place(where, name))

    def hardlink(self, which: int, where: int, name: bytes) -> None:
        os.link(self._file(which), self._place(where, name))

    def symlink(self, where: int, name: bytes, target: bytes) -> None:
        os.symlink(target, self._place(where, name))

    def directory(self, where: int, name: bytes) -> None:
        os.mkdir(self._place(where, name))

    def chmod(self, which: int, mode: int) -> None:
        path = self._some(which)
        if not os.path.islink(path):
            os.chmod(path, mode)

    def xattr(self, which: int, name: bytes, value: bytes | None) -> None:
        path = self._some(which)
        if value is None:
            os.removexattr(path, name, follow_symlinks=False)
        else:
            os.setxattr(path, name, value, follow_symlinks=False)

    def touch(self, which: int, when: int) -> None:
        when = when * 1_000_003 * 1_000 - 10**13
        os.utime(self._some(which), ns=(when, when), follow_symlinks=False)

    def delete(self, which: int) -> None:
        self._remove(self._some(which))

    @staticmethod
    def _remove(path: bytes) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def swap(self, which: int, other: int) -> None:
        """Two entries take each other's places: a directory for a file, perhaps."""
        one, two = self._some(which), self._some(other)
        if one == two or one.startswith(two + b"/") or two.startswith(one + b"/"):
            return
        between = self._root + b".between"
        os.rename(one, between)
        os.rename(two, one)
        os.rename(between, two)
