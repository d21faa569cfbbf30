#!/usr/bin/env python3
"""Install apptainer on a Debian that does not package it, from Debian sid's own build.

Sid's binaries want glibc 2.38 for two functions only, ``__isoc23_strtol`` and
``__isoc23_strtoul``: the C23 twins of ``strtol`` and ``strtoul``, which every glibc has. This takes
the package, points those references at the plain functions, repacks it under its own version and
lets apt install it. No other package comes from sid, and the C library stays what it was.

    install-apptainer.py             as root; does nothing where apptainer is there already
    APPTAINER_DEB=file.deb …         take that package instead of downloading sid's

Standard library only: it runs before anything else of the project is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

TWIN = b"__isoc23_"
"""What a C23 function's symbol has in front of the name of its plain twin."""

PLAIN = {b"strtol", b"strtoll", b"strtoul", b"strtoull"}
"""Twins that differ in one thing only: the C23 ones also read ``0b`` as a prefix of base 2."""

HELPERS = ["e2fsprogs", "fakeroot", "fuse-overlayfs", "fuse2fs", "squashfuse"]
"""What apptainer calls for ordinary users and does not depend on."""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

SHT_DYNSYM, SHT_VERNEED, SHT_VERSYM = 11, 0x6FFFFFFE, 0x6FFFFFFF


class UnfitError(Exception):
    """The package cannot be made to fit this machine."""


# --- the binaries ---------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section header of a 64-bit ELF file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class Version(NamedTuple):
    """One version of a library that a file needs (``Elf64_Vernaux``), and where it is noted."""

    offset: int
    hash: int
    index: int
    name_offset: int
    name: str


