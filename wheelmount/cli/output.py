"""Output of commands on hosts: as it comes, in order, into files, or as JSON."""

from __future__ import annotations

import json
import os
import sys
from codecs import iterdecode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from io import RawIOBase
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from blake3 import blake3
from click import style

from wheelmount import config
from wheelmount.cli.console import ConsoleProgress
from wheelmount.cli.options import GivenPath, json_option
from wheelmount.errors import InputError, SourceError, TransferError, WheelmountError
from wheelmount.hosts.names import alike, expand
from wheelmount.owned import make_folders, opener

if TYPE_CHECKING:
    from wheelmount.hosts.commands import Output, Result, Results  # with Monarch
    from wheelmount.hosts.spec import HostSpec

HELD = 256 << 10
"""Bytes of a stream that are kept in memory; more go to a file."""

LINE = 64 << 10
"""Bytes of a line that are kept until it ends; of a longer one the part that is there is shown."""

PIECE = 1 << 20
"""Bytes of such a file that are printed at a time."""

SUFFIXES = {"stdout": "out", "stderr": "err"}
"""Of the names of files that receive output, by stream."""

COLOURS = "cyan", "magenta", "green", "yellow", "blue"
"""Of hosts' names on a terminal."""


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for where output goes; passes ``show``."""

    @json_option("Print results as JSON, at the end, and errors likewise.")
    @click.option(
        "--live/--in-order",
        default=None,
        help="Show output as it arrives, each line with its host's name; or host by host at the "
        "end. Default on a terminal: live.",
    )
    @click.option(
        "--grouped",
        is_flag=True,
        help="Show output at the end, once for all hosts with the same output.",
    )
    @click.option(
        "--output-dir",
        type=GivenPath(path_type=Path),
        help="Write output to HOST.out and HOST.err in this directory instead.",
    )
    @wraps(command)
    def wrapped(
        *arguments: Any,
        as_json: bool,
        live: bool | None,
        grouped: bool,
        output_dir: Path | None,
        **values: Any,
    ) -> Any:
        if as_json + grouped + (output_dir is not None) + (live is not None) > 1:
            raise InputError(
                "--json, --live or --in-order, --grouped, and --output-dir exclude each other",
                hint="give one of them",
            )
        if live is None:
            live = sys.stdout.isatty() and not (as_json or grouped)
        values["show"] = Show(as_json=as_json, live=live, directory=output_dir, grouped=grouped)
        return command(*arguments, **values)

    return wrapped


class Show:
    """The destination of output.

    Args:
        as_json: printed as JSON at the end.
        live: printed as it comes.
        directory: written to files there as it comes.
        grouped: printed at the end, once for hosts that wrote the same.
    """

    def __init__(
        self, *, as_json: bool, live: bool, directory: Path | None, grouped: bool = False
    ) -> None:
        self._as_json, self._live, self._directory = as_json, live, directory
        self._grouped = grouped
        self._kept: _Kept | None = None

    @contextmanager
    def open(self, progress: ConsoleProgress) -> Iterator[Output | None]:
        """What is to be told of output as it comes; None if nothing is.

        Raises:
            SourceError: its files cannot be made.
        """
        if self._directory is not None:
            with _Files(self._directory) as files:
                yield files
        elif self._live:
            lines = _Lines(progress)
            yield lines
            lines.flush()
        elif self._as_json or self._grouped:
            self._kept = _Kept()
            yield self._kept
        else:
            self._kept = _InOrder(progress)
            yield self._kept

    def lent(self) -> dict[str, int]:
        """Streams that a single command may have as its own: its output is printed as it is."""
        printed = self._live or self._as_json or self._grouped or self._directory is not None
        return lent("stdin") if printed else lent("stdin", "stdout")

    def end(self, results: Results, progress: ConsoleProgress) -> int:
        """Show the results; return the exit code."""
        from wheelmount.hosts.commands import worst

        if self._as_json:
            self._print_json(results)
        elif self._grouped and self._kept is not None:
            self._kept.print_groups(results)
        elif self._directory is not None:
            for name, result in results.items():
                if not isinstance(result, WheelmountError):
                    print(f"{name} {result.code} {self._directory / name}.out")
        elif not self._live and self._kept is None:
            for name, result in results.items():
                if not isinstance(result, WheelmountError):
                    _print(name, result)
        failed = {
            name: result if isinstance(result, WheelmountError) else result.lacking
            for name, result in results.items()
        }
        progress.errors({name: error for name, error in failed.items() if error is not None})
        if results.shortfall is not None:
            progress.error(results.shortfall)
        return worst(results)

    def _print_json(self, results: Results) -> None:
        """One record after the other: all of them may be larger than memory."""
        for rank, (name, result) in enumerate(results.items()):
            record = _record(rank, name, result)
            begin, streams = json.dumps(record).removesuffix("}"), {}
            if not isinstance(result, WheelmountError):
                streams = {"stdout": [result.stdout], "stderr": [result.stderr]}
            print(", " if rank else "[", begin, sep="", end="")
            for stream, held in streams.items():
                print(f', "{stream}": "', end="")
                pieces = held if self._kept is None else self._kept.pieces(name, stream)
                for text in iterdecode(pieces, "utf-8", "replace"):
                    print(json.dumps(text)[1:-1], end="")
                print('"', end="")
            print("}", end="")
        print("]" if results else "[]")


def of_each_host(
    spec: HostSpec, command: Sequence[str], *words: str, as_json: bool, live: bool = False
) -> int:
    """Have every host carry out a command about itself; show what it prints.

    Args:
        spec: the hosts.
        command: the command.
        words: its arguments.
        as_json: have it print JSON.
        live: show it as it comes, each line with its host's name.

    Returns:
        The exit code.
    """
    from wheelmount.operations import each_host  # with Monarch
    from wheelmount.operations.site import Site

    progress = ConsoleProgress()
    show = Show(as_json=as_json, live=live, directory=None)
    with show.open(progress) if live else nullcontext() as told:
        argv = [*command, *(["--json"] if as_json else []), *words]
        results = each_host.run(Site(spec, config.load(), progress), argv, told)
    return show.end(results, progress)


def standard_input() -> RawIOBase | None:
    """Return the standard input of this command; None if it is closed or empty."""
    try:
        return open(0, "rb", buffering=0, closefd=False)
    except OSError:
        return None


def lent(*streams: str) -> dict[str, int]:
    """Descriptors of standard streams of this command, by name, but those that are terminals."""
    own = {stream: getattr(sys, f"__{stream}__") for stream in streams}  # None if it was closed
    return {
        stream: file.fileno()
        for stream, file in own.items()
        if file is not None and not os.isatty(file.fileno())
    }


class _Kept:
    """Keeps output for later, in files beyond some of it."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], SpooledTemporaryFile[bytes]] = {}

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        key = host, stream
        try:
            if key not in self._files:
                self._files[key] = SpooledTemporaryFile(HELD)  # noqa: SIM115 - closed when taken
            self._files[key].write(data)
        except OSError as error:
            raise TransferError(
                f"cannot keep output that waits to be printed, in {gettempdir()}: {error.strerror}",
                hint="set TMPDIR to a directory with more room",
            ) from None

    def pieces(self, host: str, stream: str) -> Iterator[bytes]:
        """What was kept of a stream, which then is no more."""
        if (file := self._files.pop((host, stream), None)) is not None:
            with file:
                file.seek(0)
                while piece := file.read(PIECE):
                    yield piece

    def print_groups(self, results: Results) -> None:
        """Print what was kept, once for all hosts of which it is the same."""
        marks = {}
        for name, result in results.items():
            if not isinstance(result, WheelmountError):
                both = (self._mark(name, stream) for stream in ("stdout", "stderr"))
                marks[name] = (result.code, *both)
        for hosts, (code, *_) in alike(marks.items()):
            first = next(name for name in marks if name in expand(hosts))
            ended = f" (exit code {code})" if code else ""
            for stream, what in (("stdout", ""), ("stderr", " stderr")):
                to = sys.stdout if stream == "stdout" else sys.stderr
                pieces = self.pieces(first, stream)
                if (begin := next(pieces, b"")) or stream == "stdout":
                    to.write(f"== {hosts}{what} =={ended}\n")
                    to.flush()
                    last = b"\n"
                    for piece in (begin, *pieces) if begin else ():
                        to.buffer.write(piece)
                        last = piece[-1:]
                    to.buffer.write(b"" if last == b"\n" else b"\n")
                    to.flush()

    def _mark(self, host: str, stream: str) -> str:
        """What tells output from other output."""
        digest = blake3()
        if (file := self._files.get((host, stream))) is not None:
            file.seek(0)
            while piece := file.read(PIECE):
                digest.update(piece)
        return digest.hexdigest()


