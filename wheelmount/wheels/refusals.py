"""Check that a file is the wheel that a lock names, and sound."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from wheelmount.errors import WheelError
from wheelmount.wheels.archive import find_faults, hash_file
from wheelmount.wheels.lockfile import Wheel


def refuse_unpinned(file: Path, wheel: Wheel) -> None:
    """Compare a file with its pinned hashes.

    Raises:
        WheelError: the file has none of them.
    """
    if not wheel.pinned or f"sha256:{wheel.sha256}" in wheel.pinned:
        return
    algorithms = {one.partition(":")[0] for one in wheel.pinned} - {"sha256"}
    if not any(f"{name}:{hash_file(file, name)}" in wheel.pinned for name in sorted(algorithms)):
        raise WheelError(
            f"{wheel.filename} is not what the requirements pin: {', '.join(wheel.pinned)}",
            hint="do not trust this index, or pin the version again",
        )


def refuse_unsound(file: Path, wheel: Wheel, trusted: Collection[str]) -> None:
    """Check the form and all contents of a wheel.

    Raises:
        WheelError: it is not sound; the message names the wheel and its fault.
    """
    if not wheel.filename.endswith(".whl"):
        return  # a source distribution: the wheel that is built of it is checked
    record = wheel.package not in trusted
    if not (faults := find_faults(file, wheel.filename, record=record)):
        return
    if record and not find_faults(file, wheel.filename, record=False):
        hint = f"take another version; if you trust its publisher: --trust {wheel.package}"
    else:
        hint = "take another version, and report it to the publisher"
    raise WheelError(f"{wheel.filename} is not sound: {faults[0]}", hint=hint)