class Elf:
    """The few tables of a 64-bit little-endian ELF file that say which symbols it wants."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        self.sections = [
            Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + i * size))
            for i in range(count)
        ]

    def section(self, kind: int) -> Section | None:
        return next((s for s in self.sections if s.type == kind), None)

    def string(self, owner: Section, offset: int) -> bytes:
        start = self.sections[owner.link].offset + offset
        return bytes(self.data[start : self.data.index(0, start)])

    def versions(self) -> Iterator[Version]:
        """Every library version the file needs."""
        needs = self.section(SHT_VERNEED)
        if needs is None:
            return
        library = needs.offset
        for _ in range(needs.info):
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, library)
            at = library + first
            for _ in range(count):
                digest, _, index, name, step = struct.unpack_from("<IHHII", self.data, at)
                yield Version(at, digest, index, name, self.string(needs, name).decode())
                at += step
            library += following

    def symbols(self) -> Iterator[tuple[int, int, bytes]]:
        """Every dynamic symbol: offset of its entry, index of its version, name."""
        symbols, indices = self.section(SHT_DYNSYM), self.section(SHT_VERSYM)
        if symbols is None or indices is None:
            return
        for number in range(symbols.size // 24):
            at = symbols.offset + 24 * number
            (name,) = struct.unpack_from("<I", self.data, at)
            (index,) = struct.unpack_from("<H", self.data, indices.offset + 2 * number)
            yield at, index & 0x7FFF, self.string(symbols, name)


def glibc(version: str) -> tuple[int, ...] | None:
    """The number in ``GLIBC_2.38``; None for the versions of other libraries."""
    found = re.fullmatch(r"GLIBC_(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else None


def retarget(data: bytearray, limit: tuple[int, ...]) -> list[str]:
    """Make an ELF file do with glibc ``limit``, in place.

    A symbol keeps its version's slot; the slot itself is renamed to the oldest version of glibc
    that the file uses, in which the plain twins live.

    Returns:
        The symbols that were changed; empty where the file fits as it is.

    Raises:
        UnfitError: it uses something newer than ``limit`` that has no plain twin.
    """
    elf = Elf(data)
    libc = [(number, v) for v in elf.versions() if (number := glibc(v.name))]
    newer = {v.index: v for number, v in libc if number > limit}
    if not newer:
        return []
    changed = []
    for at, index, name in elf.symbols():
        if index not in newer:
            continue
        if not name.startswith(TWIN) or name[len(TWIN) :] not in PLAIN:
            raise UnfitError(f"it calls {name.decode()}, which came with {newer[index].name}")
        (start,) = struct.unpack_from("<I", data, at)
        struct.pack_into("<I", data, at, start + len(TWIN))
        changed.append(name.decode())
    _, oldest = min(libc)
    for version in newer.values():
        struct.pack_into("<I", data, version.offset, oldest.hash)
        struct.pack_into("<I", data, version.offset + 8, oldest.name_offset)
    return changed


# --- the package ----------------------------------------------------------------------------------


def fetch(folder: Path) -> Path:
    """Download sid's package; apt checks its signature. Nothing of the system's apt is touched."""
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (apt / name).mkdir(parents=True)
    (apt / "sources" / "sid.list").write_text(
        f"deb [signed-by={KEYRING}] {mirror()} sid main\n", encoding="ascii"
    )
    options = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": str(apt / "sources"),
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": str(apt / "lists"),
        "Dir::Cache": str(apt / "cache"),
        # The folder is private, so apt's own user could not write into it.
        "APT::Sandbox::User": "root",
    }
    apt_get = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt_get, "update"])
    run([*apt_get, "download", "apptainer"], cwd=folder)
    return next(folder.glob("apptainer_*.deb"))


def mirror() -> str:
    """The Debian mirror this machine uses."""
    targets = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(SITE)",
            "Created-By: Packages",
            "Origin: Debian",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    sites = [s for s in targets.stdout.split() if not s.rstrip("/").endswith("-security")]
    return sites[0] if sites else "http://deb.debian.org/debian"


def adapt(package: Path, folder: Path) -> Path:
    """Make ``package`` fit this machine's glibc.

    Returns:
        The repacked package.

    Raises:
        UnfitError: see `retarget`.
    """
    have = os.confstr("CS_GNU_LIBC_VERSION") or ""
    limit = tuple(map(int, have.removeprefix("glibc ").split(".")))
    tree = folder / "tree"
    run(["dpkg-deb", "--raw-extract", str(package), str(tree)])
    sums = []
    for file in sorted(tree.rglob("*")):
        if file.is_symlink() or not file.is_file() or file.is_relative_to(tree / "DEBIAN"):
            continue
        data = bytearray(file.read_bytes())
        if data[:6] == b"\x7fELF\x02\x01" and (changed := retarget(data, limit)):
            mode = file.stat().st_mode
            file.write_bytes(data)
            file.chmod(mode)
            say(f"{file.name}: {', '.join(changed)} replaced by the plain function")
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        sums.append(f"{digest}  {file.relative_to(tree)}\n")
    (tree / "DEBIAN" / "md5sums").write_text("".join(sums), encoding="utf-8")
    control = tree / "DEBIAN" / "control"
    text = control.read_text(encoding="utf-8")
    text = re.sub(r"^(Version: .*)$", r"\1~retargeted1", text, flags=re.MULTILINE)
    text = re.sub(r"\blibc6 \(>= [^)]*\)", f"libc6 (>= {'.'.join(map(str, limit))})", text)
    # No longer what those sources build.
    text = re.sub(r"^(?:Static-)?Built-Using: .*\n", "", text, flags=re.MULTILINE)
    control.write_text(text, encoding="utf-8")
    out = folder / "apptainer-retargeted.deb"
    # It is installed once and thrown away: no time for compressing it.
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(out)])
    return out


def install(package: Path) -> None:
    """Let apt install ``package``, what it depends on, and apptainer's helpers.

    Raises:
        UnfitError: something it depends on is not to be had on this Debian.
    """
    packages = [str(package), *(h for h in HELPERS if candidate(h))]
    apt_get = ["apt-get", "-qq", "--no-install-recommends", "install"]
    if subprocess.run([*apt_get, "--simulate", *packages], stdout=subprocess.DEVNULL).returncode:
        raise UnfitError("it depends on something this Debian does not have")
    run([*apt_get, "--yes", *packages], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def candidate(package: str) -> bool:
    """Whether this machine's own apt sources have ``package``."""
    policy = subprocess.run(
        ["apt-cache", "policy", package], stdout=subprocess.PIPE, text=True, check=False
    )
    return "Candidate:" in policy.stdout and "Candidate: (none)" not in policy.stdout


# --- the program ----------------------------------------------------------------------------------


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run ``command``; its output is shown only if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        fail(f"{command[0]} failed ({done.returncode})")


def say(text: str) -> None:
    print(f"install-apptainer: {text}", file=sys.stderr)


def fail(text: str) -> NoReturn:
    say(f"error: {text}")
    sys.exit(1)


def main() -> None:
    if shutil.which("apptainer") or shutil.which("singularity"):
        return
    if os.getuid() != 0:
        fail("installing it needs root")
    given = os.environ.get("APPTAINER_DEB")
    if not given and not Path(KEYRING).exists():
        fail("Debian's keys are missing: apt-get install debian-archive-keyring")
    with tempfile.TemporaryDirectory(prefix="apptainer-") as name:
        folder = Path(name)
        package = Path(given) if given else fetch(folder)
        say(f"taking {package.name}")
        try:
            install(adapt(package, folder))
        except UnfitError as reason:
            fail(
                f"{package.name} does not fit this machine: {reason}; "
                "install apptainer yourself, or give an older package as APPTAINER_DEB=file.deb"
            )


if __name__ == "__main__":
    main()
