"""Copy files that commands left on hosts to the client (``--collect``).

``python -m wheelmount.hosts.collection`` sends them from a host, as an archive (tar) on its
standard output. The client does not trust hosts: no file may be written outside the directory of
its host, and no link may lead out of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from wheelmount.child import last_words
from wheelmount.errors import InputError, SourceError, TransferError, WheelmountError
from wheelmount.owned import make_folders

if TYPE_CHECKING or sys.version_info >= (3, 12):
    import tarfile
else:  # older ones cannot tell what may be unpacked: Debian 12's 3.11.2 is one
    from backports import tarfile

VARIABLE = "WHEELMOUNT_OUTPUT"
"""Variable with a command's private directory for files to collect."""

OUTPUT = f"${VARIABLE}"
"""Prefix of paths in that directory. Other paths start at the host's root, or at the directory in
which the command starts."""

ARCHIVE = ""
"""Stands for a path: the archive beside that directory, which the command itself has made."""

PIECE = 1 << 20
"""Bytes that are read or written at a time."""

_TAR: Any = {"copybufsize": PIECE, "encoding": "utf-8", "errors": "surrogateescape"}
"""Of both ends of an archive."""

HEADER = 64 << 10
"""Most bytes of a member's name, or of its other headers."""

LONGEST = 4095
"""Most bytes of a path (PATH_MAX)."""

LINKS = 100_000
"""Most symbolic links of a host, which are kept in memory until the end."""

NAMES = 64 << 20
"""Most bytes of the names and targets of these links together."""

KINDS = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
"""What is sent."""

NAMED = 3
"""Number of refused or omitted files that a message names."""

SAID = 16 << 10
"""Bytes that are kept of a host's messages."""


@dataclass(frozen=True, slots=True)
class Collection:
    """The files to collect from all hosts of a command, and their destination.

    Attributes:
        path: path on a host or in its container, relative to the directory in which the command
            starts; may begin with ``OUTPUT``.
        directory: destination, with a directory for each host, by its name.
        overwrite: whether these directories may contain files.
    """

    path: str
    directory: Path
    overwrite: bool = False

    @property
    def output(self) -> bool:
        """Whether the path is in a command's private directory for files to collect."""
        return is_output(self.path)

    def prepare(self, hosts: Sequence[str]) -> None:
        """Make the directories.

        Raises:
            InputError: a directory is not empty.
            SourceError: a directory cannot be made.
        """
        for host in hosts:
            place = self.directory / host
            try:
                make_folders(place)
                occupied = any(place.iterdir())
            except OSError as error:
                raise SourceError(
                    f"nothing can be collected in {place}: {error.strerror}",
                    hint="give another directory",
                ) from None
            if occupied and not self.overwrite:
                raise InputError(
                    f"{place} has something in it already",
                    hint="give another directory, or --overwrite",
                )

    def open(self, host: str) -> Inbox:
        """Return the receiver of a host's archive."""
        return Inbox(self.directory / host)


