"""``wheelmount``: the command, and how it ends."""

from __future__ import annotations

import sys

INTERRUPTED = 130

UNREAD = 141
"""Exit code if the reader of the output is gone, as of a program that SIGPIPE ends."""

try:
    import atexit
    import contextlib
    import errno
    import importlib
    import io
    import itertools
    import json
    import logging
    import os
    import select
    import signal
    from pathlib import Path
    from types import FrameType
    from typing import NoReturn

    import click

    from wheelmount import __version__, disk
    from wheelmount.cli.console import WRITABLE, ConsoleProgress, Terminal, wants_json
    from wheelmount.errors import SourceError, TransferError, WheelmountError, hand_over
    from wheelmount.hosts import runtime
except KeyboardInterrupt:  # there is nothing to take down yet
    sys.exit(INTERRUPTED)

log = logging.getLogger("wheelmount")

COMMANDS = {
    "download": "wheels:download",
    "check": "wheels:check",
    "mount": "mounts:mount",
    "refresh": "mounts:refresh",
    "verify": "mounts:verify",
    "umount": "mounts:umount",
    "status": "status:status",
    "logs": "logs:logs",
    "run": "run:run",
    "install": "install:install",
    "exec": "containers:execute",
    "shell": "containers:shell",
    "image": "images:image",
    "overlay": "containers:overlay",
    "instance": "containers:instance",
    "env": "environments:env",
    "cache": "cache:cache",
    "up": "sessions:up",
    "down": "sessions:down",
    "config": "settings:show",
    "worker": "worker:worker",
    "setup": "setup:setup",
    "doctor": "doctor:examine",
}
"""Where each command is: module of this package, and name in it."""


class _Commands(click.Group):
    """Imports a command when it is used: all of them take a second."""

    @property
    def commands(self) -> dict[str, click.Command]:
        """All commands, for programs that inspect a group, such as click-man."""
        context = click.Context(self)
        found = {name: self.get_command(context, name) for name in COMMANDS}
        return {name: command for name, command in found.items() if command is not None}

    @commands.setter
    def commands(self, _given: object) -> None:
        pass

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(importlib.import_module(f"wheelmount.cli.{module}"), attribute)
        return command if isinstance(command, click.Command) else None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """A package cache and container launcher for clusters.

    Exit codes: 0 all went well; what ran on the hosts passes its worst one on; 2 wrong usage;
    64-78 an error of wheelmount, see the reference; 130 interrupted,
    141 the output is not read any more, 143 ended by SIGTERM.
    """


def main() -> None:
    """Run the command line, and end this process with the command's exit code."""
    try:
        _run()
    except SystemExit as end:
        if "monarch" in sys.modules:
            _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(code: int) -> NoReturn:
    """End this process without Python's own clean-up.

    A thread of Monarch's that calls Python during the clean-up aborts the process ("FATAL:
    exception not rethrown", exit code 134), whatever the command ended with.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # unwritable; closed
            stream.flush()
    os._exit(code)


def _run() -> NoReturn:
    """Run the command line; the only place that turns an error into an exit code."""
    try:
        _open_streams()
        runtime.own_process()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)  # as ^C: everything is taken down on the way out
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except WheelmountError as error:
        _tell(error)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        own = itertools.takewhile(lambda word: word != "--", sys.argv)  # not the user's command
        if "--json" in own:  # whether it was read already or not
            _tell_program(error.format_message(), error.exit_code)
        else:
            error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = 128 + _came[0] if _came else INTERRUPTED
        with contextlib.suppress(OSError):
            if wants_json():
                _tell_program("interrupted", code)
            else:
                print("interrupted", file=sys.stderr)
        sys.exit(code)
    except (BrokenPipeError, SystemExit) as error:
        # click and rich end with 1 where they cannot write, whatever is asked of them.
        if not (isinstance(error, SystemExit) and error.code != 1) and _unread():
            sys.exit(UNREAD)
        if isinstance(error, SystemExit):
            raise
        _tell_of_defect(error)
    except OSError as error:
        if error.filename is None and isinstance(error, FileNotFoundError) and _nowhere():
            gone = SourceError(
                "the working directory was deleted", hint="cd to a directory that exists"
            )
            _tell(gone)
            sys.exit(gone.exit_code)
        # An error that names no file may be of the standard output.
        if error.filename is not None or disk.full() or error.errno in (errno.EROFS, errno.ENOENT):
            full = disk.explain(error)
            if full is not None:
                log.debug("full", exc_info=True)
                _tell(full)
                sys.exit(full.exit_code)
        if error.filename is not None and error.errno in _unusable:
            path = os.fsdecode(error.filename)
            unusable = SourceError(
                f"cannot use {path}: {error.strerror}",
                hint="check the path, and whether you may read each directory on the way to it",
            )
            log.debug("unusable path", exc_info=True)
            _tell(unusable)
            sys.exit(unusable.exit_code)
        if error.filename is not None or error.errno not in _unwritable:
            _tell_of_defect(error)
        unwritten = TransferError(f"cannot write the output: {error.strerror}")
        _tell(unwritten)
        with contextlib.suppress(OSError):  # Python would try again as it ends, and fail
            sys.stdout.close()
        sys.exit(unwritten.exit_code)
    except Exception as error:
        _tell_of_defect(error)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # Python itself would print a traceback
    sys.exit(code if isinstance(code, int) else 0)


def _tell(error: WheelmountError) -> None:
    if not hand_over(error):
        ConsoleProgress().error(error)


def _tell_program(message: str, code: int) -> None:
    record = {"code": code, "message": message, "hint": None}
    print(json.dumps(record), file=sys.stderr)


def _tell_of_defect(error: Exception) -> NoReturn:
    log.debug("unexpected", exc_info=True)
    unexpected = WheelmountError(
        f"unexpected {type(error).__name__}: {error}",
        hint="report this as a defect, with what -v says",
    )
    _tell(unexpected)
    sys.exit(unexpected.exit_code)


def _nowhere() -> bool:
    """Return whether the working directory was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _unread() -> bool:
    """Return whether the reader of the output is gone; then nothing more is printed."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    closed = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    for descriptor in closed:  # Python would try again as it ends, and tell of that
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(closed)


_unusable = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors that a path given by the user causes, whichever step uses the path first."""

_unwritable = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of a standard output that takes no more, such as a file on a full disk."""


def _open_streams() -> None:
    """Open standard streams that the caller closed: other files would get their numbers.

    Writing to an output that was closed fails, as it does in other programs. Paths are written as
    the bytes that they are; to a terminal, odd ones in escapes.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if sys.stdout is None:
        _unwritable.add(errno.EBADF)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.isatty():
            encoding = sys.stdout.encoding
            sys.stdout = Terminal(sys.stdout.buffer, encoding, "replace", line_buffering=True)
        else:
            sys.stdout.reconfigure(errors=WRITABLE)


_came: list[int] = []
"""Signals that ended this command, but ^C."""


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
