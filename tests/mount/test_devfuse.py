"""The mount through /dev/fuse itself: real mounts of a tree in memory, each served by a process."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conftest import CHECKOUT
from wheelmount.errors import UnavailableError
from wheelmount.mount.kernel import points
from wheelmount.mount.serve.fuse.abi import IN_HEADER, Op
from wheelmount.mount.serve.fuse.attach import attach, set_read_ahead
from wheelmount.mount.serve.fuse.devfuse import DirectFuse
from wheelmount.mount.serve.vfs import Change, Usage
from wheelmount.mount.snapshot.tree import ROOT, Inode

pytestmark = pytest.mark.fuse

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


class Memory:
    """A tree in memory: what the adapter asks a ``Vfs``."""

    def __init__(self) -> None:
        self.inodes = [Inode(stat.S_IFDIR | 0o755, 0, 10**18, 2)]
        self.names: dict[int, dict[bytes, int]] = {ROOT: {}}
        self.bytes: dict[int, bytes] = {}
        self.missing: set[int] = set()

    def _parent(self, path: str) -> tuple[int, bytes]:
        *parents, name = os.fsencode(path).split(b"/")
        number = ROOT
        for parent in parents:
            number = self.names[number][parent]
        return number, name

    def number(self, path: str) -> int:
        directory, name = self._parent(path)
        return self.names[directory][name]

    def add(self, path: str, inode: Inode) -> int:
        directory, name = self._parent(path)
        self.names[directory][name] = len(self.inodes)
        self.inodes.append(inode)
        return len(self.inodes) - 1

    def directory(self, path: str, mtime_ns: int = 10**18) -> int:
        number = self.add(path, Inode(stat.S_IFDIR | 0o755, 0, mtime_ns, 2))
        self.names[number] = {}
        return number

    def file(self, path: str, data: bytes, **attributes: Any) -> int:
        mode = stat.S_IFREG | attributes.pop("mode", 0o644)
        number = self.add(path, Inode(mode, len(data), 10**18 + 1, **attributes))
        self.bytes[number] = data
        return number

    def symlink(self, path: str, target: bytes) -> int:
        return self.add(path, Inode(stat.S_IFLNK | 0o777, len(target), 10**18, 1, target))

    def changes(self, new: Memory) -> Change:
        entries = []
        directories = []
        for number, before in self.names.items():
            after = new.names.get(number, {})
            changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
            entries += [(number, name) for name in changed]
            if changed or self.inodes[number] != new.inodes[number]:
                directories.append(number)
        return Change(entries, directories)

    # What Vfs offers.

    def inode(self, number: int) -> Inode:
        return self.inodes[number]

    def lookup(self, directory: int, name: bytes) -> int | None:
        if directory not in self.names:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return self.names[directory].get(name)

    def entries(self, directory: int) -> list[tuple[bytes, int]]:
        return sorted(self.names[directory].items())

    def readlink(self, number: int) -> bytes:
        return self.inodes[number].path

    def usage(self) -> Usage:
        return Usage(sum(map(len, self.bytes.values())), len(self.inodes))

    def read(self, number: int, offset: int, size: int) -> memoryview | None:
        if number in self.missing:
            return None
        return memoryview(self.bytes[number])[offset : offset + size]


class Serving:
    """In a process of its own: serves, and does what the test says."""

    def __init__(self, fd: int, control: Connection) -> None:
        self._control = control
        options: dict[str, Any]
        self.memory, options = control.recv()
        self._arrivals: dict[int, trio.Event] = {}
        self._waiting = 0
        self._operations: Counter[str] = Counter()
        self._forgotten: list[int] = []
        self._fuse = DirectFuse(
            fd,
            self.memory,
            self._wait,
            (os.getuid(), os.getgid()),
            on_forget=self._forgotten.append,
            **options,
        )
        receive = self._fuse._wire.receive

        def counted(buffer: bytearray) -> bool:
            received = receive(buffer)
            code = IN_HEADER.unpack_from(buffer)[1]
            self._operations[Op(code).name if code in iter(Op) else str(code)] += 1
            return received

        self._fuse._wire.receive = counted  # type: ignore[method-assign]
        invalidate = self._fuse.invalidate

        def slow(entries: Iterable[tuple[int, bytes]], directories: Iterable[int]) -> None:
            invalidate(entries, directories)
            time.sleep(0.01)  # as on a busy host

        self._fuse.invalidate = slow  # type: ignore[method-assign]

    async def _wait(self, number: int, offset: int, size: int) -> memoryview:
        self._waiting += 1
        try:
            while number in self.memory.missing:
                await self._arrivals.setdefault(number, trio.Event()).wait()
        finally:
            self._waiting -= 1
        return memoryview(self.memory.bytes[number])[offset : offset + size]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._obey)
            await self._fuse.serve()
            nursery.cancel_scope.cancel()

    async def _obey(self) -> None:
        while True:
            name, *arguments = await trio.to_thread.run_sync(
                self._control.recv, abandon_on_cancel=True
            )
            self._control.send(await getattr(self, name)(*arguments))

    async def arrive(self, number: int) -> None:
        self.memory.missing.discard(number)
        self._arrivals.pop(number, trio.Event()).set()

    async def refresh(self, new: Memory) -> None:
        def flip() -> None:
            self.memory.__dict__ = new.__dict__

        await self._fuse.refresh(self.memory.changes(new), flip)

    async def waiting(self) -> int:
        return self._waiting

    async def operations(self) -> Counter[str]:
        return self._operations.copy()

    async def forgotten(self) -> list[int]:
        return self._forgotten

    async def references(self) -> dict[int, int]:
        numbers = range(len(self.memory.inodes))
        return {number: self._fuse.references(number) for number in numbers}

    async def session(self) -> dict[str, int] | None:
        return self._fuse.agreed.session


def serve() -> None:
    """The serving process; its arguments are a mount point or a descriptor, and the control."""
    mount, control = sys.argv[1:]
    fd = int(mount) if mount.isdigit() else attach(mount)
    trio.run(Serving(fd, Connection(int(control))).run)


class Mounted:
    """A mount of a tree, and the process that serves it."""

    def __init__(self, mount: Path, memory: Memory, **options: Any) -> None:
        self.mount = mount
        mount.mkdir(exist_ok=True)
        self.fd = attach(str(mount))
        self.start(memory, **options)

    def start(self, memory: Memory, **options: Any) -> None:
        self.process, self._control = spawn(str(self.fd), [self.fd], [])
        self._control.send((memory, options))

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._control.send((name, *arguments))
        assert self._control.poll(20), "the serving process does not answer"
        return self._control.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()

    def end(self) -> None:
        os.close(self.fd)
        # By force: in a mount namespace that another test made meanwhile, a copy would stay.
        subprocess.run(["umount", "-fl", self.mount], stderr=subprocess.DEVNULL, check=False)
        try:
            assert self.process.wait(60) == 0
        finally:
            self.kill()


def spawn(
    mount: str, fds: list[int], prefix: list[str]
) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    code = "from tests.mount.test_devfuse import serve; serve()"
    with theirs:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, mount, str(theirs.fileno())],
            cwd=CHECKOUT,
            pass_fds=[*fds, theirs.fileno()],
        )
    return process, Connection(ours.detach())


@pytest.fixture
def mounted(workplace: Path) -> Iterator[Callable[..., Mounted]]:
    made: list[Mounted] = []

    def make(memory: Memory, **options: Any) -> Mounted:
        made.append(Mounted(workplace / f"mount{len(made)}", memory, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def python(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def code(process: subprocess.Popen[str], timeout: float = 60) -> int:
    process.communicate(timeout=timeout)
    return process.returncode


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("2")


def example() -> Memory:
    memory = Memory()
    memory.directory("package")
    memory.directory("empty", mtime_ns=987_654_321_000_000_001)
    memory.file("package/module.py", b"print('module')\n", mode=0o640)
    memory.file("nothing", b"")
    memory.file("page", b"p" * 4096)
    memory.file("odd", bytes(range(251)) * 4001)
    memory.file("not-utf8-\udcff\udcfe", b"bytes\n")
    memory.file("program", b"#!/bin/sh\necho ran\n", mode=0o755)
    memory.symlink("link", b"package/module.py")
    linked = memory.file("linked", b"twice", nlink=2)
    memory.names[memory.number("package")][b"linked"] = linked
    return memory


def test_names_and_attributes(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    mount = mounted(memory).mount
    names = [os.fsdecode(name) for name in memory.names[ROOT]]
    assert sorted(os.listdir(mount)) == sorted(names)
    assert sorted(os.listdir(mount)) == sorted(names)  # from the kernel's memory
    assert os.listdir(mount / "empty") == []
    listed = subprocess.run(["ls", "-a", mount / "empty"], capture_output=True, check=True)
    assert listed.stdout == b".\n..\n"
    for name in names:
        found, number = os.lstat(mount / name), memory.number(name)
        inode = memory.inodes[number]
        assert (found.st_mode, found.st_size, found.st_mtime_ns, found.st_nlink) == (
            inode.mode,
            inode.size,
            inode.mtime_ns,
            inode.nlink,
        )
        assert (found.st_ino, found.st_blocks) == (number + 1, -(-inode.size // 512))
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    assert (mount / "link").readlink() == Path("package/module.py")
    assert (mount / "link").read_bytes() == b"print('module')\n"
    assert (mount / "linked").stat().st_ino == (mount / "package/linked").stat().st_ino
    assert subprocess.run([mount / "program"], capture_output=True).stdout == b"ran\n"
    usage = os.statvfs(mount)
    assert usage.f_blocks * usage.f_frsize >= memory.usage().bytes > 0
    assert (usage.f_bfree, usage.f_files) == (0, len(memory.inodes))
    assert points.mounted(str(mount)) == "fuse.wheelmount"
    with pytest.raises(OSError) as error:
        (mount / "new").touch()
    assert error.value.errno == errno.EROFS


def test_bytes(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.file("big", os.urandom(5 << 20))
    mount = mounted(memory).mount
    for name in ("nothing", "page", "odd", "big"):
        assert (mount / name).read_bytes() == memory.bytes[memory.number(name)], name
    with (mount / "odd").open("rb") as file:
        assert (
            os.pread(file.fileno(), 10, 1_000_000)
            == memory.bytes[memory.number("odd")][1_000_000:1_000_010]
        )
        assert os.pread(file.fileno(), 10, 1 << 40) == b""
    script = """
        import mmap, sys
        with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as m:
            assert m[:] == open(sys.argv[1], "rb").read()
        """
    assert code(python(script, mount / "big"), 20) == 0


def test_a_large_directory(mounted: Callable[..., Mounted]) -> None:
    memory = Memory()
    memory.directory("many")
    names = {f"{number:04}-{'x' * (number % 200)}" for number in range(3000)}
    for name in names:
        memory.file(f"many/{name}", name.encode())
    served = mounted(memory)
    for _ in range(2):
        assert set(os.listdir(served.mount / "many")) == names
    with os.scandir(served.mount / "many") as entries:
        assert all(entry.stat().st_size == len(entry.name) for entry in entries)
    asked = served("operations")
    assert sorted(os.listdir(served.mount / "many")) == sorted(names)
    assert served("operations") == asked  # the kernel has kept the listing


def test_eight_readers_at_once(mounted: Callable[..., Mounted]) -> None:
    memory = Memory()
    for number in range(400):
        memory.file(f"file{number}", f"{number}".encode() * 50)
    mount = mounted(memory).mount
    script = """
        import random, sys
        numbers = list(range(400))
        random.shuffle(numbers)
        for number in numbers:
            assert open(f"{sys.argv[1]}/file{number}", "rb").read() == f"{number}".encode() * 50
        """
    readers = [python(script, mount) for _ in range(8)]
    assert [code(reader, 30) for reader in readers] == [0] * 8


def test_the_kernel_asks_once(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    for number in range(20):
        memory.file(f"file{number}", b"content")
    served = mounted(memory)
    for _ in range(3):
        assert not (served.mount / "absent").exists()
        for number in range(20):
            assert (served.mount / f"file{number}").read_bytes() == b"content"
        assert (served.mount / "link").read_bytes()
        assert os.listdir(served.mount / "package")
    asked = served("operations")
    assert asked["LOOKUP"] == 1 + 20 + 1 + 2  # absent, the files, the link, what it leads to
    assert asked["READ"] == 21
    assert asked["READLINK"] == 1
    assert asked["OPEN"] <= 1
    assert asked["OPENDIR"] <= 1
    assert asked["RELEASE"] == asked["RELEASEDIR"] == 0


def test_extended_attributes(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    pairs = ((b"user.empty", b""), (b"user.long", b"v" * 300))
    memory.file("marked", b"", xattrs=pairs)
    mount = mounted(memory).mount
    assert os.listxattr(mount / "marked") == ["user.empty", "user.long"]
    assert os.listxattr(mount / "page") == []
    assert os.getxattr(mount / "marked", "user.long") == b"v" * 300
    assert os.getxattr(mount / "marked", "user.empty") == b""
    for path, name in (("marked", "user.none"), ("page", "user.long")):
        with pytest.raises(OSError) as error:
            os.getxattr(mount / path, name)
        assert error.value.errno == errno.ENODATA
    libc = ctypes.CDLL(None, use_errno=True)
    marked, small = os.fsencode(mount / "marked"), ctypes.create_string_buffer(10)
    assert libc.getxattr(marked, b"user.long", small, 10) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert libc.getxattr(marked, b"user.long", None, 0) == 300


def test_extended_attributes_of_a_refresh_are_shown_where_there_were_none(
    mounted: Callable[..., Mounted],
) -> None:
    served = mounted(example())
    mount = served.mount
    for name in ("page", "", "package"):
        assert os.listxattr(mount / name) == []
        with pytest.raises(OSError) as error:
            os.getxattr(mount / name, "user.any")
        assert error.value.errno == errno.ENODATA
    after = example()
    number = after.number("page")
    after.inodes[number] = after.inodes[number]._replace(xattrs=((b"user.any", b"value"),))
    served("refresh", after)
    assert os.listxattr(mount / "page") == ["user.any"]
    assert os.getxattr(mount / "page", "user.any") == b"value"
    assert os.listxattr(mount / "package") == []


def test_opening_and_running_files_asks_for_no_extended_attributes(
    mounted: Callable[..., Mounted],
) -> None:
    served = mounted(example())
    (served.mount / "page").read_bytes()
    subprocess.run(["ls", "-lR", served.mount], check=True, stdout=subprocess.DEVNULL)
    before = served("operations")
    for name in ("page", "odd"):
        (served.mount / name).read_bytes()
        (served.mount / name).stat()
    subprocess.run([served.mount / "program"], check=True, stdout=subprocess.DEVNULL)
    after = served("operations")
    assert (after - before)["GETXATTR"] == 0


def test_holes_are_told(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.file("hole", bytes(10_000), pieces=())
    memory.file("holes", bytes(20_000), pieces=((4096, 4096), (12288, 4096)))
    mount = mounted(memory).mount
    for name in ("hole", "holes", "page", "odd"):
        data = memory.inodes[memory.number(name)].data
        size = len(memory.bytes[memory.number(name)])
        full = bytearray(size + 1)
        for begin, length in data:
            full[begin : begin + length] = b"x" * length
        fd = os.open(mount / name, os.O_RDONLY)
        try:
            for offset in (*range(0, size, 512), size - 1):
                where = full.find(b"x", offset)
                if where < 0:
                    with pytest.raises(OSError) as error:
                        os.lseek(fd, offset, os.SEEK_DATA)
                    assert error.value.errno == errno.ENXIO
                else:
                    assert os.lseek(fd, offset, os.SEEK_DATA) == where
                assert os.lseek(fd, offset, os.SEEK_HOLE) == full.find(0, offset)
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                with pytest.raises(OSError) as error:
                    os.lseek(fd, size, whence)
                assert error.value.errno == errno.ENXIO
        finally:
            os.close(fd)


def test_a_read_waits_for_its_bytes_and_for_no_others(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.missing = {memory.number("odd"), memory.number("page")}
    served = mounted(memory)
    reader = python("import sys; print(len(open(sys.argv[1], 'rb').read()))", served.mount / "odd")
    until(lambda: served("waiting"))
    assert (served.mount / "program").read_bytes()
    assert os.listdir(served.mount / "package")
    assert reader.poll() is None
    served("arrive", memory.number("odd"))
    assert reader.communicate(timeout=60)[0] == f"{251 * 4001}\n"
    served("arrive", memory.number("page"))


def test_hundreds_of_waiting_readers_do_not_stop_others(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    for number in range(300):
        memory.missing.add(memory.file(f"late{number}", b"late"))
    served = mounted(memory)
    script = """
        import sys, threading
        def read(number):
            assert open(f"{sys.argv[1]}/late{number}", "rb").read() == b"late"
        threads = [threading.Thread(target=read, args=(n,)) for n in range(300)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    readers = python(script, served.mount)
    until(lambda: served("waiting") == 300)
    assert len((served.mount / "odd").read_bytes()) == 251 * 4001
    for number in memory.missing:
        served("arrive", number)
    assert code(readers) == 0


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_a_killed_reader_goes_at_once(mounted: Callable[..., Mounted], flags: int) -> None:
    memory = example()
    memory.missing = {memory.number("page")}
    served = mounted(memory)
    script = """
        import mmap, os, sys
        fd = os.open(sys.argv[1], os.O_RDONLY | int(sys.argv[2]))
        os.readv(fd, [mmap.mmap(-1, 4096)])
        """
    reader = python(script, served.mount / "page", flags)
    until(lambda: served("waiting"))
    reader.kill()
    assert code(reader) == -signal.SIGKILL, "before its bytes arrive"
    if not flags:  # the kernel reads ahead by itself: it goes on with that
        served("arrive", memory.number("page"))
    until(lambda: not served("waiting"))


def test_a_signal_ends_a_wait(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.missing = {memory.number("page")}
    served = mounted(memory)
    script = """
        import mmap, os, signal, sys
        class Alarm(Exception): pass
        def alarm(*_): raise Alarm
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
        try: os.readv(fd, [mmap.mmap(-1, 4096)])
        except Alarm: print("interrupted")
        """
    reader = python(script, served.mount / "page")
    until(lambda: served("waiting"))
    assert reader.communicate(timeout=60)[0] == "interrupted\n"
    until(lambda: not served("waiting"))
    assert served("operations")["INTERRUPT"] == 1


def test_counts_what_the_kernel_holds(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.directory("many")
    for number in range(500):
        memory.file(f"many/file{number}", b"content")
    served = mounted(memory)
    for _ in range(3):
        subprocess.run(["ls", "-lR", served.mount], stdout=subprocess.DEVNULL, check=True)
        for number in range(500):
            (served.mount / f"many/file{number}").stat()
    assert not (served.mount / "absent").exists()
    held = {number for number, count in served("references").items() if count}
    assert held == set(range(1, len(memory.inodes)))

    def none_but(*paths: str) -> bool:
        drop_caches()  # a directory goes after what was in it, in a second round
        held = {number for number, count in served("references").items() if count}
        return held == {memory.number(path) for path in paths}

    with (served.mount / "many/file7").open("rb"):
        until(lambda: none_but("many", "many/file7"))
    until(none_but)
    assert set(served("forgotten")) == set(range(1, len(memory.inodes)))


def generation(number: int, memory: Memory) -> Memory:
    """A later state: everything that changes tells the number of its generation."""
    new = deepcopy(memory)
    for directory in ("one", "two", "two/deep"):
        mtime = 10**18 + number
        old = new.number(directory)
        new.inodes[old] = Inode(stat.S_IFDIR | 0o755, 0, mtime, 2)
        names = new.names[old]
        names.pop(f"only-{number - 1}".encode(), None)
        new.file(f"{directory}/only-{number}", b"")
        new.file(f"{directory}/file", f"{number}".encode())
    new.symlink("two/link", f"{number}".encode())
    names = new.names[new.number("two")]
    names.pop(b"directory", None)
    new.directory("two/directory")
    new.file("two/directory/file", f"{number}".encode())
    return new


OBSERVE = """
    import mmap, os, random, struct, sys
    mount, shared, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    import time
    with open(shared, "r+b") as file:
        seen = mmap.mmap(file.fileno(), 8)

    def read(path):
        with open(f"{mount}/{path}", "rb") as file:
            return int(file.read())
    def listed(path):
        return max(int(n[5:]) for n in os.listdir(f"{mount}/{path}") if n.startswith("only-"))
    def absent(path):
        # There for one generation only: then absent, and never there again.
        number = struct.unpack("q", seen[:])[0]
        os.path.exists(f"{mount}/{path}/only-{number + 1}")
        if os.path.exists(f"{mount}/{path}/only-{number}"): return number
        return number + 1
    observations = [
        lambda: read("one/file"), lambda: read("two/file"), lambda: read("two/deep/file"),
        lambda: read("two/directory/file"), lambda: int(os.readlink(f"{mount}/two/link")),
        lambda: listed("one"), lambda: listed("two"), lambda: listed("two/deep"),
        lambda: os.stat(f"{mount}/one").st_mtime_ns - 10**18,
        lambda: os.stat(f"{mount}/two/deep").st_mtime_ns - 10**18,
        lambda: absent("one"), lambda: absent("two"),
        lambda: os.path.exists(f"{mount}/one/never-{random.random()}") or 10**6,
    ]
    count = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        place = random.randrange(len(observations))
        least = struct.unpack("q", seen[:])[0]
        try:
            found = observations[place]()
        except FileNotFoundError:  # between two steps of one observation
            continue
        if found == 10**6: continue
        assert found >= least, f"observation {place}: {found} after {least}"
        if found > struct.unpack("q", seen[:])[0]:
            seen[:] = struct.pack("q", found)
        count += 1
    print(count)
    """


def test_a_refresh_happens_to_all_readers_at_one_moment(
    mounted: Callable[..., Mounted], workplace: Path
) -> None:
    memory = Memory()
    for directory in ("one", "two", "two/deep", "two/directory"):
        memory.directory(directory)
    for number in range(200):
        memory.file(f"one/z{number}", b"stays")
    memory = generation(1, memory)
    served = mounted(memory)
    shared = workplace / "work" / "seen"
    shared.write_bytes(bytes(8))
    seconds = 6.0
    readers = [python(OBSERVE, served.mount, shared, seconds) for _ in range(4)]
    end = time.monotonic() + seconds - 1
    number = 1
    while time.monotonic() < end:
        number += 1
        memory = generation(number, memory)
        served("refresh", memory)
    counts = [reader.communicate(timeout=60)[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0] * 4
    assert number > 1
    assert min(map(int, counts)) > 0


def test_a_refresh_leaves_alone_what_stays(mounted: Callable[..., Mounted]) -> None:
    memory = Memory()
    memory.directory("one")
    memory.directory("stays")
    memory.file("one/file", b"old")
    memory.file("stays/file", b"stays")
    served = mounted(memory)
    old = (served.mount / "one/file").open("rb")
    assert (served.mount / "stays/file").read_bytes() == b"stays"
    assert not (served.mount / "one/new").exists()
    script = "import os; input(); print(os.getcwd())"
    inside = python(script, cwd=served.mount / "stays", stdin=subprocess.PIPE)
    new = deepcopy(memory)
    new.file("one/file", b"newer")
    new.file("one/new", b"added")
    served("refresh", new)
    assert (served.mount / "one/file").read_bytes() == b"newer"
    assert (served.mount / "one/new").read_bytes() == b"added"
    assert sorted(os.listdir(served.mount / "one")) == ["file", "new"]
    assert old.read() == b"old"
    assert served("forgotten") == []
    old.close()
    until(lambda: served("forgotten") == [memory.number("one/file")])
    assert inside.communicate("\n", timeout=60)[0] == f"{served.mount / 'stays'}\n"
    asked = served("operations")
    assert (served.mount / "stays/file").read_bytes() == b"stays"
    assert set(served("operations") - asked) <= {"IOCTL"}  # Python: is it a terminal?


def test_a_listing_goes_on_as_it_began(mounted: Callable[..., Mounted]) -> None:
    memory = Memory()
    memory.directory("many")
    for number in range(3000):
        memory.file(f"many/{number:04}", b"")
    served = mounted(memory)
    with os.scandir(served.mount / "many") as entries:
        names = [next(entries).name]
        new = deepcopy(memory)
        del new.names[new.number("many")][b"0001"]
        new.file("many/0000a", b"")
        new.file("many/2999a", b"")
        served("refresh", new)
        names += [entry.name for entry in entries]
    assert names == [f"{number:04}" for number in range(3000)]
    for _ in range(2):
        listed = sorted(os.listdir(served.mount / "many"))
        assert listed == sorted(os.fsdecode(name) for name, _ in new.entries(new.number("many")))


def test_reads_go_on_when_the_server_is_started_again(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    late = [memory.file(f"late{number}", f"{number}".encode() * 5000) for number in range(10)]
    memory.missing = set(late)
    served = mounted(memory)
    assert (served.mount / "page").read_bytes()
    script = "import sys; print(len(open(sys.argv[1], 'rb').read()))"
    readers = [python(script, served.mount / f"late{number}") for number in range(10)]
    until(lambda: served("waiting") == 10)
    session = served("session")
    served.kill()
    looking = python("import os, sys; print(os.listdir(sys.argv[1]))", served.mount / "package")
    time.sleep(0.2)
    assert all(reader.poll() is None for reader in [*readers, looking])
    served.start(memory, session=session)
    assert looking.communicate(timeout=60)[0] == "['linked', 'module.py']\n"
    until(lambda: served("waiting") == 10)
    readers[0].kill()
    assert code(readers[0]) == -signal.SIGKILL
    for number in late:
        served("arrive", number)
    for reader in readers[1:]:
        assert reader.communicate(timeout=60)[0] == "5000\n"
    asked = served("operations")
    assert asked["INIT"] == asked["OPEN"] == 0
    assert (served.mount / "page").read_bytes() == b"p" * 4096
    assert served("references")[memory.number("program")] == 1  # it may have been told before
    drop_caches()
    time.sleep(0.2)
    assert served("forgotten") == []


def test_killed_again_and_again_under_load(mounted: Callable[..., Mounted]) -> None:
    memory = Memory()
    for number in range(400):
        memory.file(f"file{number}", f"{number}".encode() * 500)
    served = mounted(memory)
    script = """
        import os, random, sys
        for turn in range(int(sys.argv[2])):
            open("/proc/sys/vm/drop_caches", "w").write("2")
            for number in random.sample(range(400), 200):
                found = open(f"{sys.argv[1]}/file{number}", "rb").read()
                assert found == f"{number}".encode() * 500
        """
    served("waiting")
    readers = [python(script, served.mount, 6) for _ in range(3)]
    for _ in range(5):
        time.sleep(0.1)
        session = served("session")
        served.kill()
        served.start(memory, session=session, counted_from=len(memory.inodes))
        served("waiting")
    assert [code(reader, 60) for reader in readers] == [0] * 3


def test_as_an_ordinary_user(workplace: Path) -> None:
    if not Path("/dev/fuse").stat().st_mode & stat.S_IWOTH:
        pytest.skip("/dev/fuse is for root only")
    workplace.chmod(0o755)
    mount = workplace / "mount"
    mount.mkdir()
    os.chown(mount, 65534, 65534)
    process, control = spawn(str(mount), [], NOBODY)
    control.send((example(), {}))
    try:
        until(lambda: points.mounted(str(mount)) == "fuse.wheelmount")
        read = [*NOBODY, "cat", str(mount / "package/module.py")]
        done = subprocess.run(read, capture_output=True, check=False, timeout=60)
        assert (done.stdout, done.stderr) == (b"print('module')\n", b"")
        options = subprocess.run(["findmnt", "-no", "OPTIONS", mount], capture_output=True)
        assert options.stdout.startswith(b"ro,nosuid,nodev,")
        subprocess.run([*NOBODY, "fusermount3", "-u", mount], check=True, timeout=60)
        assert process.wait(60) == 0
    finally:
        points.unmount(str(mount), force=True)
        process.kill()
        process.wait()
        control.close()


def test_what_keeps_an_ordinary_user_from_mounting(workplace: Path) -> None:
    script = """
        import sys
        from wheelmount.errors import UnavailableError
        from wheelmount.mount.serve.fuse.attach import attach
        try: attach(sys.argv[1])
        except UnavailableError as error: print(error.message, "|", error.hint)
        """
    arguments = [sys.executable, "-c", textwrap.dedent(script), str(workplace)]
    done = subprocess.run([*NOBODY, *arguments], capture_output=True, cwd=CHECKOUT, check=True)
    assert b"cannot mount at" in done.stdout
    assert b"fusermount3:" in done.stdout


def test_a_mount_point_that_is_none() -> None:
    with pytest.raises(UnavailableError, match="cannot mount at /nowhere: No such file"):
        attach("/nowhere")


def test_read_ahead_can_be_raised(mounted: Callable[..., Mounted]) -> None:
    served = mounted(example())
    assert os.listdir(served.mount)
    set_read_ahead(str(served.mount), 1024)
    device = os.stat(served.mount).st_dev
    bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert bdi.read_text() == "1024\n"
    with pytest.raises(OSError):
        set_read_ahead("/nowhere", 1024)


def test_a_forced_unmount_does_not_end_what_waits(mounted: Callable[..., Mounted]) -> None:
    memory = example()
    memory.missing = {memory.number("page")}
    served = mounted(memory)
    reader = python("import sys; print(len(open(sys.argv[1], 'rb').read()))", served.mount / "page")
    until(lambda: served("waiting"))
    points.unmount(str(served.mount), force=True)
    assert reader.poll() is None
    served("arrive", memory.number("page"))
    assert reader.communicate(timeout=60)[0] == "4096\n"
    assert served.process.wait(60) == 0  # now nobody uses it