class Inbox:
    """Unpacks a host's archive as it arrives; an ``Output``.

    Args:
        directory: destination; must exist.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._said = b""
        self._refused: list[str] = []
        self._refusals = 0
        self._failure: WheelmountError | None = None
        reading, self._writing = os.pipe()
        with contextlib.suppress(OSError):  # more than this user may have in all pipes
            fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIECE)
        # A daemon: a disk may make it wait for ever.
        self._thread = threading.Thread(target=self._work, args=(reading,), daemon=True)
        self._thread.start()

    def __call__(self, _host: str, stream: str, data: bytes) -> None:
        """Receive a part of the archive.

        Raises:
            TransferError: the archive cannot be unpacked; the rest is not needed.
        """
        if stream == "stderr":
            self._said = (self._said + data)[-SAID:]
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._writing, rest) :]
        except BrokenPipeError:
            raise TransferError("the rest is not wanted") from None

    def close(self, code: int | None) -> WheelmountError | None:
        """Wait until everything is unpacked.

        Args:
            code: exit code of the sender, not 0 if it could not send everything; None if the rest
                was not needed.

        Returns:
            An error if files are missing in the directory; None if all are there.
        """
        os.close(self._writing)
        self._thread.join()
        refused = f"not all that was sent is taken: {_some(self._refused, self._refusals)}"
        if code:
            said = last_words(self._said, f"it was not sent: exit code {code}")
            return SourceError(f"{said}; {refused}" if self._refused else said)
        if self._failure is None and self._refused:
            return TransferError(refused)
        return self._failure

    def _work(self, reading: int) -> None:
        try:
            with open(reading, "rb", buffering=0) as file:
                self._unpack(file)
                while file.read(PIECE):  # the padding of the last block
                    pass
        except OSError as error:
            self._failure = SourceError(
                f"{self._directory} cannot be written: {error.strerror or error}",
                hint="is there space left?",
            )
        except Exception as error:  # whatever a host sends that tarfile does not expect
            self._failure = TransferError(f"what was sent is no archive: {error!r}")

    def _unpack(self, file: IO[bytes]) -> None:
        links: list[tarfile.TarInfo] = []
        names = 0
        with tarfile.open(
            fileobj=file, mode="r|", bufsize=PIECE, tarinfo=_Member, **_TAR
        ) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would hold all of them
                member.pax_headers = {}
                texts = member.name, member.linkname
                length = [len(text.encode(errors="surrogateescape")) for text in texts]
                if max(length) > LONGEST:
                    self._refuse(member.name[:80], "its name is too long")
                elif not member.issym():
                    self._place(archive, member)
                else:
                    links.append(member)
                    names += sum(length)
                    if len(links) > LINKS or names > NAMES:
                        raise tarfile.ReadError("it has too many symbolic links")
            # Last, so that a link may come before its target.
            placed = [member for member in links if self._place(archive, member)]
        for member in placed:
            self._check(self._directory / member.name)

    def _place(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
        """Write a member; return False, with a note, if it is refused."""
        path = PurePosixPath(member.name)
        try:
            if path.is_absolute() or ".." in path.parts or not (path.parts or member.isdir()):
                raise tarfile.OutsideDestinationError(member, member.name)
            checked = tarfile.data_filter(member, str(self._directory))
            if self._has_link(path.parent):
                raise tarfile.OutsideDestinationError(member, member.name)
            if member.islnk() and self._has_link(PurePosixPath(checked.linkname)):
                raise tarfile.LinkOutsideDestinationError(member, checked.linkname)
            place = self._directory / path
            if not member.isdir() and (place.is_symlink() or not place.is_dir()):
                place.unlink(missing_ok=True)  # which another name may share, or be a pipe
            make_folders(place if member.isdir() else place.parent)
            if member.isfile():
                archive.extract(member, self._directory, filter="data")
            # Not by tarfile, which would search the rest of the archive for the target of a link.
            elif member.issym():
                place.symlink_to(member.linkname)  # later tarfiles change the text of it
            elif member.islnk():
                place.hardlink_to(self._directory / checked.linkname)
        except tarfile.SpecialFileError:
            self._refuse(member.name, "a device or a pipe")
        except tarfile.FilterError:
            self._refuse(member.name, "it leads out")
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            self._refuse(member.name, "something else is in its place")
        except FileNotFoundError:
            self._refuse(member.name, "a link to what has not come")
        else:
            return True
        return False

    def _has_link(self, path: PurePosixPath) -> bool:
        """Return whether a path in the destination, or a directory above it, is a symbolic link.

        It may lead out, whatever tarfile says of it: Pythons before 3.13.4 and 3.12.11 believe
        links that they cannot resolve (CVE-2025-4517), and a hard link to a symbolic one has
        another directory, from which its target is found.
        """
        places = [place for place in (path, *path.parents) if place.parts]
        return any((self._directory / place).is_symlink() for place in places)

    def _check(self, path: Path) -> None:
        """Remove a link that leads out through other links."""
        own = os.path.realpath(self._directory)
        try:
            real = os.path.realpath(path, strict=True)
        except FileNotFoundError:
            real = os.path.realpath(path)
        except OSError:
            real = "/"
        if path.is_symlink() and os.path.commonpath([own, real]) != own:
            path.unlink()
            self._refuse(path.name, "it leads out")

    def _refuse(self, name: str, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= NAMED:
            shown = name.encode(errors="backslashreplace").decode()
            self._refused.append(f"{shown!r} ({reason})")


class _Member(tarfile.TarInfo):
    """A member of an archive, with a limit on the memory of its headers."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        of_all = self.type == tarfile.XGLTYPE  # each adds to what is kept
        of_one = not self.isreg() and self.size > HEADER
        if of_all or of_one or self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a header in it is too large")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]

    def _proc_gnusparse_10(self, *_given: object) -> None:
        raise tarfile.ReadError("a header in it is too large")


