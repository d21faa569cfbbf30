"""Install apptainer on a Debian that does not package it, from the build of Debian sid.

Sid's binaries require glibc 2.38 for two functions only, ``__isoc23_strtol`` and
``__isoc23_strtoul``: the C23 twins of ``strtol`` and ``strtoul``, which every glibc has. The
references to these twins are changed to the plain functions, the package is repacked under a
version of its own, and apt installs it. No other package comes from sid, and the C library stays as
it is.

Only the standard library is imported: ``examples/setup.sh`` runs this before it makes an
environment.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from wheelmount.errors import UnavailableError
from wheelmount.progress import SILENT, Progress

TWIN = b"__isoc23_"
"""Prefix of a C23 function's symbol, before the name of its plain twin."""

PLAIN = {b"strtol", b"strtoll", b"strtoul", b"strtoull"}
"""Twins that differ in one thing only: the C23 ones also read ``0b`` as a prefix of base 2."""

HELPERS = ["e2fsprogs", "fakeroot", "fuse-overlayfs", "fuse2fs", "squashfuse"]
"""Packages of programs that apptainer runs for ordinary users, and does not depend on."""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

SHT_DYNSYM, SHT_VERNEED, SHT_VERSYM = 11, 0x6FFFFFFE, 0x6FFFFFFF


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
    """One version of a library that a file needs (``Elf64_Vernaux``)."""

    offset: int
    hash: int
    number: int
    name_offset: int
    name: str


