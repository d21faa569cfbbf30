"""Instances: started once, used many times, and gone when they are stopped or killed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.containers.test_running import processes, wait_until
from wheelmount import logs
from wheelmount.containers import apptainer
from wheelmount.containers import instance as instances
from wheelmount.containers.container import Bind, Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import MIB, Overlay
from wheelmount.containers.process import attend
from wheelmount.errors import ContainerError, InputError, WaitError

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    made = Instance(tmp_path / "runtime", "mine", "n1")
    yield made
    made.stop()
    assert Instance.all(tmp_path / "runtime") == []


@pytest.fixture
def container(sif: Path, wheels: Path, instance: Instance, tmp_path: Path) -> Container:
    overlay = Overlay(tmp_path / "state", "mine", "n1")
    return Container(sif, instance.workdir, overlay, packages=wheels)


def test_commands_share_one_container(
    instance: Instance, container: Container, tmp_path: Path
) -> None:
    first = instance.ensure(container)
    assert instance.ensure(container) == instance.find(container) == first
    assert instance.run(container, ["sh", "-c", "pip install hello && echo kept > /tmp/x"]) == 0
    again = replace(container, env={"ODD": "a 'b' $HOME"}, cwd="/usr")
    check = '[ "$(cat /tmp/x)$PWD$ODD" = "kept/usra \'b\' \\$HOME" ] && python -c "import hello"'
    assert instance.run(again, ["sh", "-c", check]) == 0
    assert instance.run(container, ["sh", "-c", "exit 7"]) == 7
    other = Container(container.image, tmp_path / "other", container.overlay)
    with other, pytest.raises(ContainerError, match="in use by instance mine"):
        other.run(["true"])
    os.utime(container.writer.path.with_name(".n1.lock"), (1, 1))  # started long ago
    assert instance.stop()
    assert container.writer.last_used() > time.time() - 3600
    assert not instance.path.exists()
    with other:
        assert other.run(["python", "-c", "import hello"]) == 0, "its overlay stays"
    assert not instance.stop()


def test_it_is_as_shut_off_as_any_container(
    instance: Instance, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAK", "leak")
    monkeypatch.setenv("APPTAINERENV_LEAK", "leak")
    instance.ensure(container)
    seen = "! env | grep -i leak && [ $(tail -n +3 /proc/net/dev | wc -l) = 1 ]"
    assert instance.run(container, ["sh", "-c", f"{seen} && ! touch /packages/x"]) == 0


def test_what_the_image_itself_starts_fills_no_disk(
    instance: Instance, container: Container, tmp_path: Path
) -> None:
    program = tmp_path / "startscript"
    said = logs.SIZE + 1000
    program.write_text(f"#!/bin/sh\nyes {'x' * 1000} | head -c {said}\nsleep 1000\n")
    program.chmod(0o755)
    talking = replace(container, binds=[Bind(program, "/.singularity.d/startscript")])
    instance.ensure(talking)
    assert instance.run(talking, ["true"]) == 0
    (log,) = (instance.path / "config" / "instances" / "logs").rglob("*.out")
    wait_until(lambda: b"left out" in log.read_bytes()[:100], 60)
    wait_until(lambda: log.stat().st_size < logs.SIZE, 60)


def test_another_one_of_its_name_is_refused(instance: Instance, container: Container) -> None:
    instance.ensure(container)
    for other in (
        replace(container, packages=container.workdir),
        replace(container, binds=[Bind(container.workdir, "/x")]),
        replace(container, overlay=None),
    ):
        with pytest.raises(ContainerError, match="is another one") as error:
            instance.ensure(other)
    assert "instance stop mine" in str(error.value.hint)


def test_another_image_at_the_path_of_its_own_is_refused(
    instance: Instance, container: Container, sif: Path, tmp_path: Path
) -> None:
    image = tmp_path / "image.sif"
    image.symlink_to(sif)
    linked = replace(container, image=image)
    instance.ensure(linked)
    assert instance.ensure(linked)
    with sif.open("rb") as file:
        head = bytearray(file.read(4096))
    head[48] ^= 1  # of its identifier
    image.unlink()
    image.write_bytes(head)
    with pytest.raises(ContainerError, match=f"it runs an earlier {image}"):
        instance.ensure(linked)


def test_what_is_given_besides_its_name_is_not_passed_over(
    instance: Instance, container: Container, tmp_path: Path
) -> None:
    instance.ensure(container)
    name_alone = Container(container.image, container.workdir)
    assert instance.find(name_alone)
    for other in (
        replace(name_alone, packages=container.workdir),
        replace(name_alone, binds=[Bind(container.workdir, "/x")]),
        replace(name_alone, overlay=Overlay(tmp_path / "state", "another", "n1")),
        replace(name_alone, nv=True),
        replace(name_alone, privileged=True),
    ):
        with pytest.raises(ContainerError, match="is another one"):
            instance.find(other)
    sized = Overlay(tmp_path / "state", "mine", "n1", None, 100 * MIB)
    for find in (instance.find, instance.ensure):
        with pytest.raises(InputError, match="of another kind: directory"):
            find(replace(container, overlay=sized))


@pytest.mark.costly
@pytest.mark.skipif(os.geteuid() != 0, reason="of root's containers")
def test_commands_have_the_privileges_of_their_instance(cli: Cli, sif: Path) -> None:
    command = ["exec", "--hosts", "local:1", "--instance", "one"]
    try:
        more = ["--image", sif, "--privileged", "--overlay", "mine"]
        assert cli(*command, *more, "--", "true").returncode == 0
        assert cli(*command, "--", "mount", "-t", "tmpfs", "none", "/mnt").returncode == 0
        for other in (["--overlay", "other"], ["--bind", "/usr"]):
            refused = cli(*command, *other, "--", "true")
            assert "instance one on host0 is another one" in refused.stderr
    finally:
        assert cli("instance", "stop", "one").returncode == 0


def test_killed_one_is_started_again(instance: Instance, container: Container) -> None:
    record = instance.ensure(container)
    for number in (record.pid, *_children(record.pid)):
        os.kill(number, signal.SIGKILL)
    wait_until(lambda: instance.record() is None)
    with pytest.raises(ContainerError, match="has ended"):
        instance.run(container, ["true"])
    assert instance.remembered() == record
    assert instance.ensure(container).pid != record.pid
    assert instance.run(container, ["true"]) == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_killed_one_whose_number_another_process_has(
    known: bool, instance: Instance, container: Container
) -> None:
    record = instance.ensure(container)
    for number in (record.pid, *_children(record.pid)):
        os.kill(number, signal.SIGKILL)
    wait_until(lambda: instance.record() is None)
    with subprocess.Popen(["sleep", "1000"]) as other:
        (file,) = instance.path.glob("config/instances/app/*/*/*/*.json")
        state = json.loads(file.read_text())
        file.write_text(json.dumps({**state, "pid": other.pid, "ppid": other.pid}))
        if known:
            described = dataclasses.asdict(record) | {"pid": other.pid}
            (instance.path / "instance.json").write_text(json.dumps(described))
        else:  # its start was killed
            (instance.path / "instance.json").unlink()
        try:
            assert instance.stop()
            assert other.poll() is None
        finally:
            other.kill()


def test_one_that_apptainer_cannot_stop_is_an_error(
    instance: Instance, container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "apptainer"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    instance.ensure(container)
    with monkeypatch.context() as patch:
        patch.setattr(instances, "STOP_TIMEOUT", 0.5)
        patch.setattr(apptainer, "find", lambda: hangs)
        with pytest.raises(WaitError, match="does not end"):
            instance.stop()


def test_stop_ends_what_runs_in_it(instance: Instance, container: Container) -> None:
    mark = "14.1421"
    instance.ensure(container)
    script = ["sh", "-c", f"trap '' TERM; sleep {mark}"]
    environment = {**os.environ, "APPTAINER_CONFIGDIR": str(instance.path / "config")}
    with container.joining() as own:
        command = container.join_command("wheelmount", script, own)
        with subprocess.Popen(command, env=environment, start_new_session=True):
            wait_until(lambda: processes(mark))
            instance.stop()
    assert not processes(mark)


def test_each_command_has_its_own_environment(
    instance: Instance, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (replace(container, env={"TOKEN": f"token-{n}-5c2e"}) for n in (1, 2))
    check = ["sh", "-c", 'test "$TOKEN" = "$0"']
    instance.ensure(first)
    codes: list[int] = []

    def after_another(*arguments: Any, **options: Any) -> int:
        monkeypatch.undo()
        codes.append(instance.run(second, [*check, "token-2-5c2e"]))
        return attend(*arguments, **options)

    monkeypatch.setattr(instances, "attend", after_another)
    assert instance.run(first, [*check, "token-1-5c2e"]) == 0
    assert codes == [0]
    assert not _files_with(instance.path, b"token-2")


def test_the_environment_of_a_killed_command_does_not_stay(
    cli: Cli, sif: Path, workplace: Path
) -> None:
    runtime, mark = workplace / "runtime", "22.3607"
    order = Order(
        *("n1", str(sif), "mine", str(workplace / "state"), str(runtime)),
        instance="one",
        environment={"TOKEN": "token-3-5c2e"},
    )
    (workplace / "note").write_bytes(order.encode(["sleep", mark]))
    with subprocess.Popen([sys.executable, *PROGRAM[1:], str(workplace / "note")]) as owner:
        wait_until(lambda: any("/sleep" in line for line in processes(mark)))
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes(mark))
    folder = runtime / f"wheelmount-{os.getuid()}" / "instances"
    wait_until(lambda: not _files_with(folder, b"token-3"))
    assert cli("instance", "stop", "one").returncode == 0


def _files_with(folder: Path, text: bytes) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text in file.read_bytes()]


def test_no_instance(instance: Instance, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="there is no instance mine"):
        instance.find(Container(tmp_path, instance.workdir))
    broken = tmp_path / "no.sif"
    broken.write_text("no image")
    with pytest.raises(ContainerError, match="could not start"):
        instance.ensure(Container(broken, instance.workdir))
    assert not instance.path.exists(), "nothing is left of one that did not start"
    with pytest.raises(InputError, match="no name"):
        Instance(tmp_path, "../x", "n1")


def test_a_look_at_the_moment_of_its_start_does_no_harm(
    instance: Instance, container: Container
) -> None:
    instance.path.parent.mkdir(parents=True, mode=0o700)
    for folder in (instance.path.parents[1], instance.runtime):
        folder.chmod(0o700)
    with (instance.path.parent / ".n1.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as ``record`` does
        looked = threading.Timer(1, fcntl.flock, (file, fcntl.LOCK_UN))
        looked.start()
        assert instance.ensure(container)
        looked.join()


def test_starts_and_ends_at_once_are_one_after_the_other(
    instance: Instance, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = threading.Lock()

    ended: Callable[[Instance], None] = Instance._end

    def alone(work: Callable[[], object]) -> None:
        assert busy.acquire(blocking=False), "another process works on it"
        try:
            work()
            time.sleep(0.001)
        finally:
            busy.release()

    def start(self: Instance, _: Container) -> None:
        alone(lambda: self.path.mkdir(exist_ok=True))

    monkeypatch.setattr(Instance, "_start", start)
    monkeypatch.setattr(Instance, "_end", lambda self: alone(lambda: ended(self)))

    def work() -> None:
        for _ in range(50):
            if not instance.path.is_dir():
                instance.ensure(container)
            instance.stop()
            instance.discard()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    assert list((instance.runtime / "instances").iterdir()) == []


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for child in file.read_text().split()
    ]
