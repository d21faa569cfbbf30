"""Hosts of a network that are lost while bytes arrive: what the others see, and the client."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import LOGIN, Lab
from tests.testbed.service import start_workers, workers_spec
from tests.testbed.traces import Traces

pytestmark = [pytest.mark.lab, pytest.mark.hosts, pytest.mark.fuse]

PATH = "/mnt/tree"

SIZE = 12 << 20
"""Bytes of the file."""

RATE = "20mbit"
"""Of the client's link until a host is lost: three hosts need a quarter of a minute."""

BOUND = 60
"""Seconds within which the client must know what came of each host."""

CLIENT = """
import json, os, sys
from wheelmount import config, remotemount
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.progress import SILENT
from wheelmount.errors import WheelmountError
from wheelmount.hosts.spec import parse
hosts = parse(sys.argv[1]).make(config.load(), namespaces=False)
hosts.start()
if "ADOPT" in os.environ:
    settings, identity = config.load(), os.environ["ADOPT"]
    mount = RemoteMount(hosts, sys.argv[2], None, settings, SILENT, identity=identity)
    mount.adopt()
else:
    mount = remotemount(hosts, sys.argv[2], sys.argv[3])
    mount.open(keep="KEEP" in os.environ)
def tell(**values):
    print(json.dumps(values), flush=True)
def status():
    return {
        name: found.message if isinstance(found, WheelmountError) else found["held"]
        for name, found in mount.status().items()
    }
def transports():
    found = [its for its in mount.status().values() if not isinstance(its, WheelmountError)]
    return sorted({its["delivery"]["transport"] for its in found})
tell(held=status(), identity=mount.identity)
while sys.stdin.readline() == "again\\n":
    tell(held=status(), identity=mount.identity)
try:
    mount.wait(float(sys.argv[4]))
except WheelmountError as error:
    tell(kind=type(error).__name__, message=error.message)
else:
    tell(kind=None)
tell(held=status(), by=transports(), sent=mount.sent)
sys.stdin.readline()
mount.close(force=True)
tell(closed=True)
"""


@pytest.fixture
def source() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as place:
        path = Path(place) / "source"
        path.mkdir()
        (path / "file").write_bytes(os.urandom(SIZE))
        yield path


@pytest.fixture
def lab(source: Path) -> Iterator[Lab]:
    before = Traces()
    with Lab(3, shared=[source.parent]) as made:
        made.shape(RATE, LOGIN)
        start_workers(made)
        traces = Traces(besides=before)
        yield made
    assert traces.left() == []


class Client:
    """A client on the login host, led step by step."""

    def __init__(self, lab: Lab, source: Path, **variables: str) -> None:
        command = [sys.executable, "-c", CLIENT, workers_spec(lab), str(source), PATH, str(BOUND)]
        environment = {**os.environ, "WHEELMOUNT_BLOCK_SIZE": str(1 << 20), **variables}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self.process = lab.popen(LOGIN, command, env=environment, **pipes)

    def hear(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 2 * BOUND)[0], "it says nothing"
        line = self.process.stdout.readline()
        assert line, "the client ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def go_on(self, word: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + b"\n")
        self.process.stdin.flush()

    def ask(self) -> None:
        """Have it say again how far it is."""
        self.go_on(b"again")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.communicate()


def _assert_others_have_it(lab: Lab, source: Path) -> None:
    for host in ("host0", "host2"):
        done = lab.run(host, ["cmp", source / "file", f"{PATH}/file"])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), host


def _assert_clean(lab: Lab) -> None:
    for host in ("host0", "host2"):
        assert not _mounted(lab, host)
        assert lab.run(host, ["test", "-e", PATH]).returncode == 1


@pytest.mark.costly
@pytest.mark.parametrize("lose", [Lab.kill, Lab.unplug], ids=["crashed", "cut off"])
def test_others_finish_and_the_lost_host_is_named(
    lab: Lab, source: Path, lose: Callable[[Lab, str], None]
) -> None:
    with Client(lab, source) as client:
        held = client.hear()["held"]
        assert all(size < SIZE for size in held.values()), "it must be on the way"
        lose(lab, "host1")
        lab.shape(None)
        client.go_on()
        ended = client.hear()
        assert ended["kind"] == "HostError"
        assert ended["message"].startswith("host1: ")
        heard = client.hear()
        assert heard["by"] == ["tcp"]
        held = heard["held"]
        assert (held["host0"], held["host2"]) == (SIZE, SIZE)
        assert isinstance(held["host1"], str), "why nothing is known of it"
        _assert_others_have_it(lab, source)
        client.go_on()
        assert client.hear() == {"closed": True}
        assert client.process.wait(BOUND) == 0
    _assert_clean(lab)


def test_readers_of_a_crashed_client_get_an_error(lab: Lab, source: Path) -> None:
    with Client(lab, source, WHEELMOUNT_FETCH_TIMEOUT="5") as client:
        client.hear()
    # As long as a block may take it is waited for; then hosts know what they cannot get, and are
    # mounted for up to two minutes more.
    for host in lab.hosts:
        reader = lab.run(host, ["sh", "-c", f"cat {PATH}/file >/dev/null"], timeout=BOUND)
        assert "Input/output error" in reader.stderr
        assert _mounted(lab, host)


def test_another_client_goes_on_with_what_is_missing(lab: Lab, source: Path) -> None:
    with Client(lab, source, KEEP="1") as client:
        first = client.hear()
        while min(first["held"].values()) < SIZE // 8:
            client.ask()
            first = client.hear()
        assert max(first["held"].values()) < SIZE, "it must be on the way"
    lab.shape(None)
    with Client(lab, source, ADOPT=first["identity"]) as client:
        client.hear()
        client.go_on()
        assert client.hear()["kind"] is None
        ended = client.hear()
        assert set(ended["held"].values()) == {SIZE}
        assert 0 < ended["sent"] <= SIZE - SIZE // 8
        for host in lab.hosts:
            done = lab.run(host, ["cmp", source / "file", f"{PATH}/file"])
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), host
        client.go_on()
        assert client.hear() == {"closed": True}
        assert client.process.wait(BOUND) == 0
    for host in lab.hosts:
        assert not _mounted(lab, host)


def _mounted(lab: Lab, host: str) -> bool:
    return PATH in lab.run(host, ["cat", "/proc/self/mountinfo"]).stdout
