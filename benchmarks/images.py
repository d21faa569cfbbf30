"""Images of a directory, made once and then mounted: peers that need all bytes first."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks import system
from benchmarks.peers import Backend
from benchmarks.system import BenchmarkError, call


class Squashfs(Backend):
    """An uncompressed squashfs image on tmpfs, mounted by the kernel through a loop device."""

    name = "squashfs-loop"
    tools: tuple[str, ...] = ("mksquashfs", "mount")
    packages = "squashfs-tools"
    suffix = ".squashfs"

    def check(self) -> str | None:
        missing = [tool for tool in self.tools if shutil.which(tool) is None]
        if missing:
            return f"no {', '.join(missing)}: apt-get install {self.packages}"
        if os.geteuid() != 0 and "mount" in self.tools:
            return "only root may mount it"
        return None

    def image(self, source: Path) -> Path:
        """The image of ``source``, made the first time, and shared where the kind is the same."""
        path = self.folder.parent / f"image{self.suffix}"
        if not path.exists():
            self.build(source, path)
        return path

    def build(self, source: Path, path: Path) -> None:
        """Make an image."""
        plain = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet")
        call(["mksquashfs", source, path, *plain])

    def attach(self, image: Path) -> None:
        """Mount an image."""
        call(["mount", "-o", "loop,ro", image, self.mntpoint])

    def up(self, source: Path) -> Path:
        self.mntpoint.mkdir(exist_ok=True)
        self._image = self.image(source)
        self.attach(self._image)
        return self.mntpoint

    def cool(self, _file: Path) -> None:
        self.down()  # a loop device caches the image too
        self.attach(self._image)

    def down(self) -> None:
        if system.mounted(self.mntpoint):
            call(["umount", self.mntpoint])

    def store(self) -> int:
        return self._image.stat().st_blocks * 512


class Squashfuse(Squashfs):
    """The same image through FUSE, by squashfuse's low-level server."""

    name = "squashfuse"
    tools = ("mksquashfs", "squashfuse_ll", "fusermount3")
    packages = "squashfs-tools squashfuse fuse3"

    def attach(self, image: Path) -> None:
        subprocess.run(  # call() would wait for the daemon, which keeps its output open
            ["squashfuse_ll", image, self.mntpoint],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        if not system.mounted(self.mntpoint):
            raise BenchmarkError("squashfuse_ll did not mount the image")


class Erofs(Squashfs):
    """An EROFS image whose data device is one packed file on tmpfs, mounted by the kernel."""

    name = "erofs"
    tools = ("mkfs.erofs", "mount")
    packages = "erofs-utils"
    suffix = ".erofs-data"

    def build(self, source: Path, path: Path) -> None:
        call(["mkfs.erofs", "--chunksize=4096", f"--blobdev={path}", self._names(path), source])

    def attach(self, image: Path) -> None:
        system.mount(self._names(image), self.mntpoint, "erofs", f"device={image}")

    def _names(self, image: Path) -> Path:
        # Not on tmpfs, where the kernel cannot mount an image from (ENOTBLK): only its data may.
        return self.mark / f"{image.stem}.erofs"
