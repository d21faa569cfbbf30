"""Containers of an ordinary user, who has user namespaces and FUSE and nothing else."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.test_ordinary_user import _settings as mount_settings
from tests.mount.test_ordinary_user import as_nobody, started_by_fork  # noqa: F401 - a fixture
from tests.mount.test_server import Served
from wheelmount.containers import apptainer, image
from wheelmount.containers.container import Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.overlay import MIB, Overlay
from wheelmount.errors import ContainerError

pytestmark = [
    pytest.mark.containers,
    pytest.mark.fuse,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user; this is one"),
]


@pytest.fixture
def public(sif: Path, wheels: Path) -> Iterator[Path]:
    """The image and the wheels where everybody can read them."""
    with tempfile.TemporaryDirectory(prefix="wm-public-", dir="/tmp") as name:
        place = Path(name)
        (place / "wheels").mkdir()
        shutil.copyfile(sif, place / "python.sif")
        for wheel in wheels.iterdir():
            shutil.copy(wheel, place / "wheels")
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        yield place


def as_user(work: Callable[[Path], None]) -> None:
    """See ``as_nobody``; with a home directory, which apptainer wants."""

    def at_home(place: Path) -> None:
        os.environ["HOME"] = str(place)
        os.chdir(place)
        work(place)

    as_nobody(at_home)


def output(container: Container, script: str) -> str:
    """What a shell script in the container prints; it has to succeed."""
    with (container.workdir / "said").open("w+") as said:
        code = container.run(["sh", "-ec", script], stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        text = said.read()
    assert code == 0, text
    return text


def test_the_whole_way(public: Path) -> None:
    """Wheels in a mount by fusermount3, installed offline, kept in an overlay of each kind."""

    def work(place: Path) -> None:
        served = Served(public / "wheels", place, mount_settings(place), "devfuse")
        try:
            for block in range(served.layout.blocks):
                served.arrive(block)
            for kind in ("directory", "image"):
                size = 64 * MIB if kind == "image" else None
                overlay = Overlay(place / "state", kind, "n1", None, size)
                image_file = public / "python.sif"
                work = place / f"work-{kind}"
                with Container(image_file, work, overlay, packages=served.mount) as container:
                    said = output(
                        container,
                        "pip install -q greeting; id -u; umask; ls /packages | wc -l; "
                        "tail -n +3 /proc/net/dev | cut -d: -f1; "
                        "! touch /packages/x; ! cat /proc/1/environ | grep -a HOME=/tmp",
                    )
                    assert said.split()[:4] == ["0", "0022", "2", "lo"], said
                    assert "Read-only file system" in said
                assert overlay.found == kind
                with Container(image_file, place / "again", overlay) as container:
                    output(container, "python -c 'import greeting'")
                assert overlay.remove()
        finally:
            served.end()

    as_user(work)


def test_an_instance(public: Path) -> None:
    def work(place: Path) -> None:
        instance = Instance(place / "runtime", "mine", "n1")
        overlay = Overlay(place / "state", "mine", "n1")
        container = Container(
            public / "python.sif", instance.workdir, overlay, packages=public / "wheels"
        )
        try:
            instance.ensure(container)
            assert instance.run(container, ["pip", "install", "-q", "hello"]) == 0
            assert instance.run(container, ["python", "-c", "import hello"]) == 0
            with pytest.raises(ContainerError, match="in use by instance"), overlay.lock("me"):
                pass
        finally:
            instance.stop()
        assert instance.record() is None
        with overlay.lock("free again"):
            pass

    as_user(work)


def test_an_image_is_built(public: Path) -> None:
    def work(place: Path) -> None:
        (place / "mine.def").write_text(
            f"Bootstrap: localimage\nFrom: {public}/python.sif\n%post\n    touch /usr/built\n"
        )
        assert image.build(place / "mine.def", place / "mine.sif")
        with Container(place / "mine.sif", place / "work") as container:
            output(container, "test -e /usr/built")

    as_user(work)


def test_it_is_told_what_the_administrator_must_allow(public: Path) -> None:
    def work(place: Path) -> None:
        with Container(public / "python.sif", place / "work") as container:
            # The same user, in a namespace in which no more may be made.
            command = shlex.join(container.command(["true"]))
            forbid = "echo 0 >/proc/sys/user/max_user_namespaces"
            unshare = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c"]
            done = subprocess.run(
                [*unshare, f"{forbid}; exec {command}"], capture_output=True, text=True, check=False
            )
            assert done.returncode != 0
            error = apptainer.start_error(container.image, done.stderr)
            assert "user.max_user_namespaces" in str(error.hint), done.stderr

    as_user(work)
