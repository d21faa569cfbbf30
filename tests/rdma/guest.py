"""What the emulated machines of ``run.sh`` do: ``client`` runs the cases, ``host`` is a host."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wheelmount import config
from wheelmount.hosts.address import Address
from wheelmount.hosts.credentials import issue_for

SHARE = Path("/share")
STATE = SHARE / "state"
ORIGINAL, SOURCE = SHARE / "source", Path("/source")
"""The directory as both machines see it, and as the client alone does."""

NETWORK = "eth0"
PATIENCE = 300.0
HOST, SECOND = "tls://10.9.0.2:26600", "tls://10.9.0.1:26601"
LOCKED = "tls://10.9.0.2:26602"
"""A host on the other machine that may lock 64 KiB of memory."""

APART = "unshare", "--mount", "sh", "-c", f'umount {SOURCE}; exec "$@"', "sh"
"""Starts a program on the client's machine that does not see the client's directory."""

PAYLOAD = 4096
"""Bytes of files in a packet at most: the path MTU that Monarch sets."""

FOR_VERBS = {
    "LD_PRELOAD": str(SHARE / "verbs.so"),
    "MONARCH_RDMA_IBVERBS_TARGET": "nic:rxe0",
    "MONARCH_RDMA_QPS_PER_CQ": "8",
    "VERBS_TIMEOUT": "20",
    # An emulated machine needs more time than Monarch gives a host to answer.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "120s",
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "300s",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "300s",
    "HYPERACTOR_HOST_SPAWN_READY_TIMEOUT": "300s",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "300s",
    "HYPERACTOR_PENDING_ACTOR_DELIVERY_TIMEOUT": "300s",
    "VERBS_LOG": f"{STATE}/verbs.{os.environ['NAME']}",
    "PYTHONPATH": os.environ["TOP"],  # for what is not installed: this, and benchmarks
    "WHEELMOUNT_FETCH_TIMEOUT": "60",
    "WHEELMOUNT_READ_TIMEOUT": "180",
    "WHEELMOUNT_START_TIMEOUT": "150",
    "WHEELMOUNT_TRANSPORT": "rdma",
}
LOSS_BOUND = 300.0
CASES: dict[str, Callable[[], None]] = {}


def case(test: Callable[[], None]) -> Callable[[], None]:
    CASES[test.__name__] = test
    return test


def tell(*words: object) -> None:
    line = " ".join(map(str, words))
    print(line, flush=True)
    with (SHARE / "transcript").open("a") as transcript:
        transcript.write(line + "\n")


def shell(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    return done.stdout


def wheelmount(*arguments: str, code: int = 0) -> str:
    """Run the production command, which must end with a code; show it and its output."""
    began = time.monotonic()
    done = subprocess.run(
        ["wheelmount", *arguments],
        env=os.environ | FOR_VERBS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    tell("client$", "wheelmount", *arguments)
    tell(done.stdout.rstrip())
    assert done.returncode == code, f"exit code {done.returncode}"
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return done.stdout


def script(text: str) -> str:
    """Run a script on the hosts, where the directory is mounted."""
    tell(text.rstrip())
    path = SHARE / "script.sh"
    path.write_text(text)
    return wheelmount("run", str(SOURCE), str(path))


def until(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


def received() -> tuple[int, int]:
    """Bytes that rxe0 of the host received: by its packets, and by the network's counter."""
    on_host("counters")
    packets, octets = map(int, (STATE / "counters").read_text().split())
    return packets * PAYLOAD, octets


def on_host(request: str) -> None:
    """Have the other machine do something."""
    done = STATE / f"{request}.done"
    done.unlink(missing_ok=True)
    (STATE / "request").write_text(request)
    until(done.exists)


def counters() -> None:
    statistics = shell("rdma statistic show link rxe0/1")
    packets = number(r"rcvd_pkts (\d+)", statistics)
    seen = shell(f"tc -s filter show dev {NETWORK} ingress")
    octets = number(r"Sent (\d+) bytes", seen)
    (STATE / "counters").write_text(f"{packets} {octets}")


OF_RDMA = "protocol ip u32 match ip protocol 17 0xff match ip dport 4791 0xffff"
"""Packets, for ``tc``."""


def drop() -> None:
    shell(f"tc filter add dev {NETWORK} ingress pref 1 {OF_RDMA} action drop")


def let_pass() -> None:
    shell(f"tc filter del dev {NETWORK} ingress pref 1")


def kill() -> None:
    """Kill all programs of Python but this one."""
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        with contextlib.suppress(OSError):
            program = (directory / "exe").readlink().name
            if program.startswith("python") and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


REQUESTS: dict[str, Callable[[], None]] = {
    "counters": counters,
    "drop": drop,
    "pass": let_pass,
    "kill": kill,
}


