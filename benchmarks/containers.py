"""How fast containers start, and how fast overlays are: ``python -m benchmarks.containers``.

From the checkout, with an image of images/python.def. Medians of all rounds, everything in turn in
every round; containers read wheels and image from a local disk unless it says otherwise.

overlays   pandas installed by uv and by pip into a new overlay of each kind
start      ``true`` by apptainer alone, by this project, and in an instance
mounted    an image that lies in a mount, against the same as a local file (as root)
streams    what goes through ``exec -i``, against apptainer alone, from the first byte to the last
together   several containers at once that install and import requests
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from io import RawIOBase
from pathlib import Path
from statistics import median
from typing import cast

from wheelmount import config, remotemount
from wheelmount.containers import apptainer
from wheelmount.containers.container import Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import KINDS, Overlay
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Commands
from wheelmount.hosts.local import LocalHosts
from wheelmount.wheels import redirect

PARTS = ("overlays", "start", "mounted", "streams", "together")

WHEELMOUNT = sys.executable, "-m", "wheelmount.cli.main"

GIB = 1 << 30

ZEROS = bytearray(1 << 20)

Samples = dict[str, list[float]]


class Bench:
    """One run of it, in a directory of its own."""

    def __init__(self, image: Path, packages: Path, work: Path) -> None:
        self.image, self.packages, self.work = image, packages, work
        self._count = 0
        self.samples: Samples = {}

    def container(
        self, name: str, overlay: Overlay | None = None, image: Path | None = None
    ) -> Container:
        """A container with pip and uv pointed at the wheels."""
        self._count += 1
        return Container(
            image or self.image,
            self.work / f"{name}{self._count}",
            overlay,
            packages=self.packages,
            env=redirect.environment(),
            files={redirect.PIP_CONF: redirect.pip_conf(), redirect.UV_TOML: redirect.uv_toml()},
        )

    def measure(self, name: str, work: Callable[[], int]) -> None:
        """Time it; it has to end with 0."""
        started = time.perf_counter()
        code = work()
        self.samples.setdefault(name, []).append(time.perf_counter() - started)
        if code:
            raise SystemExit(f"{name}: ended with {code}")

    # ----------------------------------------------------------------------------------------------

    def overlays(self) -> None:
        """Install pandas by uv and by pip into a new overlay of each kind."""
        for kind in KINDS:
            for tool in (["uv", "pip"], ["pip"]):
                overlay = Overlay(self.work / "state", f"{kind}-{tool[0]}", "n1", kind)
                argv = [*tool, "install", "--quiet", "pandas"]
                with self.container("overlay", overlay) as container:
                    what = f"{tool[0]} install pandas, {kind}"
                    self.measure(what, partial(quiet, container, argv))
                overlay.remove()

    def start(self) -> None:
        """Run ``true`` by apptainer alone, by wheelmount, and in an instance."""
        plain = [str(apptainer.find()), "--silent", "exec", *apptainer.exec_privileges()]
        self.measure("apptainer exec true", lambda: call([*plain, str(self.image), "true"]))
        with self.container("start", Overlay(self.work / "state", "start", "n1")) as container:
            command = container.command(["true"])
            self.measure("the same, shut off, with an overlay", lambda: call(command))
        order = Order(
            "n1", str(self.image), "start", str(self.work / "state"), str(self.work / "runtime"),
            packages=str(self.packages),
            environment=redirect.environment(),
            files={redirect.PIP_CONF: redirect.pip_conf(), redirect.UV_TOML: redirect.uv_toml()},
        )  # fmt: skip
        if os.access(sys.executable, os.X_OK):
            note = self.work / "note"
            note.write_bytes(order.encode(["true"]))
            ours = [sys.executable, *PROGRAM[1:], str(note)]
            self.measure("wheelmount's own command on a host", lambda: call(ours))
        instance = Instance(self.work / "runtime", "bench", "n1")
        held = Container(self.image, instance.workdir, Overlay(self.work / "state", "start", "n1"))
        self.measure("an instance started", lambda: instance.ensure(held).pid * 0)
        self.measure("true in it", lambda: instance.run(held, ["true"]))
        instance.stop()

    def mounted(self) -> None:
        """Start containers from an image in a mount, and from the same image as a local file."""
        folder = self.work / "images"
        if not folder.exists():
            folder.mkdir()
            (folder / "img.sif").write_bytes(self.image.read_bytes())
        read = ["sh", "-c", "find /usr -type f -print0 | xargs -0 cat >/dev/null"]
        places: dict[str, str | None] = {"local file": None, "bind": "bind", "devfuse": "devfuse"}
        for name, adapter in places.items():
            settings = replace(config.load(), adapter=adapter or "auto", runtime_dir=str(self.work))
            with LocalHosts(1, settings, namespaces=False) as hosts:
                if adapter is None:
                    self._start_from(name, folder / "img.sif", read)
                    continue
                started = time.perf_counter()
                with remotemount(hosts, folder, str(self.work / "mnt"), settings=settings) as mount:
                    image = Path(mount.mntpoints["host0"], "img.sif")
                    with self.container("arriving", image=image) as container:
                        code = quiet(container, ["true"])
                    took = time.perf_counter() - started
                    self.samples.setdefault(f"{name}: mount, and true in it", []).append(took)
                    if code:
                        raise SystemExit("a container of an arriving image does not start")
                    mount.wait()
                    self._start_from(name, image, read)

    def _start_from(self, name: str, image: Path, read: list[str]) -> None:
        with self.container("mounted", image=image) as container:
            self.measure(f"{name}: first true", lambda: quiet(container, ["true"]))
            self.measure(f"{name}: true", lambda: quiet(container, ["true"]))
            self.measure(f"{name}: /usr read", lambda: quiet(container, read))

    def streams(self) -> None:
        """Send 1 GiB in and out by ``exec -i`` and by apptainer alone."""
        plain, program = "apptainer exec", str(apptainer.find())
        options = ["--image", str(self.image), "--hosts", "local:1", "--overlay-kind", "memory"]
        ways = {
            plain: [program, "--silent", "exec", *apptainer.exec_privileges(), str(self.image)],
            "exec -i": [*WHEELMOUNT, "exec", "-q", "-i", *options, "--"],
        }
        for name, command in ways.items():
            give = ["head", "-c", str(GIB), "/dev/zero"]
            self._stream(f"1 GiB out, {name}", [*command, *give], 0, GIB)
            sink = ["sh", "-c", "echo; cat >/dev/null; echo"]
            self._stream(f"1 GiB in, {name}", [*command, *sink], GIB, 2)
        self._passed_on("1 GiB out, passed on", (*ways[plain], *give), 0, GIB)
        self._passed_on("1 GiB in, passed on", (*ways[plain], *sink), GIB, 2)
        for way in ("out", "in"):
            for name in ("exec -i", "passed on"):
                alone, ours = (self.samples[f"1 GiB {way}, {each}"][-1] for each in (plain, name))
                print(f"1 GiB {way}, {name}: {alone / ours:.2f} of {plain}", flush=True)

    def _stream(self, name: str, command: list[str], size: int, expected: int) -> None:
        """Time what goes in, if anything does, and what comes out, from first byte to last."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        environment = {**os.environ, **apptainer.environment()}
        with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
            expected -= len(process.stdout.read(1))
            started = time.perf_counter()
            while size:
                size -= process.stdin.write(memoryview(ZEROS)[:size])
            process.stdin.close()
            while expected and (count := process.stdout.readinto(ZEROS)):
                expected -= count
            took = time.perf_counter() - started
            if process.wait() or expected or process.stdout.read():
                raise SystemExit(f"{name}: ended with {process.returncode}, {expected} bytes short")
        self.samples.setdefault(name, []).append(took)

    def _passed_on(self, name: str, argv: tuple[str, ...], size: int, expected: int) -> None:
        """The same where a command's streams cannot be its client's own."""
        times: list[float] = []
        count = 0

        def take(_host: str, _stream: str, data: bytes) -> None:
            nonlocal count
            count += len(data)
            if len(times) < 1 or count == expected:
                times.append(time.perf_counter())

        settings = replace(config.load(), runtime_dir=str(self.work))
        # As much work as this process has with apptainer alone; head(1) writes 8 KiB at a time.
        give = f"import os; zeros = bytes({len(ZEROS)})\nfor _ in range({size // len(ZEROS)}): "
        give += "os.write(1, zeros)"
        zeros = subprocess.Popen([sys.executable, "-c", give], stdout=subprocess.PIPE)
        with zeros, LocalHosts(1, settings) as hosts, Commands(list(hosts), 60) as commands:
            stdin = cast(RawIOBase, zeros.stdout.raw) if size else None  # type: ignore[union-attr]
            command = Command(argv, environment=apptainer.environment())
            commands.run({"host0": command}, take, stdin).raise_for_status()
        if count != expected:
            raise SystemExit(f"{name}: {expected - count} bytes short")
        self.samples.setdefault(name, []).append(times[-1] - times[0])

    def together(self) -> None:
        """Install and import requests in several containers at once."""
        for count in (1, 4, 8):
            self.measure(f"{count} at once", partial(self._at_once, count))

    def _at_once(self, count: int) -> int:
        codes: list[int] = []
        argv = ["sh", "-c", "uv pip install -q requests && python -c 'import requests'"]

        def one(number: int) -> None:
            overlay = Overlay(self.work / "state", "together", f"n{number}")
            with self.container(f"together{number}-", overlay) as container:
                codes.append(quiet(container, argv))
            overlay.remove()

        threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(codes) if len(codes) == count else 1


