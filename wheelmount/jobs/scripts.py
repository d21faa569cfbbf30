"""Scripts, run on every host where a directory is mounted."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path

from wheelmount.config import Settings
from wheelmount.errors import InputError, SourceError
from wheelmount.hosts.runner import Command
from wheelmount.hosts.runners import Output, Results
from wheelmount.hosts.spec import HostSpec
from wheelmount.jobs.mounts import on_mounts
from wheelmount.progress import Progress

LARGEST = 8 << 20
"""Bytes of a script, which travels in one message."""


def run(
    spec: HostSpec,
    source: Path,
    script: bytes,
    arguments: Sequence[str],
    mntpoint: str | None,
    settings: Settings,
    progress: Progress,
    *,
    output: Output | None = None,
    stdin: RawIOBase | None = None,
    variables: Mapping[str, str] | None = None,
) -> Results:
    """Mount a directory on all hosts and run a script on each, in the mounted directory.

    The script finds the mount point in ``WHEELMOUNT_MOUNT``, its host's name and place in
    ``WHEELMOUNT_HOST`` and ``WHEELMOUNT_RANK``.

    Args:
        spec: the hosts.
        source: the directory.
        script: its text.
        arguments: of the script.
        mntpoint: see ``remotemount``.
        settings: in force.
        progress: told about each step.
        output: told of output as it comes.
        stdin: what the script reads, if there is one host.
        variables: to set for the script.
    """

    def command(_host: str, path: str) -> Command:
        environment = {**(variables or {}), "WHEELMOUNT_MOUNT": path}
        return Command(
            tuple(arguments), script, interpreter(script), environment=environment, cwd=path
        )

    return on_mounts(
        spec, source, mntpoint, command, settings, progress, "run", output=output, stdin=stdin
    )


def interpreter(script: bytes) -> tuple[str, ...]:
    """What runs a script: what its first line says after ``#!``, as execve(2) has it; else bash."""
    first = script.partition(b"\n")[0]
    words = os.fsdecode(first[2:]).strip().split(None, 1) if first.startswith(b"#!") else []
    return tuple(words) or ("bash",)


def read(path: str) -> bytes:
    """Text of a script file, or of standard input where ``path`` is ``-``.

    Raises:
        SourceError: there is none.
        InputError: it is too large.
    """
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise SourceError(
            f"cannot read the script {path}: {error.strerror}",
            hint="give a script, or - for stdin",
        ) from None
    if len(text) > LARGEST:
        raise InputError(
            f"the script is larger than {LARGEST >> 20} MiB",
            hint="put what is large into the directory that is mounted",
        )
    return text
