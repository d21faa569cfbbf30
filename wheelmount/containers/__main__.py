"""Runs a command in a container on this host: ``python -m wheelmount.containers FILE``.

FILE holds an ``Order`` and the command, which may be secrets: every user of the machine can read
the arguments of a process. Exits with the command's code, or with that of the error. Without a
command it exits with 0 if the order's instance runs, else with 1.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from wheelmount.containers.order import Order
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import WheelmountError


def main() -> int:
    """Do it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    order, argv = Order.decode(Path(sys.argv[1]).read_bytes())
    try:
        if not argv:
            return int(not order.runs())
        if order.terminal is None:
            return order.run(argv, stdin=None)
        with Terminal(size=order.terminal) as terminal:
            return order.run(argv, terminal=terminal)
    except WheelmountError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(number: int, _frame: FrameType | None) -> None:
    # Once: who sends a second one would only keep what runs from being taken down.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
