"""What all operations on hosts are given."""

from __future__ import annotations

from dataclasses import dataclass

from wheelmount.config import Settings
from wheelmount.hosts.spec import HostSpec
from wheelmount.progress import Progress


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operation works.

    Attributes:
        spec: the hosts.
        settings: the settings in force here.
        progress: told about each step.
    """

    spec: HostSpec
    settings: Settings
    progress: Progress
