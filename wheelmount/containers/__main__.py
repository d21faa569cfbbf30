"""Run a command in a container on this host: ``python -m wheelmount.containers FILE``.

FILE holds an ``Order`` and the command. They are not arguments, because they may contain secrets,
and every user of the machine can read the arguments of a process. The exit code is that of the
command or of the error. Without a command it is 0 if the order's instance runs, otherwise 1.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from wheelmount import disk
from wheelmount.containers.order import Order
from wheelmount.containers.terminal import Terminal
from wheelmount.errors import OvertimeError, WheelmountError, tell


def main() -> int:
    """Carry out the order; return the exit code."""
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
    except OvertimeError as error:  # the command ran, and its output may end with the reason
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except WheelmountError as error:
        return tell(error)
    except OSError as error:  # of this host; the exit code 1 would be the command's
        other = WheelmountError(f"the container failed on this host: {error}")
        return tell(disk.explain(error) or other)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _end(number: int, _frame: FrameType | None) -> None:
    # Ignore further signals: a second one would interrupt the cleanup.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
