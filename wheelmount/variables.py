"""Variables of the environment that are for wheelmount's and Monarch's own processes alone.

All that a user runs can read the environments of that user's processes in ``/proc``, and programs
pass theirs on. So what is started gets none of these, unless it is a process of Monarch's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CREDENTIALS = "WHEELMOUNT_CREDENTIALS"
"""Variable by which a worker is given credentials: see ``hosts.credentials.decode``."""

TLS = "HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY"
"""By which Monarch takes the authority's certificate, a process's own, and its key."""

_OF_MONARCH = "HYPERACTOR_", "BOOTSTRAP_", "MONARCH_FILE_LOG_", "MONARCH_RDMA_"
"""Beginnings of the names of those by which Monarch's processes know what they are, and of the
switches that wheelmount sets."""


def without_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without credentials: for programs by which workers are started."""
    return {name: value for name, value in environ.items() if name not in (CREDENTIALS, *TLS)}


def for_programs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without credentials, and without what is for Monarch: for other programs."""
    kept = without_secrets(environ)
    return {name: value for name, value in kept.items() if not name.startswith(_OF_MONARCH)}