class _InOrder(_Kept):
    """Prints host by host: the first one's as it comes, others' when it is their turn.

    What a single host writes is printed as it is, with nothing added.
    """

    def __init__(self, progress: ConsoleProgress) -> None:
        super().__init__()
        self._progress = progress
        self._hosts: list[str] = []
        self._ended: dict[str, bool] = {}
        self._plain = False
        self._last: dict[str, bytes] = {}

    def begin(self, hosts: Sequence[str]) -> None:
        self._hosts, self._plain = list(hosts), len(hosts) == 1

    def end(self, host: str, *, lost: bool) -> None:
        self._ended[host] = lost
        while self._hosts and self._hosts[0] in self._ended:
            now = self._hosts.pop(0)
            if not self._ended[now]:
                self._print(now, "stdout", b"")
            for stream, last in self._last.items():
                if not last.endswith(b"\n"):
                    self._write(stream, b"\n")
            self._last.clear()
            for stream in ("stdout", "stderr"):
                for piece in self.pieces(self._hosts[0], stream) if self._hosts else ():
                    self._print(self._hosts[0], stream, piece)

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        if self._hosts and host == self._hosts[0]:
            self._print(host, stream, data)
        else:
            super().__call__(host, stream, data)

    def _print(self, host: str, stream: str, data: bytes) -> None:
        if not self._plain and stream not in self._last:
            title = f"== {host} ==\n" if stream == "stdout" else f"== {host} stderr ==\n"
            self._last[stream] = b"\n"
            self._write(stream, title.encode())
        if data:
            if not self._plain:
                self._last[stream] = data[-1:]
            self._write(stream, data)

    def _write(self, stream: str, data: bytes) -> None:
        to = sys.stdout if stream == "stdout" else sys.stderr
        with self._progress.aside() if to.isatty() else nullcontext():
            to.buffer.write(data)
            to.flush()


