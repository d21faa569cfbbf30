"""``python -m tests.testbed``: run a command on the login host of a lab of its own."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.testbed.lab import LOGIN, Lab
from tests.testbed.service import start_workers, workers_spec
from tests.testbed.slurm import start_slurm
from tests.testbed.sshd import start_sshd
from wheelmount.errors import WheelmountError
from wheelmount.hosts.address import SECURE

HOSTS = "TESTBED_HOSTS"
"""Variable in which the command finds the names of the other hosts, with blanks between."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.testbed",
        description="Run COMMAND on the login host of a lab: hosts on this machine, each with a "
        "network, a name, files and processes of its own. What it leaves behind goes with the lab.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="hosts besides login (%(default)s)")
    parser.add_argument("--rate", help="of each host's link, as tc knows it, such as 1gbit")
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="PATH",
        help="one and the same on all hosts and outside; the checkout always is",
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="have the hosts wait for wheelmount, and tell the command so ($WHEELMOUNT_HOSTS)",
    )
    parser.add_argument("--sshd", action="store_true", help="have ssh go from host to host")
    parser.add_argument("--slurm", action="store_true", help="have the hosts be nodes of Slurm")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    arguments = parser.parse_args()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="testbed-") as state,
            Lab(arguments.hosts, arguments.rate, [*arguments.share, state]) as lab,
        ):
            environment = {**os.environ, HOSTS: " ".join(lab.hosts)}
            if arguments.sshd:
                start_sshd(lab)
            if arguments.slurm:
                start_slurm(lab)
            if arguments.workers:
                environment["WHEELMOUNT_STATE_DIR"] = state  # as in a home directory, one for all
                start_workers(lab, SECURE, env=environment)
                environment["WHEELMOUNT_HOSTS"] = workers_spec(lab, SECURE)
            command = lab.popen(
                LOGIN, arguments.command, env=environment, stdin=None, cwd=Path.cwd()
            )
            code = command.wait()
            return 128 - code if code < 0 else code
    except WheelmountError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
