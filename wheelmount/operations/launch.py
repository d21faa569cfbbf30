"""Options of commands on hosts: how they start, their input and their output."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import RawIOBase

from wheelmount.errors import InputError
from wheelmount.hosts.collection import Collection
from wheelmount.hosts.commands import Output


@dataclass(frozen=True, slots=True)
class Launch:
    """The same for all hosts of a command.

    Attributes:
        output: told of output as it comes; None where the results are to hold it.
        stdin: standard input of the command, if any.
        lent: streams of this process that a command of one host of this machine gets as its own,
            see ``Commands.run``.
        variables: to set for it; those of a container are with its image.
        cwd: directory that it starts in, on the host or in the container; None for its usual one,
            to which a relative one is.
        timeout: seconds after which it is ended with all that it started; None for no bound.
        copies: how many of it run on each host.
        collect: files to bring back when it has ended; None for none.
    """

    output: Output | None = None
    stdin: RawIOBase | None = None
    lent: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float | None = None
    copies: int = 1
    collect: Collection | None = None

    def within(self, usual: str | None) -> str | None:
        """Where the command starts.

        Args:
            usual: where it would without ``cwd``; None for a directory of the host's choice.

        Raises:
            InputError: ``cwd`` is relative to such a directory.
        """
        if self.cwd is None:
            return usual
        if usual is None and not self.cwd.startswith("/"):
            raise InputError(
                f"--cwd {self.cwd} is relative to a directory that is not known",
                hint="give an absolute path",
            )
        return posixpath.join(usual or "/", self.cwd)
