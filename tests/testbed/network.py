"""The lab's network: a bridge, and a cable from it to each host, made and shaped with iproute2."""

from __future__ import annotations

import ipaddress
import re
import subprocess

from wheelmount.errors import UnavailableError

BRIDGE = "bridge"

CARD = "eth0"
"""Name of a host's own end of its cable."""

SUBNET = ipaddress.ip_network("10.77.0.0/24")

BURST, LATENCY = "512kb", "50ms"
"""What a shaped link lets through at once, and how long it queues what is above its rate."""

CONGESTION = "cubic"
"""How connections share a link: as by default on Linux, whatever the default of this machine. With
``bbr``, the first connections may leave others next to nothing for seconds."""

FRAMES_UP_TO = 200e6
"""Bits a second of a link up to which hosts give it single frames, as network cards do. TCP gives a
device packets of up to 64 KB: the queue of a link of 10 Mbit/s holds one of these, and a connection
whose packet is dropped whole each time stands still for ten seconds. Faster links have queues for
many, and single frames would take much of a processor."""

SUPPLIED = 65_535
"""Segments of a packet that a device takes by default."""

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}

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
    """Orders for ``ip -batch`` on a host: its address, and TCP as ``CONGESTION`` says."""
    prefix = SUBNET.prefixlen
    return (
        f"link set lo up\naddr add {own}/{prefix} dev {CARD}\nlink set {CARD} up\n"
        f"route change {SUBNET} dev {CARD} proto kernel scope link src {own} congctl {CONGESTION}\n"
    )


def make_rate(device: str, rate: str | None) -> str:
    """Orders for ``tc -batch``: limit what a device sends, to a rate as ``tc`` knows it."""
    if rate is None:
        return f"qdisc replace dev {device} root noqueue\n"
    return f"qdisc replace dev {device} root tbf rate {rate} burst {BURST} latency {LATENCY}\n"


def make_packets(rate: str | None) -> str:
    """Orders for ``ip -batch`` on a host: the size of packets that it gives a link of a rate."""
    bits = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate or "")
    fast = rate is None or (bits and float(bits[1]) * UNITS[bits[2]] > FRAMES_UP_TO)
    return f"link set {CARD} gso_max_segs {SUPPLIED if fast else 1}\n"


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