def make(source: Path, megabytes: int, seed: int = 1) -> int:
    """Make a tree of a large file, of many small ones, and of what else there is."""
    rng = random.Random(seed)  # noqa: S311 - the same every time
    for old in source.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    (source / "many").mkdir()
    (source / "large").write_bytes(rng.randbytes(megabytes << 20))
    for number in range(200):
        (source / "many" / f"{number}").write_bytes(rng.randbytes(rng.randrange(20_000)))
    (source / "empty").touch()
    (source / "link").symlink_to("large")
    return sum(path.stat().st_size for path in source.rglob("*") if not path.is_symlink())


def software_device() -> None:
    shell(f"rdma link add rxe0 type rxe netdev {NETWORK}")
    shell(f"tc qdisc add dev {NETWORK} clsact")
    shell(f"tc filter add dev {NETWORK} ingress pref 9 {OF_RDMA} action ok")


def worker(address: str, *before: str, device: bool = True) -> subprocess.Popen[bytes]:
    """Start a host.

    Args:
        address: where it listens.
        before: a program that starts it, with arguments.
        device: whether Monarch is to take the software device.
    """
    port = address.rpartition(":")[2]
    credentials = STATE / f"{port}.pem"
    until(credentials.exists)
    process = subprocess.Popen(
        [*before, "wheelmount", "worker", address, "--credentials", str(credentials)],
        env=os.environ
        | {
            name: value
            for name, value in FOR_VERBS.items()
            if device or not name.startswith(("LD_", "MONARCH_RDMA_"))
        },
        stdout=(SHARE / f"worker.{port}").open("w"),
        stderr=subprocess.STDOUT,
    )
    until(lambda: listens(int(port)))
    return process


def listens(port: int) -> bool:
    """Whether a program of this machine listens at a port."""
    return f":{port} " in shell("ss --listening --tcp --numeric")


up: list[str] = []
"""Hosts of the session that is up."""


def session(*hosts: str, fanout: int = 0) -> None:
    """Have a session of these hosts, and no other."""
    if up == [*hosts]:
        return
    down()
    up.extend(hosts)
    FOR_VERBS["WHEELMOUNT_FANOUT"] = str(fanout)
    others = [host.removeprefix("tls://") for host in hosts[1:]]
    wheelmount("up", "--hosts", ",".join([hosts[0], *others]))


def down() -> None:
    if up:
        up.clear()
        wheelmount("down")


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


def arrived(before: tuple[int, int], least: int) -> None:
    """Check that so many bytes came to the host's device since ``before``, and tell."""
    packets, octets = (now - then for now, then in zip(received(), before, strict=True))
    tell(f"wanted: {least:,} bytes; rxe0 of the host received {octets:,}, and by its own count")
    tell(f"packets of {PAYLOAD} for {packets:,}")
    assert min(packets, octets) >= least


def shown(*patterns: str) -> None:
    """Check what ``wheelmount status`` says, which asks the hosts and does not wait long."""
    for _ in range(3):
        status = wheelmount("status", "--each")
        if all(re.search(pattern, status) for pattern in patterns):
            return
    raise AssertionError(f"status does not say {patterns}")


def same() -> None:
    """Check on the hosts that the mount is as the source."""
    found = script("diff -r . /share/source && echo no difference")
    assert found.count("no difference") == len(up), found


@case
def deliver() -> None:
    size = make(ORIGINAL, 12)
    session(HOST)
    before = received()
    wheelmount("mount", str(SOURCE))
    arrived(before, size)
    shown("by rdma from client .*generation 1 ")
    same()


@case
def refresh() -> None:
    with (ORIGINAL / "large").open("r+b") as large:
        large.seek(5 << 20)
        large.write(os.urandom(3 << 20))
    (ORIGINAL / "new").write_bytes(os.urandom(1 << 20))
    shutil.rmtree(ORIGINAL / "many")
    before = received()
    wheelmount("refresh", str(SOURCE))
    arrived(before, 4 << 20)
    shown("by rdma from client .* generation 2 ")
    same()
    wheelmount("umount", str(SOURCE))


@case
def ahead() -> None:
    """What a program reads comes ahead of the rest."""
    session(HOST)
    size = make(ORIGINAL, 64)
    before, _ = received()
    packets = "rdma statistic show link rxe0/1 | grep -o 'rcvd_pkts [0-9]*' | cut -d' ' -f2"
    found = script(
        f"tail -c 1000 large | sha256sum; packets=$({packets})\n"
        "tail -c 1000 /share/source/large | sha256sum; echo packets $packets\n"
    )
    hashes = re.findall(r"^([0-9a-f]{64}) ", found, re.M)
    assert len(hashes) == 2 and hashes[0] == hashes[1], found
    came = number(r"packets (\d+)", found) * PAYLOAD - before
    tell(f"the last of {size:,} bytes were read when {came:,} had come")
    assert came < size / 2
    same()


@contextlib.contextmanager
def beside(*, device: bool = True) -> Iterator[None]:
    """Have a second host, on the client's machine, in the context; see ``worker``."""
    down()
    process = worker(SECOND, *APART, device=device)
    try:
        yield
    finally:
        try:
            down()
        finally:
            process.kill()
            process.wait()


