"""The lab's network: a bridge, and a cable from it to each host, made and shaped with iproute2."""

from __future__ import annotations

import ipaddress
import subprocess

from wheelmount.errors import UnavailableError

BRIDGE = "bridge"

CARD = "eth0"
"""Name of a host's own end of its cable."""

SUBNET = ipaddress.ip_network("10.77.0.0/24")

BURST, LATENCY = "512kb", "50ms"
"""What a shaped link lets through at once, and how long it queues what is above its rate."""

TIMEOUT = 20.0
"""Seconds that such an order may take; milliseconds are usual."""


def address(place: int) -> str:
    """Address of the host at a place of the lab; 0 is the login host."""
    return str(SUBNET[place + 10])


def make_bridge() -> str:
    """Orders for ``ip -batch``: the bridge that all are connected to."""
    return f"link set lo up\nlink add {BRIDGE} type bridge\nlink set {BRIDGE} up\n"


def make_cable(host: str, pid: int) -> str:
    """Orders for ``ip -batch``: a cable from the bridge to the network namespace of a process."""
    return (
        f"link add {host} type veth peer name {CARD} netns {pid}\n"
        f"link set {host} master {BRIDGE} up\n"
    )


def make_card(own: str) -> str:
    """Orders for ``ip -batch`` on a host: its address."""
    prefix = SUBNET.prefixlen
    return f"link set lo up\naddr add {own}/{prefix} dev {CARD}\nlink set {CARD} up\n"


def make_rate(device: str, rate: str | None) -> str:
    """Orders for ``tc -batch``: limit what a device sends, to a rate as ``tc`` knows it."""
    if rate is None:
        return f"qdisc replace dev {device} root noqueue\n"
    return f"qdisc replace dev {device} root tbf rate {rate} burst {BURST} latency {LATENCY}\n"


def order(program: str, orders: str, pid: int) -> None:
    """Have ``ip`` or ``tc`` carry orders out in the network namespace of a process.

    Raises:
        UnavailableError: one was refused.
    """
    command = ["nsenter", "--target", str(pid), "--net", program, "-batch", "-"]
    done = subprocess.run(
        command, input=orders, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UnavailableError(
            f"{program} failed: {said[0] if said else f'code {done.returncode}'}",
            hint="it must be of iproute2, and the kernel have veth, bridge and sch_tbf",
        )
