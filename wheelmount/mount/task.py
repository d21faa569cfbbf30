"""The task of a serving process, as it is handed over."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

TASK = "task.json"

PROCESS = "process"
"""Name of the file with the id of the process that leads those of the mount."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a serving process is to do; lies in its directory as ``TASK``.

    Attributes:
        host: name of the host.
        source: what is mounted, for people.
        mntpoint: where.
        store: directory of the store.
        adapter: how it is to be shown in the end; one of ``adapter.NAMES`` but not ``auto``.
        read_timeout: seconds a read waits for its bytes.
        made: whether the mount point was made for it and is to go with it.
        verify_rate: bytes a second at which a store on a disk is verified over and over; 0: not.
    """

    host: str
    source: str
    mntpoint: str
    store: str
    adapter: str
    read_timeout: float
    made: bool
    verify_rate: float = 0.0

    def write(self, directory: Path) -> None:
        """Put it into its directory."""
        (directory / TASK).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Task:
        """Get it back."""
        return cls(**json.loads((directory / TASK).read_text()))
