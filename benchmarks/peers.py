"""Ways to show a directory, each behind the same few operations."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from benchmarks import system
from benchmarks.system import BenchmarkError, call

ADAPTERS = ("pyfuse3", "devfuse", "bind")
"""Rungs of wheelmount, by the names that its setting ``adapter`` knows them by."""

UNBUILT = "not built"
"""Why an adapter that wheelmount does not know yet is left out."""


class Backend:
    """One way to show a tree, in a directory of its own.

    Args:
        folder: for the mount point and whatever else it needs; on tmpfs.
        mark: the benchmark's directory, by which its processes are known.
    """

    name = ""
    arrives = False
    """Whether it can be used before all bytes are there."""

    def __init__(self, folder: Path, mark: Path) -> None:
        self.folder = folder
        self.mark = mark
        self.mntpoint = folder / "mnt"
        self.env = {**os.environ, system.MARK: str(mark)}

    def check(self) -> str | None:
        """Why this cannot be measured here, or None."""
        return None

    def up(self, source: Path) -> Path:
        """Show ``source`` with all bytes there and none in the kernel's cache; where it is."""
        raise NotImplementedError

    def down(self) -> None:
        """Take down what ``up`` or ``start`` made; harmless if there is nothing."""

    def clear(self) -> None:
        """Take away what a measurement that failed may have left, whoever uses it."""
        system.end(self.mark)
        system.unmount_below(self.folder)

    def confirm(self) -> None:
        """Check that ``up`` did what it should."""

    def cool(self, _file: Path) -> None:
        """Have the kernel forget what it caches of one file in the mount."""
        system.probe("forget", _file)

    def start(self, source: Path) -> subprocess.Popen[bytes]:
        """Begin to mount and to deliver ``source``; only where ``arrives``."""
        raise NotImplementedError

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until all bytes of what ``start`` began are there."""
        raise NotImplementedError

    def store(self) -> int:
        """Bytes of memory in which it keeps what it shows, outside of its processes."""
        return 0


class Native(Backend):
    """The source itself, on tmpfs. It has no cold: its bytes lie in the kernel's cache."""

    name = "tmpfs"

    def up(self, source: Path) -> Path:
        self._source = source
        return source

    def cool(self, _file: Path) -> None:
        pass

    def store(self) -> int:
        return system.allocated(self._source)


class Wheelmount(Backend):
    """``wheelmount mount SOURCE MNTPOINT --hosts local:1`` with one adapter."""

    arrives = True

    def __init__(self, folder: Path, mark: Path, adapter: str) -> None:
        super().__init__(folder, mark)
        self.name = f"wheelmount-{adapter}"
        self._adapter = adapter
        # Sockets lie in the runtime directory, and their paths have 107 bytes at most. The store
        # stays where it is by default: a directory of tmpfs would not have its huge pages.
        self._runtime = mark / "runtime"
        places = {"RUNTIME_DIR": self._runtime}
        places |= {"CACHE_DIR": folder / "cache", "STATE_DIR": folder / "state"}
        for name, place in places.items():
            place.mkdir(exist_ok=True)
            self.env[f"WHEELMOUNT_{name}"] = str(place)
        self.env["WHEELMOUNT_ADAPTER"] = adapter

    def _command(self, *words: str | Path) -> list[str]:
        return [sys.executable, "-m", "wheelmount.cli.main", *map(str, words)]

    def _mount(self, source: Path) -> list[str]:
        return self._command("mount", source, self.mntpoint, "--hosts", "local:1", "--quiet")

    def check(self) -> str | None:
        tiny = self.folder / "tiny"
        tiny.mkdir()
        (tiny / "file").write_text("file\n")
        try:
            call(self._mount(tiny), self.env)
            shown = self._shown()
        except BenchmarkError as error:
            unknown = ("no adapter", "Invalid value for '--adapter'")
            return UNBUILT if any(words in str(error) for words in unknown) else str(error)
        finally:
            self.down()
        return None if shown == self._adapter else UNBUILT  # the setting was not known

    def _shown(self) -> str:
        status = json.loads(call(self._command("status", "--json"), self.env))
        return str(status["mounts"][0]["adapter"])

    def up(self, source: Path) -> Path:
        call(self._mount(source), self.env)
        return self.mntpoint

    def confirm(self) -> None:
        if (shown := self._shown()) != self._adapter:
            raise BenchmarkError(f"it was shown by {shown}")

    def start(self, source: Path) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            self._mount(source), env=self.env, stdin=quiet, stdout=quiet, stderr=quiet
        )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait(system.TIMEOUT):
            raise BenchmarkError(f"wheelmount mount: code {process.returncode}")

    def down(self) -> None:
        if system.mounted(self.mntpoint):
            call(self._command("umount", "--force", self.mntpoint), self.env)

    def store(self) -> int:
        head = f"{self._runtime}/"
        stores = {path for path, kind in system.mounts() if path.startswith(head)}
        used = 0
        for usage in map(os.statvfs, stores):
            used += (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        return used


class Monarch(Backend):
    """``monarch.remotemount`` with one host, in a process of its own."""

    name = "monarch"
    arrives = True
    _process: subprocess.Popen[bytes] | None = None

    def start(self, source: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.monarch_peer", str(source), str(self.mntpoint)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**self.env, "MONARCH_FILE_LOG_LEVEL": "error"},
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        return self._process

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        said = process.stdout
        ready = said is not None and select.select([said], [], [], system.TIMEOUT)[0]
        if not said or not ready or said.readline() != b"open\n":
            lines = (self.folder / "log").read_text(errors="replace").splitlines()
            raise BenchmarkError(f"it did not open: {'; '.join(lines[-1:])}")
        # Small files are there now; large ones come when they are read.
        system.probe("fault", self.mntpoint)

    def up(self, source: Path) -> Path:
        self.finish(self.start(source))
        return self.mntpoint

    def down(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate(timeout=60)  # the end of its input has it unmount
            if process.returncode:
                self.clear()
