"""``monarch.remotemount`` of one directory: ``monarch_peer SOURCE MNTPOINT``.

On ``this_host()``, whose workers serve the mount in processes of their own. Prints ``open`` when
``open()`` has returned; the end of its input has it close.
"""

from __future__ import annotations

import sys


def main(source: str, mntpoint: str) -> None:
    """Mount, and stay until the input ends."""
    from monarch.actor import shutdown_context, this_host
    from monarch.remotemount import remotemount

    made = remotemount(this_host(), source, mntpoint)
    made.open()
    print("open", flush=True)
    sys.stdin.read()
    made.close()
    shutdown_context().get()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
