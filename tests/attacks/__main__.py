"""Attacks of other users of a machine on a fresh set-up, each tried for real, and what came of it.

    sudo .venv/bin/python -m tests.attacks [NAME]

As root, in namespaces of its own: nothing of it is seen outside, nothing of it stays. Three users
take part: root, a user who works with wheelmount, and a stranger. Ends with 1 if one gets through.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.wheels.support import Index, make_wheel

ROOT, USER, STRANGER = 0, 64001, 64002

INSIDE = "WHEELMOUNT_ATTACKS"
"""Variable of the process within the namespaces."""

CHECKOUT = Path(__file__).parents[2]
HOMES = Path("/tmp/homes")
WORD = "a-word-that-only-its-owner-may-see"
WAIT = 90

HIDDEN = "/tmp", "/dev/shm", "/mnt"
"""Directories that are others within."""

KINDS = "--mount", "--pid", "--net", "--ipc", "--uts"


def main() -> int:
    """Make the namespaces, and try all in them."""
    if INSIDE not in os.environ:
        if any(CHECKOUT.is_relative_to(place) for place in HIDDEN):
            print(f"each attack has these empty: {', '.join(HIDDEN)}; {CHECKOUT} lies below them")
            print("hint: run it from a checkout elsewhere")
            return 2
        command = [
            "unshare",
            *KINDS,
            "--propagation",
            "slave",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "--",
        ]
        environment = {**os.environ, INSIDE: "yes"}
        return subprocess.run(
            [*command, sys.executable, "-m", "tests.attacks", *sys.argv[1:]],
            cwd=CHECKOUT,
            env=environment,
            check=False,
        ).returncode
    _set_up()
    through = 0
    for attack in (each for each in ATTACKS if sys.argv[1:] in ([], [each.__name__])):
        _fresh()
        try:
            outcome = attack()
        except Exception as error:  # that it could not be tried is no defence
            outcome = f"could not be tried: {type(error).__name__}: {error}"
        through += outcome is not None
        name = (attack.__doc__ or "").partition("\n")[0].rstrip(".")
        print(f"{'withstood' if outcome is None else 'GOT THROUGH'}  {name}", flush=True)
        if outcome is not None:
            print(f"             {outcome}", flush=True)
    return int(through > 0)


def _set_up() -> None:
    """Have an empty /tmp and two more users, who may read Python wherever it lies."""

    def mount(*words: str) -> None:
        subprocess.run(["mount", *words], check=True)

    for hidden in HIDDEN:
        mode = "755" if hidden == "/mnt" else "1777"
        mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", hidden)
    python = Path(sys.executable).resolve()
    for place in (*reversed(python.parents), *reversed(CHECKOUT.parents)):
        if not place.stat().st_mode & 0o001:
            upper, work = Path("/mnt", f"upper{place.name}"), Path("/mnt", f"work{place.name}")
            upper.mkdir()
            work.mkdir()
            layers = f"lowerdir={place},upperdir={upper},workdir={work}"
            mount("-t", "overlay", "-o", layers, "overlay", str(place))
            place.chmod(0o755)
    for name in ("passwd", "group"):
        text = Path("/etc", name).read_text()
        for user, number in (("wm-user", USER), ("wm-stranger", STRANGER)):
            more = f"{number}::{HOMES}/{number}:/bin/sh" if name == "passwd" else ""
            text += f"{user}:x:{number}:{more}\n"
        Path("/mnt", name).write_text(text)
        mount("--bind", f"/mnt/{name}", f"/etc/{name}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _fresh() -> None:
    """Have nothing in /tmp but empty homes."""
    for place in (Path("/tmp"), Path("/dev/shm")):
        for path in place.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for user in (USER, STRANGER):
        home = HOMES / str(user)
        home.mkdir(parents=True, mode=0o700)
        os.chown(home, user, user)


def _as(
    user: int, *command: str | Path, cwd: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user, in the user's home."""
    with _started(user, *command, cwd=cwd) as process:
        try:
            out, err = process.communicate(given, WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\nit hangs"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _started(user: int, *command: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    home = Path("/root") if user == ROOT else HOMES / str(user)
    names = {ROOT: "root", USER: "wm-user", STRANGER: "wm-stranger"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Containers' overlays cannot lie on one, as root's home may here.
    own = {"WHEELMOUNT_STATE_DIR": "/tmp/root"} if user == ROOT else {}
    return subprocess.Popen(
        list(map(str, command)),
        user=user,
        group=user,
        extra_groups=[],
        cwd=cwd or home,
        env={
            "HOME": str(home),
            "USER": names[user],
            "PATH": path,
            **own,
            # What is refused is not answered, and waited for.
            "WHEELMOUNT_START_TIMEOUT": "10" if user == STRANGER else "60",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=0o022,
    )


def _wheelmount(user: int, *words: str | Path, **more: str | Path) -> tuple[str, str]:
    """What a command of wheelmount's says."""
    done = _as(user, sys.executable, "-m", "wheelmount.cli.main", *words, **more)  # type: ignore[arg-type]
    return done.stdout, done.stderr


def _source(user: int) -> Path:
    """A directory of a user's."""
    source = HOMES / str(user) / "source"
    _as(user, "mkdir", source)
    _as(user, "tee", source / "file", given="content\n")
    return source


def _write(user: int, path: Path, text: str) -> None:
    done = _as(user, "tee", path, given=text)
    if done.returncode:
        raise OSError(done.stderr)


def _project() -> Path:
    """A directory of the user's in one where all may write."""
    project = Path("/tmp/shared/project")
    project.parent.mkdir()
    project.parent.chmod(0o1777)
    _as(USER, "mkdir", project)
    return project


@contextlib.contextmanager
def _session() -> Iterator[None]:
    out, err = _wheelmount(USER, "up", "--hosts", "local:1")
    if "is up" not in out:
        raise RuntimeError(err)
    try:
        yield
    finally:
        _wheelmount(USER, "down")


def settings_above() -> str | None:
    """Settings in a directory above say where code runs."""
    project = _project()
    _write(STRANGER, project.parent / "wheelmount.toml", 'hosts = "tcp://127.0.0.1:9"\n')
    for user in (USER, ROOT):
        out, _ = _wheelmount(user, "config", "--json", cwd=project)
        found = {each["name"]: each["value"] for each in json.loads(out)}
        if found["hosts"]:
            return f"user {user} would use {found['hosts']}"
    return None


def settings_of_a_project() -> str | None:
    """Settings that come with a project say where code runs."""
    project = _project()
    text = 'hosts = "tcp://127.0.0.1:9"\npython = "/tmp/evil"\nruntime_dir = "/tmp/shared"\n'
    _write(USER, project / "wheelmount.toml", text)
    out, _ = _wheelmount(USER, "config", "--json", cwd=project)
    found = {each["name"]: each["value"] for each in json.loads(out)}
    evil = {name: found[name] for name in ("hosts", "python") if found[name]}
    return f"they set {evil}" if evil or found["runtime_dir"] != "/tmp" else None


def modules_in_tmp() -> str | None:
    """Python modules in /tmp are imported by a command, or by what it starts on hosts."""
    for name in ("wheelmount", "json", "argparse", "sitecustomize"):
        _write(STRANGER, Path(f"/tmp/{name}.py"), "import os\nos.mkdir('/tmp/shared/caught')\n")
    project = _project()
    _write(USER, project / "file", "content\n")
    script = Path(sys.executable).with_name("wheelmount")
    _as(USER, script, "run", "--hosts", "local:1", project, "-", cwd=Path("/tmp"), given="cat file")
    _as(USER, script, "doctor", "--hosts", "local:1", cwd=Path("/tmp"))
    return "a module was imported" if Path("/tmp/shared/caught").exists() else None


def squatted_directories() -> str | None:
    """Directories with the names that the user's would have are there already."""
    for parent in ("/tmp", "/dev/shm"):
        _as(STRANGER, "mkdir", f"{parent}/wheelmount-{USER}")
    out, err = _wheelmount(USER, "run", "--hosts", "local:1", _source(USER), "-", given="cat file")
    if out != "content\n":
        return f"nothing works: {err}"
    left = list(Path("/tmp").glob(f"wheelmount-{USER}/*"))
    return f"it was used: {left}" if left else None


def monarch_log_link() -> str | None:
    """A link at the place of Monarch's log leads to a file of the user's."""
    target = HOMES / str(USER) / "precious"
    _write(USER, target, "precious\n")
    _as(STRANGER, "mkdir", "-m", "777", "/tmp/wm-user")
    _as(STRANGER, "ln", "-s", target, "/tmp/wm-user/monarch_log.log")
    out, err = _wheelmount(USER, "run", "--hosts", "local:1", _source(USER), "-", given="cat file")
    if "content" not in out:
        return f"nothing works: {err}"
    return None if target.read_text() == "precious\n" else "the file was written to"


def monarch_log_pipe() -> str | None:
    """A pipe at the place of Monarch's log stops it."""
    _as(STRANGER, "mkdir", "-m", "777", "/tmp/wm-user")
    _as(STRANGER, "mkfifo", "-m", "666", "/tmp/wm-user/monarch_log.log")
    out, err = _wheelmount(USER, "run", "--hosts", "local:1", _source(USER), "-", given="cat file")
    return None if "content" in out else f"nothing works: {err}"


CONNECT = """
import socket, sys
for name in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(1)
        try:
            caller.connect(chr(0) + name)
            print("in" if caller.recv(1) else "hung up")
        except TimeoutError:
            print("in", name)
        except OSError:
            print("hung up")
"""


def _abstract() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [each[7][1:] for each in fields if len(each) == 8 and each[7].startswith("@")]


def abstract_sockets() -> str | None:
    """Sockets without a file are connected to."""
    with _session():
        names = _abstract()
        if not names:
            raise RuntimeError("there are none")
        answers = _as(STRANGER, sys.executable, "-c", CONNECT, *names).stdout.split("\n")
    opened = [answer for answer in answers if answer.startswith("in")]
    return f"{len(opened)} of {len(names)} answered" if opened else None


KNOCK = """
import socket, sys, threading
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
seen, opened = set(), set()
while not ended.is_set():
    lines = open("/proc/net/unix").read().splitlines()[1:]
    for name in {each.split(" @", 1)[1] for each in lines if " @" in each} - seen:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(1)
            try:
                caller.connect(chr(0) + name)
                seen.add(name)
                if caller.recv(1):
                    opened.add(name)
            except TimeoutError:
                opened.add(name)
            except OSError:
                pass
print(len(seen), len(opened))
"""


def first_moments() -> str | None:
    """Sockets without a file are connected to from the moment that they are there."""
    source = _source(USER)
    with _started(STRANGER, sys.executable, "-c", KNOCK) as knocking:
        out, err = _wheelmount(USER, "run", "--hosts", "local:1", source, "-", given="cat file")
        answer, _ = knocking.communicate("", WAIT)
    if "content" not in out:
        return f"nothing works: {err}"
    seen, opened = map(int, answer.split())
    if not seen:
        raise RuntimeError("there are none")
    return f"{opened} of {seen} answered" if opened else None


IMAGE = CHECKOUT / "build" / "images" / "python.sif"

REACH = (
    "mount -t tmpfs none /mnt",
    "mknod /tmp/disk b 8 0",
    "hostname stranger",
    "echo 1 >/proc/sys/vm/drop_caches",
    "echo h >/proc/sysrq-trigger",
    "unshare --mount true",
    "unshare --user true",
    "head -c 1 /dev/mem",
)


def container_of_root() -> str | None:
    """Root in an offline container of root's reaches the machine."""
    script = "echo begun\n" + "".join(f"({each}) 2>/dev/null && echo {each!r}\n" for each in REACH)
    words = "exec", "--hosts", "local:1", "--image", IMAGE, "--", "sh", "-c", script + "true"
    out, err = _wheelmount(ROOT, *words)
    if "begun" not in out:
        raise RuntimeError(err)
    done = [each for each in REACH if each in out]
    return f"it did: {done}" if done else None


def private_files() -> str | None:
    """Files of a session, its hosts and mounts are read, and its sockets connected to."""
    with _session():
        _wheelmount(USER, "run", _source(USER), "-", given="true")
        places = f"/tmp/wheelmount-{USER}", f"/dev/shm/wheelmount-{USER}", str(HOMES / str(USER))
        seen = _as(STRANGER, "find", *places, "-mindepth", "1").stdout
        if not any(Path(places[0]).rglob("session.json")):
            raise RuntimeError("there is no session")
    return f"seen: {seen.splitlines()[0]}" if seen else None


def secrets_in_arguments() -> str | None:
    """A secret in a script is read from the arguments or environments of processes."""
    return _caught(USER, _source(USER))


def secrets_in_arguments_of_containers() -> str | None:
    """A secret in a script for a container is read from arguments or environments."""
    source = Path("/tmp/content")
    source.mkdir()
    return _caught(ROOT, "--image", IMAGE, source)


def _caught(user: int, *words: str | Path) -> str | None:
    command = [sys.executable, "-m", "wheelmount.cli.main", "run", "--hosts", "local:1"]
    with _started(user, *command, *words, "-") as process:
        assert process.stdin is not None
        process.stdin.write(f"x={WORD}; sleep 3\n")
        process.stdin.close()
        process.stdin = None
        caught = _caught_from(process)
        _, err = process.communicate(timeout=WAIT)
    if process.returncode:
        raise RuntimeError(err)
    return caught


def _caught_from(process: subprocess.Popen[str]) -> str | None:
    """What a stranger reads of a secret while a command runs."""
    look = f"grep -al {WORD[:-1]}[e] /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null"
    while process.poll() is None:
        if caught := _as(STRANGER, "sh", "-c", look).stdout:
            return f"read from {caught}"
        time.sleep(0.1)
    return None


def secrets_of_an_index() -> str | None:
    """The password of an index is read from arguments or environments, or by what is built."""
    index = Path("/tmp/index")
    make_wheel(index, "small")
    _source_distribution(index, "own", f"    assert {WORD!r} not in str(os.environ)\n")
    with Index(index) as server:
        server.password = WORD
        url = server.url.replace("//", f"//me:{WORD}@")
        environment = f"UV_DEFAULT_INDEX={url}", f"UV_CACHE_DIR={HOMES}/{USER}/uv"
        words = "download", "small", "--build", "own", "-d", HOMES / str(USER) / "wheels"
        command = "env", "NO_PROXY=127.0.0.1", *environment, sys.executable, "-m"
        with _started(USER, *command, "wheelmount.cli.main", *words) as process:
            caught = _caught_from(process)
            _, err = process.communicate(timeout=WAIT)
    if process.returncode:
        raise RuntimeError(err)
    found = _as(STRANGER, "grep", "-rl", WORD, HOMES, "/tmp/wheelmount-" + str(USER)).stdout
    return caught or (f"read from {found}" if found else None)


def _source_distribution(folder: Path, name: str, code: str) -> None:
    """A source distribution in a directory, whose build runs some code."""
    place = Path("/tmp/sources", f"{name}-1.0")
    project = f'[project]\nname = "{name}"\nversion = "1.0"\n[build-system]\nrequires = []\n'
    wheel = make_wheel(place, name)
    (place / "pyproject.toml").write_text(
        f'{project}build-backend = "backend"\nbackend-path = ["."]\n'
    )
    (place / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (place / "backend.py").write_text(
        "import os, pathlib, shutil\n"
        "def get_requires_for_build_wheel(settings=None):\n"
        f"{code}    return []\n"
        "def build_wheel(folder, settings=None, metadata=None):\n"
        f"    shutil.copy({wheel.name!r}, folder)\n    return {wheel.name!r}\n"
    )
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        archive.add(place, f"{name}-1.0")


def code_that_a_wheel_names() -> str | None:
    """A wheel of a stranger's, or a script, has code of a directory run as the user."""
    project = _project()
    shared = project.parent
    caught = shared / "caught"
    _source_distribution(shared, "evil", f"    pathlib.Path({str(caught)!r}).touch()\n")
    evil = Path("/tmp/sources/evil-1.0")
    wheel = make_wheel(shared, "outer", requires=[f"evil @ {evil.as_uri()}"])
    script = "# /// script\n# dependencies = [{!r}]\n# ///\n"
    _write(STRANGER, shared / "path.py", script.format(str(evil)))
    _write(STRANGER, shared / "url.py", script.format(f"evil @ {evil.as_uri()}"))
    environment = "env", f"UV_CACHE_DIR={HOMES}/{USER}/uv", "UV_OFFLINE=1"
    for words in (
        ("download", wheel, "-d", HOMES / str(USER) / "wheels"),
        ("run", "--hosts", "local:1", shared / "path.py"),
        ("run", "--hosts", "local:1", shared / "url.py"),
    ):
        _as(USER, *environment, sys.executable, "-m", "wheelmount.cli.main", *words)
        if caught.exists():
            return f"it ran by `wheelmount {words[0]}`"
    return None


def what_a_build_leads_elsewhere() -> str | None:
    """What a build asks to be built with is written where it leads to."""
    index, precious = Path("/tmp/index"), HOMES / str(USER) / "precious"
    _as(USER, "mkdir", precious)
    make_wheel(index, "late")
    leads = "".join(
        f"    shutil.rmtree({folder}, ignore_errors=True)\n"
        f"    try: os.symlink({str(precious)!r}, {folder})\n    except OSError: pass\n"
        for folder in ('os.environ["HOME"] + "/needs"', 'os.environ["HOME"] + "/../needs"')
    )
    _source_distribution(index, "own", f'{leads}    return ["late"]\n')
    with Index(index) as server:
        environment = f"UV_DEFAULT_INDEX={server.url}", f"UV_CACHE_DIR={HOMES}/{USER}/uv"
        words = "download", "--build", "own", "-d", HOMES / str(USER) / "wheels"
        command = sys.executable, "-m", "wheelmount.cli.main", *words
        done = _as(USER, "env", "NO_PROXY=127.0.0.1", *environment, *command)
    if "late" not in {path.partition(" ")[0].rpartition("/")[2][:4] for path, _ in server.requests}:
        raise RuntimeError(done.stderr)
    found = [path.name for path in precious.iterdir()]
    return f"written: {found}" if found else None


def cache_of_a_stranger() -> str | None:
    """A cache that another user has made leads to files of the user's, which are cleared."""
    cache = _project().parent / "cache"
    _as(USER, "mkdir", "-p", HOMES / str(USER) / "work")
    _write(USER, HOMES / str(USER) / "work" / "precious", "precious")
    _as(STRANGER, "mkdir", "-p", cache / "unpacked")
    for name in ("wheelhouses", "unpacked/objects"):
        _as(STRANGER, "ln", "-s", HOMES / str(USER), cache / name)
    _as(STRANGER, "chmod", "777", cache)
    command = sys.executable, "-m", "wheelmount.cli.main", "cache", "clean"
    _as(USER, "env", f"WHEELMOUNT_CACHE_DIR={cache}", *command)
    there = (HOMES / str(USER) / "work" / "precious").exists()
    return None if there else "a file of the user's was removed"


HOSTILE = r"""
import io, tarfile
archive = tarfile.open("/evil.tar", "w", format=tarfile.PAX_FORMAT)
def add(name, kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, 0o6777
    member.size = 6 if kind == tarfile.REGTYPE else 0
    archive.addfile(member, io.BytesIO(b"caught"))
add("first")
add("/tmp/caught"), add("../caught"), add("a/../../caught")
add("up", tarfile.SYMTYPE, ".."), add("up/caught")
add("tmp", tarfile.SYMTYPE, "/tmp"), add("tmp/caught")
add("here", tarfile.SYMTYPE, "."), add("out", tarfile.SYMTYPE, "here/.."), add("out/caught")
add("hard", tarfile.LNKTYPE, "../precious"), add("hard")
add("whole", tarfile.LNKTYPE, "/tmp/collected/precious"), add("whole")
add("disk", tarfile.BLKTYPE), add("pipe", tarfile.FIFOTYPE), add(".", tarfile.SYMTYPE, "..")
archive.close()
open("/usr/bin/tar", "w").write("#!/bin/sh\ncat /evil.tar\n")
"""


def archive_of_a_container() -> str | None:
    """A container that was taken over has written elsewhere what is brought back of it."""
    collected = Path("/tmp/collected")
    collected.mkdir()
    precious = collected / "precious"
    precious.write_text("precious")
    words = "exec", "--hosts", "local:1", "--image", IMAGE, "--collect", "/tmp", collected
    _, err = _wheelmount(ROOT, *words, "--", "python3", "-c", HOSTILE)
    place = collected / "host0"
    if not (place / "first").exists():
        raise RuntimeError(err)
    beside = [each for each in Path("/tmp").rglob("caught") if not each.is_relative_to(place)]
    odd = [path for path in place.rglob("*") if not (path.is_file() or path.is_dir())]
    out = [path for path in place.rglob("*") if not path.resolve().is_relative_to(place)]
    mode = (place / "first").stat().st_mode
    if precious.read_text() != "precious" or mode & 0o7022:
        return f"changed: {precious.read_text()}, mode {mode:o}"
    return f"there are {[*beside, *odd, *out]}" if beside or odd or out else None


def file_below_a_closed_directory() -> str | None:
    """A file that only root can come to is read where root has mounted it."""
    source = Path("/root/attacked/source")
    source.mkdir(parents=True)
    source.parent.chmod(0o700)
    (source / "file").write_text(WORD)
    return _at_root_s_mount(source, lambda place: _as(STRANGER, "cat", place / "file").stdout)


def setuid_programs() -> str | None:
    """A setuid program in a mount of root's gives its user's rights."""
    source = Path("/tmp/programs")
    source.mkdir()
    shutil.copy(str(shutil.which("id")), source / "id")
    (source / "id").chmod(0o6755)
    if _as(STRANGER, source / "id", "-u").stdout != "0\n":
        raise RuntimeError("not even at the source")

    def run(place: Path) -> str:
        number = _as(STRANGER, place / "id", "-u").stdout.strip()
        return "" if number == str(STRANGER) else f"it runs as {number or 'nothing'}"

    return _at_root_s_mount(source, run)


def _at_root_s_mount(source: Path, attack: Callable[[Path], str]) -> str | None:
    point = "/tmp/mounted"
    _, err = _wheelmount(ROOT, "mount", source, point, "--hosts", "local:1")
    if not os.path.ismount(point):
        raise RuntimeError(err)
    try:
        return attack(Path(point)) or None
    finally:
        _wheelmount(ROOT, "umount", point)
        shutil.rmtree("/root/attacked", ignore_errors=True)


def _await(port: int) -> None:
    """Wait until something listens there."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        time.sleep(0.1)


def _run_at(port: int, user: int) -> tuple[str, str]:
    """Have a worker on this machine run something for a user."""
    place = "--mntpoint", f"/tmp/mounted-{user}"
    words = "run", "--hosts", f"tls://127.0.0.1:{port}", *place, _source(user), "-"
    return _wheelmount(user, *words, given="cat file")


def idle_connections() -> str | None:
    """1,200 connections that say nothing, or too little, keep out those who may come in."""
    command = [sys.executable, "-m", "wheelmount.cli.main", "worker", "tls://127.0.0.1:7001"]
    begun = bytes.fromhex("1603010400") + bytes(1019)  # of a greeting that is never complete
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    idle: list[socket.socket] = []
    with _started(USER, *command) as worker:
        try:
            _await(7001)
            for number in range(1200):
                idle.append(socket.create_connection(("127.0.0.1", 7001), 5))
                with contextlib.suppress(OSError):
                    idle[-1].sendall(begun if number % 2 else b"")
            out, err = _run_at(7001, USER)
        finally:
            for connection in idle:
                connection.close()
            worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.communicate(timeout=WAIT)
            worker.kill()
    return None if "content" in out else f"nothing works: {err}"


def foreign_certificates() -> str | None:
    """A client with an authority of its own is answered by the user's worker."""
    command = [sys.executable, "-m", "wheelmount.cli.main", "worker", "tls://127.0.0.1:7002"]
    with _started(USER, *command) as worker:
        try:
            _await(7002)
            ours, err = _run_at(7002, USER)
            if "content" not in ours:
                raise RuntimeError(err)
            out, _ = _run_at(7002, STRANGER)
        finally:
            worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.communicate(timeout=WAIT)
            worker.kill()
    return f"it ran as {out}" if out else None


CONTAINERS = container_of_root, secrets_in_arguments_of_containers, archive_of_a_container

ATTACKS = (
    settings_above,
    settings_of_a_project,
    modules_in_tmp,
    squatted_directories,
    monarch_log_link,
    monarch_log_pipe,
    abstract_sockets,
    first_moments,
    *(CONTAINERS if shutil.which("apptainer") and IMAGE.exists() else ()),
    private_files,
    secrets_in_arguments,
    secrets_of_an_index,
    code_that_a_wheel_names,
    what_a_build_leads_elsewhere,
    cache_of_a_stranger,
    file_below_a_closed_directory,
    setuid_programs,
    idle_connections,
    foreign_certificates,
)


if __name__ == "__main__":
    sys.exit(main())
