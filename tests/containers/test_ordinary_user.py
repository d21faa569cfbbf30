"""Containers of an ordinary user, who has user namespaces and FUSE and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT, NOBODY
from tests.containers.test_running import output
from tests.mount.test_ordinary_user import _settings as mount_settings
from tests.mount.test_ordinary_user import as_nobody, started_by_fork  # noqa: F401 - a fixture
from tests.mount.test_server import Served
from wheelmount.containers import apptainer, image
from wheelmount.containers.container import Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.order import PROGRAM, Order
from wheelmount.containers.overlay import MIB, Overlay
from wheelmount.errors import ContainerError

CLONE_NEWNS = 0x20000  # linux/sched.h

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


def as_user(work: Callable[[Path], None], *, ids: bool = False) -> None:
    """Run something as an ordinary user with a home directory, which apptainer needs.

    Args:
        work: what to do there.
        ids: the administrator has given the user a range of ids, for others in namespaces.
    """

    def at_home(place: Path) -> None:
        os.environ["HOME"] = str(place)
        os.chdir(place)
        work(place)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            # What is mounted is seen by this process and its children only.
            assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
            _mount("--make-rslave", "/")
            with tempfile.TemporaryDirectory(prefix="wm-etc-", dir="/tmp") as etc:
                os.chmod(etc, 0o755)  # noqa: S103 - everybody reads these
                with _open_to_all(Path(etc)), _subordinate_ids(Path(etc), ids):
                    as_nobody(at_home)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def with_subordinate_ids(work: Callable[[Path], None]) -> None:
    as_user(work, ids=True)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


@contextlib.contextmanager
def _subordinate_ids(etc: Path, wanted: bool) -> Iterator[None]:
    names = ("passwd", "subuid", "subgid") if wanted else ()
    users = Path("/etc/passwd").read_text().replace(":/nonexistent:", ":/tmp:")
    ids = f"{NOBODY}:{1 << 20}:65536\n"
    for name in names:
        (etc / name).write_text(users if name == "passwd" else ids)
        _mount("--bind", etc / name, f"/etc/{name}")
    yield
    for name in names:
        subprocess.run(["umount", f"/etc/{name}"], check=True)


@contextlib.contextmanager
def _open_to_all(etc: Path) -> Iterator[None]:
    """Show this checkout and its Python to everybody, also below directories that are closed."""
    wanted = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), CHECKOUT}
    below: dict[Path, list[Path]] = {}
    for each in wanted:
        closed = [p for p in reversed(each.parents) if not p.stat().st_mode & 0o001]
        if closed:
            below.setdefault(closed[0], []).append(each)
    for top, inner in below.items():
        for number, each in enumerate(inner):
            (etc / f"{number}").mkdir()
            _mount("--bind", each, etc / f"{number}")
        _mount("-t", "tmpfs", "-o", "mode=755", "none", top)
        for number, each in enumerate(inner):
            each.mkdir(parents=True)
            _mount("--move", etc / f"{number}", each)
            (etc / f"{number}").rmdir()
    yield
    for top in below:
        subprocess.run(["umount", "--recursive", "--lazy", top], check=True)


@pytest.mark.costly
@pytest.mark.parametrize("run_as", [as_user, with_subordinate_ids])
def test_the_whole_way(run_as: Callable[[Callable[[Path], None]], None], public: Path) -> None:
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
                        "! touch /packages/x",
                    )
                    assert said.split()[:4] == ["0", "0022", "2", "lo"], said
                    assert "Read-only file system" in said
                assert overlay.found == kind
                with Container(image_file, place / "again", overlay) as container:
                    output(container, "python -c 'import greeting'")
                assert overlay.remove()
        finally:
            served.end()

    run_as(work)


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


@pytest.mark.costly
@pytest.mark.parametrize("allowed", [True, False])
def test_an_image_is_built(allowed: bool, public: Path) -> None:
    def work(place: Path) -> None:
        (place / "mine.def").write_text(
            f"Bootstrap: localimage\nFrom: {public}/python.sif\n%post\n    touch /usr/built\n"
        )
        if not allowed:
            with pytest.raises(ContainerError, match="failed to change uid") as error:
                image.build(place / "mine.def", place / "mine.sif")
            assert "apptainer config fakeroot --add" in str(error.value.hint)
            return
        assert image.build(place / "mine.def", place / "mine.sif")
        with Container(place / "mine.sif", place / "work") as container:
            output(container, "test -e /usr/built")

    (with_subordinate_ids if allowed else as_user)(work)


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


@pytest.mark.costly
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.hosts
def test_in_a_session_whose_hosts_have_namespaces(ids: bool, public: Path) -> None:
    def work(place: Path) -> None:
        for name in ("runtime", "store", "cache", "state"):
            (place / name).mkdir(mode=0o700)
            os.environ[f"WHEELMOUNT_{name.upper()}" + ("_DIR" if name != "store" else "")] = str(
                place / name
            )
        command = [sys.executable, "-m", "wheelmount.cli.main"]
        os.environ |= {"UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}

        def call(*words: str | Path) -> str:
            done = subprocess.run(
                [*command, *map(str, words)],
                capture_output=True,
                text=True,
                timeout=100,
                stdin=subprocess.DEVNULL,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        assert "ok  containers: " in call("doctor") or not ids
        call("up", "--hosts", "local:1")
        try:
            image: list[str | Path] = ["--image", public / "python.sif"]
            packages: list[str | Path] = ["--packages", public / "wheels"]
            install = ["sh", "-c", "pip install -q greeting; id -u"]
            assert call("exec", *image, *packages, *install) == "0\n"
            assert call("exec", *image, "python", "-c", "import greeting") == ""
            needed = ["--with", "greeting", "--find-links", f"{public}/wheels"]
            code = "import greeting, sys; print(sys.prefix.count('/environment-'))"
            assert call("exec", *needed, *image, "python", "-c", code) == "1\n"
            left = ["--collect", "$WHEELMOUNT_OUTPUT", place / "left", *image, "sh", "-c"]
            call("exec", *left, "id -u >$WHEELMOUNT_OUTPUT/id")
            assert (place / "left" / "host0" / "id").read_text() == "0\n"
            left = ["--collect", "/tmp/one", place / "one", *image, "sh", "-c"]
            call("exec", *left, "echo one >/tmp/one")
            assert (place / "one" / "host0" / "one").read_text() == "one\n"
            if ids:
                give = "touch /srv/f /tmp/f && chown 5:7 /srv/f /tmp/f && stat -c %u:%g /srv/f"
                assert call("exec", *image, "sh", "-c", give) == "5:7\n"
                kind = ["--overlay", "image", "--overlay-kind", "image"]
                assert call("exec", *kind, *image, "sh", "-c", give) == "5:7\n"
                assert call("exec", "--instance", "one", *image, "id", "-u") == "0\n"
                call("instance", "stop", "one")
        finally:
            call("down")
        if ids:  # the same, without the namespaces of a session
            for kind in ([], ["--overlay", "image"]):
                assert call("exec", *kind, *image, "stat", "-c", "%u:%g", "/srv/f") == "5:7\n"
        call("overlay", "prune", "--unused", "0")

    as_user(work, ids=ids)


def test_forbidden_namespaces_are_no_full_overlay(public: Path) -> None:
    def work(place: Path) -> None:
        order = Order(
            "n1", str(public / "python.sif"), "mine", str(place / "state"), str(place / "runtime")
        )
        (place / "note").write_bytes(order.encode(["true"]))
        forbid = 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"'
        unshare = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", forbid]

        def call(*words: str) -> subprocess.CompletedProcess[str]:
            command = [*unshare, "sh", sys.executable, *words]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        done = call(*PROGRAM[1:], str(place / "note"))
        assert done.returncode == 69, done.stderr
        assert "hint: as root: sysctl user.max_user_namespaces" in done.stderr
        assert "full" not in done.stderr
        (place / "runtime").mkdir(mode=0o700, exist_ok=True)
        os.environ["WHEELMOUNT_RUNTIME_DIR"] = str(place / "runtime")
        said = call("-m", "wheelmount.cli.main", "doctor").stdout
        assert "!!  containers: ordinary users may make no user namespaces here" in said
        assert "hint: as root: sysctl user.max_user_namespaces" in said

    as_user(work)
