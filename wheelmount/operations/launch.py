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
    """How to run a command; the same for all hosts.

    Attributes:
        output: receives output as it arrives; None to keep it in the results.
        stdin: standard input of the command, if any.
        lent: streams of this process that a command of one host of this machine gets as its own,
            see ``Commands.run``.
        variables: environment variables to set; those of a container are with its image.
        cwd: directory in which it starts, on the host or in the container; a relative path starts
            at its usual directory. None for the usual directory.
        timeout: seconds after which it is ended with all its processes; None for no limit.
        copies: number of copies on each host.
        collect: files to collect when it has ended; None for none.
    """

    output: Output | None = None
    stdin: RawIOBase | None = None
    lent: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    timeout: float | None = None
    copies: int = 1
    collect: Collection | None = None

    def check_container(self) -> None:
        """Check that a container on each host can run the command.

        Raises:
            InputError: there are several copies for one container's overlay.
        """
        if self.copies > 1:
            raise InputError(
                "containers of one host cannot write to one overlay together",
                hint="omit --per-host or --image",
            )

    def within(self, usual: str | None) -> str | None:
        """Return the directory in which the command starts.

        Args:
            usual: its usual directory; None if the host chooses one.

        Raises:
            InputError: ``cwd`` is relative, and the host chooses the directory.
        """
        if self.cwd is None:
            return usual
        if usual is None and not self.cwd.startswith("/"):
            raise InputError(
                f"--cwd {self.cwd} is relative to a directory that is not known",
                hint="give an absolute path",
            )
        return posixpath.join(usual or "/", self.cwd)
