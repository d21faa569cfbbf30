"""``python -m tests.simulation``: play many seeds, and name those that fail."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.simulation.world import play


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print what happens")
    given = parser.parse_args()
    failed, faults, began = [], Counter[str](), time.monotonic()
    for seed in range(given.first, given.first + given.seeds):
        try:
            faults += play(seed, verbose=given.verbose).faults
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if given.verbose:
                traceback.print_exc()
    took = time.monotonic() - began
    print(f"{given.seeds} seeds in {took:.1f} s, {len(failed)} failed; {dict(faults)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
