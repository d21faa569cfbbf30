"""Runs a command in a container on this host: ``python -m wheelmount.containers SPEC COMMAND…``.

SPEC is the JSON of an ``Order``. Exits with the command's code, or with that of the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wheelmount.config import private_directory
from wheelmount.containers.container import Container
from wheelmount.containers.order import Order
from wheelmount.containers.overlay import Overlay
from wheelmount.errors import WheelmountError


def main() -> int:
    """Do it."""
    order = Order(**json.loads(sys.argv[1]))
    try:
        work = private_directory(Path(order.runtime_dir)) / f"container-{order.identity}"
        container = Container(
            image=Path(order.image),
            workdir=work,
            overlay=Overlay(Path(order.state_dir), order.overlay, order.host),
            packages=Path(order.packages) if order.packages else None,
            env=order.environment,
            files=order.files,
        )
        with container:
            return container.run(sys.argv[2:])
    except WheelmountError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