def quiet(container: Container, argv: list[str]) -> int:
    """Run a command in it; what it prints is not wanted."""
    return container.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def call(command: Iterable[str]) -> int:
    """Run a command as it is."""
    return subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=apptainer.environment(),
        check=False,
    ).returncode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.containers")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--image", type=Path, default=Path("build/images/python.sif"))
    parser.add_argument(
        "--packages", type=Path, help="wheels of pandas and requests", required=True
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--user", type=int, help="go on as this user, who must see the files")
    parser.add_argument("--json", type=Path, help="file for all samples")
    given = parser.parse_args()
    if given.user is not None:
        os.setgroups([])
        os.setgid(given.user)
        os.setuid(given.user)
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as work:
        os.environ["WHEELMOUNT_STATE_DIR"] = f"{work}/state"  # no overlays of other runs
        if given.user is not None:
            os.environ["HOME"] = work
        bench = Bench(given.image.absolute(), given.packages.absolute(), Path(work))
        for _ in range(given.rounds):
            for part in given.parts or PARTS:
                getattr(bench, part)()
    for name, seconds in bench.samples.items():
        every = " ".join(f"{s:.3f}" for s in seconds)
        print(f"{name}: {median(seconds):.3f} s ({every})")
    if given.json:
        given.json.write_text(json.dumps(bench.samples))


if __name__ == "__main__":
    main()
