"""A user of a lab's hosts who is not root."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import CHECKOUT
from tests.testbed import LOGIN, Lab

USER, NUMBER = "researcher", 2345

HOME = f"/home/{USER}"

PREPARE = f"""
set -e
useradd --uid {NUMBER} --create-home --shell /bin/bash {USER}
usermod --password '*' {USER}  # sshd lets nobody in whose account is locked
if [ -d /root/.ssh ]; then cp -r /root/.ssh {HOME}; fi
chown -R {USER}: {HOME}
for path; do  # which leads to the checkout and to the Python that setup found
  while [ "$path" != / ]; do
    # Only what is this host's own: other disks are the machine's.
    if [ "$(stat -c %m "$path")" = / ]; then chmod o+rx "$path"; fi
    path=$(dirname "$path")
  done
done
"""


def make_user(lab: Lab, host: str) -> None:
    """Make the user on a host, with root's ssh key, and the way to the checkout and its Python."""
    ways = [CHECKOUT.parent, Path(sys.base_prefix).resolve()]
    lab.run(host, ["bash", "-c", PREPARE, "bash", *ways], check=True)


def as_user(*words: str | Path) -> list[str]:
    """Return the command that runs another as the user."""
    start = ["setpriv", f"--reuid={NUMBER}", f"--regid={NUMBER}", "--init-groups", "--"]
    own = ["-u", "TMPDIR", f"HOME={HOME}", f"USER={USER}", f"LOGNAME={USER}"]
    return [*start, "env", "--chdir=/tmp", *own, *map(str, words)]


def assert_clean(lab: Lab, hosts: Iterable[str], mntpoint: str) -> None:
    """Wait until the user has no process, mount or runtime file on hosts, and Slurm no job."""
    ends = f"/tmp/wheelmount-{NUMBER}/*/*"
    look = f"pgrep --uid {NUMBER} --list-full; ls {mntpoint} {ends} 2>/dev/null"
    deadline = time.monotonic() + 60
    for host in hosts:
        while seen := lab.run(host, ["sh", "-c", look]).stdout:
            assert time.monotonic() < deadline, (host, seen)
            time.sleep(0.2)
    while jobs := lab.run(LOGIN, ["squeue", "--noheader"]).stdout:
        assert time.monotonic() < deadline, jobs
        time.sleep(0.2)
