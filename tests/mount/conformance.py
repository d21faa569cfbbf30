"""What every mount must do, whatever serves it: compared with the directory it was made from."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path


def assert_same(source: Path, mount: Path) -> None:
    """All names, attributes and bytes of ``source`` are at ``mount``, and nothing else."""
    diff = ["diff", "--recursive", "--no-dereference", str(source), str(mount)]
    done = subprocess.run(diff, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    for folder, directories, files in os.walk(os.fsencode(source)):
        shown = os.path.join(os.fsencode(mount), os.path.relpath(folder, os.fsencode(source)))
        assert sorted(os.listdir(shown)) == sorted(directories + files)
        for name in [b".", *directories, *files]:
            expected = os.lstat(os.path.join(folder, name))
            found = os.lstat(os.path.join(shown, name))
            assert found.st_mode == expected.st_mode, name
            assert found.st_mtime_ns == expected.st_mtime_ns, name
            assert found.st_nlink == expected.st_nlink, name
            if not stat.S_ISDIR(found.st_mode):
                assert found.st_size == expected.st_size, name
            if not stat.S_ISLNK(found.st_mode):
                assert _xattrs(os.path.join(shown, name)) == _xattrs(os.path.join(folder, name))
    assert (mount / "link").readlink() == (source / "link").readlink()
    assert (mount / "hardlink").stat().st_ino == (mount / "package/sub/module.py").stat().st_ino
    program = subprocess.run([mount / "program"], capture_output=True, check=True, timeout=30)
    assert program.stdout == b"ran\n"
    with (mount / "blocks").open("rb") as file:
        file.seek(200_000)
        assert file.read() == (source / "blocks").read_bytes()[200_000:]
        file.seek(1 << 40)
        assert file.read(10) == b""
    sparse = mount / "sparse"
    assert sparse.stat().st_blocks * 512 < sparse.stat().st_size // 2
    usage = os.statvfs(mount)
    assert usage.f_flag & os.ST_RDONLY
    regular = [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    total = sum(min(s.st_size, s.st_blocks * 512) for s in (path.stat() for path in regular))
    assert usage.f_blocks * usage.f_frsize >= total - (source / "hardlink").stat().st_size


def _xattrs(path: bytes) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name[:5] == "user."}


WRITES: dict[str, Callable[[Path], object]] = {
    "open to write": lambda m: (m / "page").open("r+b"),
    "create": lambda m: (m / "new").open("xb"),
    "append": lambda m: (m / "page").open("ab"),
    "truncate": lambda m: os.truncate(m / "page", 0),
    "mkdir": lambda m: (m / "new").mkdir(),
    "rmdir": lambda m: (m / "empty-directory").rmdir(),
    "unlink": lambda m: (m / "page").unlink(),
    "rename": lambda m: (m / "page").rename(m / "new"),
    "link": lambda m: (m / "new").hardlink_to(m / "page"),
    "symlink": lambda m: (m / "new").symlink_to("page"),
    "mknod": lambda m: os.mkfifo(m / "new"),
    "chmod": lambda m: (m / "page").chmod(0o600),
    "chown": lambda m: os.chown(m / "page", 1, 1),
    "utime": lambda m: os.utime(m / "page"),
    "setxattr": lambda m: os.setxattr(m / "page", "user.a", b"b"),
    "removexattr": lambda m: os.removexattr(m / "page", "user.a"),
}


def assert_read_only(mount: Path) -> None:
    """Every call that would change something fails with EROFS."""
    for name, write in WRITES.items():
        try:
            write(mount)
        except OSError as error:
            assert error.errno == errno.EROFS, f"{name}: {error}"
        else:
            raise AssertionError(f"{name} went through")