def is_output(path: str) -> bool:
    """Return whether a path is ``OUTPUT``, or below it."""
    return path == OUTPUT or path.startswith(f"{OUTPUT}/")


def _some(texts: Sequence[str], count: int) -> str:
    more = count - NAMED
    return "; ".join(texts[:NAMED]) + (f"; and {more} more" if more > 0 else "")


# --- on the host ----------------------------------------------------------------------------------


def main() -> int:
    """Send the files at a path as an archive; exit with 1 and a reason if some are missing."""
    path, start, output = sys.argv[1:]
    try:
        if path == ARCHIVE:
            archive, lacking = Path(f"{output}.tar"), Path(f"{output}.lacking")
            if not archive.exists():
                print(
                    "nothing came of its container, whose standard error says why", file=sys.stderr
                )
                return 1
            with archive.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer, PIECE)
            if not lacking.exists():
                return 0
            with lacking.open(errors="replace") as said:
                lines = [line.strip()[:SAID] for line in islice(said, NAMED)]
            print(_some(lines, len(lines)) or "not all of it could be read", file=sys.stderr)
            return 1
        found = _find(path, start, output)
        left_out = [] if found is None else _send(found)
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"{path} cannot be sent: {error.strerror or error}", file=sys.stderr)
        return 1
    if found is None:
        print(f"there is nothing at {path}", file=sys.stderr)
    elif left_out:
        print(f"left out: {_some(left_out, len(left_out))}", file=sys.stderr)
    return int(found is None or bool(left_out))


def _find(path: str, start: str, output: str) -> str | None:
    if not is_output(path):
        found = os.path.realpath(Path(start, path))
    else:
        found, own = os.path.realpath(output + path[len(OUTPUT) :]), os.path.realpath(output)
        if os.path.commonpath([own, found]) != own:  # by a link that may be a container's
            return None
    return found if os.path.lexists(found) else None


def _send(top: str) -> list[str]:
    """Send a file, or the contents of a directory; return the files that cannot be sent."""
    left_out = []

    def walk() -> Iterator[str]:
        if not Path(top).is_dir():
            yield top
            return
        for folder, directories, files in os.walk(top, onerror=unreadable):
            for name in [*directories, *files]:
                yield f"{folder}/{name}"

    def unreadable(error: OSError) -> None:
        left_out.append(f"{os.path.relpath(error.filename, top)} ({error.strerror})")

    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", bufsize=PIECE, **_TAR) as archive:
        for path in walk():
            name = os.path.relpath(path, top) if path != top else Path(top).name
            archive.members = []  # type: ignore[attr-defined]  # it would hold all of them
            with contextlib.ExitStack() as stack:
                try:
                    member = archive.gettarinfo(path, name)
                    plain = member is not None and member.isreg()
                    file = stack.enter_context(Path(path).open("rb")) if plain else None
                except OSError as error:
                    left_out.append(f"{name} ({error.strerror})")
                    continue
                if member is None or member.type not in KINDS:
                    left_out.append(f"{name} (a device, a pipe or a socket)")
                else:
                    archive.addfile(member, file)
    return left_out


if __name__ == "__main__":
    sys.exit(main())