class _Lines:
    """Prints whole lines as they come, each with its host's name; very long ones in parts."""

    def __init__(self, progress: ConsoleProgress) -> None:
        self._progress = progress
        self._rests: dict[tuple[str, str], bytes] = {}
        self._names: dict[str, str] = {}

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        whole, end, rest = (self._rests.pop((host, stream), b"") + data).rpartition(b"\n")
        if end:
            self._print(host, stream, whole)
        if len(rest) > LINE:
            self._print(host, stream, rest)
        else:
            self._rests[host, stream] = rest

    def flush(self) -> None:
        """Print a rest that does not end with a newline."""
        for (host, stream), rest in self._rests.items():
            if rest:
                self._print(host, stream, rest)
        self._rests.clear()

    def _print(self, host: str, stream: str, lines: bytes) -> None:
        to = sys.stdout if stream == "stdout" else sys.stderr
        prefix = f"{self._name(host)}: ".encode() if to.isatty() else f"{host}: ".encode()
        with self._progress.aside():
            to.buffer.write(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
            to.flush()

    def _name(self, host: str) -> str:
        colour = COLOURS[len(self._names) % len(COLOURS)]
        return self._names.setdefault(
            host, host if self._progress.console.no_color else style(host, fg=colour)
        )


class _Files:
    """Writes output to a file for each host and stream."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[tuple[str, str], BinaryIO] = {}

    def __enter__(self) -> _Files:
        try:
            make_folders(self._directory)
        except OSError as error:
            raise SourceError(
                f"cannot make {self._directory}: {error.strerror}", hint="give another --output-dir"
            ) from None
        return self

    def __exit__(self, *_exc: object) -> None:
        for file in self._files.values():
            file.close()

    def begin(self, hosts: Sequence[str]) -> None:
        """Make all files, empty: a host may write nothing, and an earlier run have left some."""
        for host in hosts:
            for stream in SUFFIXES:
                self._open(host, stream).close()

    def end(self, host: str, *, lost: bool) -> None:
        """Do nothing: what has come is in the files."""

    def __call__(self, host: str, stream: str, data: bytes) -> None:
        if (host, stream) not in self._files:
            self._files[host, stream] = self._open(host, stream)
        self._files[host, stream].write(data)
        self._files[host, stream].flush()

    def _open(self, host: str, stream: str) -> BinaryIO:
        return open(self._directory / f"{host}.{SUFFIXES[stream]}", "wb", opener=opener)


def _print(name: str, result: Result) -> None:
    _write(sys.stdout, f"== {name} ==\n", result.stdout)
    if result.stderr:
        _write(sys.stderr, f"== {name} stderr ==\n", result.stderr)


def _write(stream: Any, title: str, output: bytes) -> None:
    stream.write(title)
    stream.flush()
    stream.buffer.write(output)
    if output and not output.endswith(b"\n"):
        stream.buffer.write(b"\n")
    stream.flush()


def _record(rank: int, name: str, result: Result | WheelmountError) -> dict[str, Any]:
    record: dict[str, Any] = {"host": name, "rank": rank}
    if isinstance(result, WheelmountError):
        return record | {"code": result.exit_code, "error": result.message, "hint": result.hint}
    if result.lacking is not None:
        record |= {"error": result.lacking.message, "hint": result.lacking.hint}
    return record | {"code": result.code, "seconds": round(result.seconds, 3)}