@case
def second() -> None:
    """A host takes blocks from another."""
    size = make(ORIGINAL, 8, seed=2)
    with beside():
        session(HOST, SECOND, fanout=1)
        before = received()
        wheelmount("mount", str(SOURCE))
        arrived(before, size)
        shown(r"10\.9\.0\.1 .* by rdma from 10\.9\.0\.2 ", r"10\.9\.0\.2 .* by rdma from client ")
        same()


def scenario(name: str, *arguments: str, module: str = "tests.rdma.scenarios") -> None:
    """Run a program that is a client, where Monarch takes the device."""
    down()
    done = subprocess.run(
        [sys.executable, "-B", "-m", module, *arguments],
        env=os.environ | FOR_VERBS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * PATIENCE,
    )
    if module != "tests.rdma.scenarios" or done.returncode:
        tell(done.stdout.rstrip())
    assert done.returncode == 0, f"{name}: exit code {done.returncode}"


for name in "registrations", "large", "path":
    CASES[name] = functools.partial(scenario, name, name)


@contextlib.contextmanager
def settings(**values: str) -> Iterator[None]:
    """Have settings of wheelmount's in the context, in sessions that start there."""
    names = {f"WHEELMOUNT_{name.upper()}": value for name, value in values.items()}
    before = {name: FOR_VERBS[name] for name in names}
    down()
    FOR_VERBS.update(names)
    try:
        yield
    finally:
        down()
        FOR_VERBS.update(before)


@case
def mixed() -> None:
    """One host has a device, the next has none."""
    make(ORIGINAL, 6)
    with beside(device=False):
        with settings(transport="auto"):
            session(HOST, SECOND)
            wheelmount("mount", str(SOURCE))
            shown(r"10\.9\.0\.1 .* by (?!.*rdma)", r"10\.9\.0\.2 .* by .*rdma.* from ")
            same()
        session(SECOND)
        said = wheelmount("mount", str(SOURCE), code=74)
        assert "no RDMA device that Monarch takes" in said


@case
def locked() -> None:
    """A host may not lock enough memory to register any."""
    make(ORIGINAL, 4)
    with settings(transport="auto", fetch_timeout="20"):
        session(LOCKED)
        wheelmount("mount", str(SOURCE))
        shown(r" by tls \(no rdma from client: it failed")
        same()


@case
def dead() -> None:
    with beside():
        scenario("dead", "dead")


@case
def patterns() -> None:
    """Pieces of memory one by one, as one, and scattered."""
    with beside():
        hosts = f"{HOST},{SECOND.removeprefix('tls://')}"
        few = "--rounds", "1", "--pieces", "8"  # 256, one by one, take minutes here
        scenario("patterns", *few, "--hosts", hosts, module="benchmarks.rdma")


@case
def loss() -> None:
    """A network that takes 50 ms and loses a packet in a hundred, without RDMA."""
    size = make(ORIGINAL, 24, seed=3)
    with settings(transport="tcp"):
        session(HOST)
        shell(f"tc qdisc add dev {NETWORK} root netem delay 50ms loss 1%")
        try:
            began = time.monotonic()
            wheelmount("mount", str(SOURCE))
            took = time.monotonic() - began
            tell(f"{size:,} bytes took {took:.0f} s")
            assert took < LOSS_BOUND
            same()
        finally:
            shell(f"tc qdisc del dev {NETWORK} root")
        shown("by tls from client")


def client(cases: Sequence[str]) -> int:
    for address in HOST, SECOND, LOCKED:
        path = STATE / f"{address.rpartition(':')[2]}"
        path.touch(mode=0o600)
        path.write_bytes(issue_for(Address.parse(address), config.load()))
        path.rename(path.with_suffix(".pem"))
    until((STATE / "host").exists)
    ORIGINAL.mkdir(exist_ok=True)
    SOURCE.mkdir()
    shell(f"mount --bind {ORIGINAL} {SOURCE}")
    failed = []
    for name in cases:
        tell(f"-- {name}")
        began = time.monotonic()
        try:
            CASES[name]()
        except Exception:
            tell(traceback.format_exc())
            failed.append(name)
        else:
            tell(f"-- {name}: as it should be, in {time.monotonic() - began:.0f} s")
    down()
    tell("failed:", ", ".join(failed) or "none")
    return len(failed)


def host() -> None:
    cases = os.environ["CASES"].split(",")
    worker(HOST)
    if "locked" in cases:
        worker(LOCKED, "setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536")
    (STATE / "host").touch()
    while not (STATE / "result").exists():
        request = STATE / "request"
        if request.exists():
            name = request.read_text()
            if name:
                request.unlink()
                try:
                    REQUESTS[name]()
                    (STATE / f"{name}.done").touch()
                except BaseException:
                    tell("host:", traceback.format_exc())
        time.sleep(0.2)


def main() -> None:
    software_device()
    print(shell("rdma link show"), flush=True)
    if os.environ["NAME"] == "host":
        host()
        return
    result = 1
    try:
        result = client(os.environ["CASES"].split(","))
    finally:
        (STATE / "result").write_text(str(result))
    sys.exit(result)


if __name__ == "__main__":
    main()