class Elf:
    """The tables of a 64-bit little-endian ELF file that name the symbols it needs."""

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
        """Yield each library version that the file needs."""
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
        """Yield each dynamic symbol: offset of its entry, number of its version, name."""
        symbols, indices = self.section(SHT_DYNSYM), self.section(SHT_VERSYM)
        if symbols is None or indices is None:
            return
        for number in range(symbols.size // 24):
            at = symbols.offset + 24 * number
            (name,) = struct.unpack_from("<I", self.data, at)
            (index,) = struct.unpack_from("<H", self.data, indices.offset + 2 * number)
            yield at, index & 0x7FFF, self.string(symbols, name)


def glibc(version: str) -> tuple[int, ...] | None:
    """Return the number in ``GLIBC_2.38``; None for versions of other libraries."""
    found = re.fullmatch(r"GLIBC_(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else None


def retarget(data: bytearray, limit: tuple[int, ...]) -> list[str]:
    """Change an ELF file so that it runs with glibc ``limit``, in place.

    A symbol keeps its version's slot; the slot itself is renamed to the oldest version of glibc
    that the file uses, in which the plain twins live.

    Returns:
        The symbols that were changed; empty where the file fits as it is.

    Raises:
        UnavailableError: it uses something newer than ``limit`` that has no plain twin.
    """
    elf = Elf(data)
    libc = [(number, v) for v in elf.versions() if (number := glibc(v.name))]
    newer = {v.number: v for number, v in libc if number > limit}
    if not newer:
        return []
    changed = []
    for at, index, name in elf.symbols():
        if index not in newer:
            continue
        if not name.startswith(TWIN) or name[len(TWIN) :] not in PLAIN:
            raise UnavailableError(f"it calls {name.decode()}, which came with {newer[index].name}")
        (start,) = struct.unpack_from("<I", data, at)
        struct.pack_into("<I", data, at, start + len(TWIN))
        changed.append(name.decode())
    _, oldest = min(libc)
    for version in newer.values():
        struct.pack_into("<I", data, version.offset, oldest.hash)
        struct.pack_into("<I", data, version.offset + 8, oldest.name_offset)
    return changed


# --- the package ----------------------------------------------------------------------------------


def install_apptainer(package: Path | None = None, progress: Progress = SILENT) -> None:
    """Install apptainer and the programs that it runs for ordinary users, as root.

    Args:
        package: a Debian package of apptainer; None to use this Debian's own, or else to download
            that of sid.
        progress: told each step.

    Raises:
        UnavailableError: apt failed, or the package does not fit this machine.
    """
    helpers = [name for name in HELPERS if available(name)]
    if package is None and available("apptainer"):
        install(["apptainer", *helpers], progress)
        return
    if package is None and not Path(KEYRING).exists():
        raise UnavailableError(
            "the keys of Debian are missing",
            hint="as root: apt-get install debian-archive-keyring",
        )
    with tempfile.TemporaryDirectory(prefix="apptainer-") as name:
        folder = Path(name)
        package = package or _download(folder, progress)
        progress.log(f"installing {package.name}")
        try:
            adapted = _adapt(package, folder, progress)
            if not _installable([str(adapted), *helpers]):
                raise UnavailableError("this Debian does not have what it depends on")
        except UnavailableError as reason:
            raise UnavailableError(
                f"{package.name} does not fit this machine: {reason}",
                hint="install apptainer yourself, or give another package by --apptainer",
            ) from None
        install([str(adapted), *helpers], progress)


def install(packages: Sequence[str], progress: Progress = SILENT) -> None:
    """Let apt install packages, given by name or by the path of a file.

    Raises:
        UnavailableError: apt failed.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run([*_INSTALL, "--yes", *packages], progress, env=environment)


def update(progress: Progress = SILENT) -> None:
    """Download this machine's lists of packages again.

    Raises:
        UnavailableError: apt failed.
    """
    _run(["apt-get", "-qq", "update"], progress)


def available(package: str) -> bool:
    """Return whether this machine's own apt sources have a package."""
    policy = _output(["apt-cache", "policy", package])
    return "Candidate:" in policy and "Candidate: (none)" not in policy


_INSTALL = ("apt-get", "-qq", "--no-install-recommends", "install")


def _installable(packages: Sequence[str]) -> bool:
    command = [*_INSTALL, "--simulate", *packages]
    return not subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


def _download(folder: Path, progress: Progress) -> Path:
    """Download sid's package; apt checks its signature. The settings of apt stay as they are."""
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (apt / name).mkdir(parents=True)
    (apt / "sources" / "sid.list").write_text(
        f"deb [signed-by={KEYRING}] {_mirror()} sid main\n", encoding="ascii"
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
    _run([*apt_get, "update"], progress)
    _run([*apt_get, "download", "apptainer"], progress, cwd=folder)
    return next(folder.glob("apptainer_*.deb"))


def _mirror() -> str:
    """Return the Debian mirror that this machine uses."""
    form = ["--format", "$(SITE)", "Created-By: Packages", "Origin: Debian"]
    targets = _output(["apt-get", "indextargets", *form])
    sites = [s for s in targets.split() if not s.rstrip("/").endswith("-security")]
    return sites[0] if sites else "http://deb.debian.org/debian"


def _adapt(package: Path, folder: Path, progress: Progress) -> Path:
    """Return a copy of a package that fits this machine's glibc.

    Raises:
        UnavailableError: a binary needs more of glibc than this machine's has.
    """
    have = os.confstr("CS_GNU_LIBC_VERSION") or ""
    limit = tuple(map(int, have.removeprefix("glibc ").split(".")))
    tree = folder / "tree"
    _run(["dpkg-deb", "--raw-extract", str(package), str(tree)], progress)
    sums = []
    for file in sorted(tree.rglob("*")):
        if file.is_symlink() or not file.is_file() or file.is_relative_to(tree / "DEBIAN"):
            continue
        data = bytearray(file.read_bytes())
        if data[:6] == b"\x7fELF\x02\x01" and (changed := retarget(data, limit)):
            mode = file.stat().st_mode
            file.write_bytes(data)
            file.chmod(mode)
            progress.log(f"{file.name}: {', '.join(changed)} replaced by the plain function")
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
    build = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(out)]
    _run(build, progress)
    return out


def _output(command: Sequence[str]) -> str:
    """Return the output of a command in English, whatever language this machine speaks."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, errors="replace", check=False
    )
    return done.stdout


def _run(
    command: Sequence[str],
    progress: Progress,
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        for line in done.stdout.splitlines():
            progress.log(line)
        raise UnavailableError(
            f"{command[0]} failed ({done.returncode})", hint="see its output above"
        )
