"""Variables of the environment that are for wheelmount's and Monarch's own processes alone.

All processes of a user can read each other's environment in ``/proc``, and programs pass theirs on.
So programs that wheelmount starts get none of these variables, except Monarch's processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

CREDENTIALS = "WHEELMOUNT_CREDENTIALS"
"""Variable with a worker's credentials, in the format of ``hosts.credentials.decode``."""

TLS = "HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY"
"""Monarch's variables for the authority's certificate, a process's own certificate, and its key."""

_OF_MONARCH = "HYPERACTOR_", "BOOTSTRAP_", "MONARCH_FILE_LOG_", "MONARCH_RDMA_"
"""Prefixes of the variables that describe a Monarch process to itself, and of the switches that
wheelmount sets."""

NO_BACKTRACES = "RUST_LIB_BACKTRACE", "0"
"""A variable that all programs in Rust read, and the value that wheelmount's own processes set.
Monarch makes an error whenever it ends. Where ``RUST_BACKTRACE`` is set, too, the backtrace of that
error would take 50 MiB of memory and 0.3 s of each command."""


def without_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without credentials, for programs that start workers."""
    return {name: value for name, value in environ.items() if name not in (CREDENTIALS, *TLS)}


def for_programs(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without credentials and Monarch's variables, for other programs."""
    kept = without_secrets(environ)
    if kept.get(NO_BACKTRACES[0]) == NO_BACKTRACES[1]:
        del kept[NO_BACKTRACES[0]]
    return {name: value for name, value in kept.items() if not name.startswith(_OF_MONARCH)}
