"""A real sshd on every host of the lab."""

from __future__ import annotations

from tests.testbed.lab import LOGIN, Lab, require
from tests.testbed.service import Service

PORT = 22

PREPARE = """
set -e
umask 077
mkdir -p /run/sshd ~/.ssh
mount -t tmpfs -o mode=0700 none ~/.ssh  # not what root of the machine has there
usermod --password '*' root  # sshd lets nobody in whose account is locked
"""

MAKE_KEYS = """
set -e
cd ~/.ssh
for name in id_ed25519 host_key; do ssh-keygen -q -t ed25519 -N '' -C lab -f $name; done
cp id_ed25519.pub authorized_keys
for name; do echo "$name $(cat host_key.pub)"; done >known_hosts
tar -cf - . | base64
"""


def start_sshd(lab: Lab) -> list[Service]:
    """Have root go from any host to any other by ``ssh NAME``; each knows the others' keys.

    Raises:
        UnavailableError: OpenSSH is not installed.
        HostError: one does not come up.
    """
    require("sshd", "ssh", "ssh-keygen")
    names = [name for host in lab.names for name in (host, lab.address(host))]
    for host in lab.names:
        lab.run(host, ["sh", "-c", PREPARE], check=True)
    keys = lab.run(LOGIN, ["bash", "-c", MAKE_KEYS, "bash", *names], check=True).stdout
    for host in lab.hosts:
        unpack = "base64 -d | tar -C ~/.ssh -xf -"
        lab.run(host, ["sh", "-c", unpack], stdin=None, input=keys, check=True)
    daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", "/root/.ssh/host_key"]
    services = [Service(lab, host, daemon, PORT) for host in lab.names]
    for service in services:
        service.await_port()
    return services
