"""Run apptainer on this machine: find it, give it the environment it needs, and stop it.

Only this module calls spython. Of spython it uses the function that runs a command line,
``run_command``; its ``Client`` knows the program by the name ``singularity`` only, prints, ends the
caller's process, and answers a failure with None. Containers are not run through it at all: they
need their own standard streams, their exit code and their process group. Neither are commands that
print texts of strangers (builds, descriptions of images): spython keeps all output in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from spython.utils import run_command

from wheelmount import child, linux, logs, owned, subordinate
from wheelmount.errors import ContainerError, UnavailableError, WaitError

CAP_SETGID, CAP_SETUID, CAP_SYS_RESOURCE = 6, 7, 24  # linux/capability.h

GRACE = 2.0
"""Seconds in which a stopped container or build may end itself; less than a host's actor allows."""

PULL_TIMEOUT = 600.0
"""Seconds after which a pull ends that has written nothing."""

BUILD_TIMEOUT = 3600.0
"""The same of a build: its programs may compute for long."""

_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_KEPT = ("HOME", "LANG", "LOGNAME", "PATH", "TERM", "TMPDIR", "USER", "XDG_RUNTIME_DIR")
_KEPT_OWN = ("CACHEDIR", "CONFIGDIR", "TMPDIR")

_OWN = ("APPTAINER_", "SINGULARITY_")
_PROXIES = ("all_proxy", "ftp_proxy", "http_proxy", "https_proxy", "no_proxy")
_KEPT_FOR_BUILDS = (
    *("DOCKER_HOST", "DOCKER_PASSWORD", "DOCKER_USERNAME", "LC_ALL", "LC_CTYPE"),
    *("SOURCE_DATE_EPOCH", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZ"),
    *_PROXIES,
    *(name.upper() for name in _PROXIES),
)

LINE = 64 << 10
"""Most bytes of a line that are read at once: a build may print a line without end."""

REASON = 1000
"""Most characters of the line in a message that gives the cause of a failure."""

DESCRIPTION = 16 << 20
"""Most bytes of an image's description of itself."""

DESCRIPTION_TIMEOUT = 120.0
"""Seconds that reading the description may take."""


def find() -> Path:
    """Return the path of apptainer, or of singularity where only that is installed.

    Raises:
        UnavailableError: neither is on PATH.
    """
    for name in ("apptainer", "singularity"):
        if found := shutil.which(name):
            return Path(found)
    raise UnavailableError(
        "neither apptainer nor singularity is on PATH",
        hint="on Debian, as root: wheelmount setup; on a cluster try: module load apptainer",
    )


def version() -> str:
    """Return the program's own version line, such as ``apptainer version 1.4.5``.

    Raises:
        UnavailableError: the program is missing or does not start.
    """
    program = find()
    answer = run_command([str(program), "--version"], quiet=True, environ=environment())
    text = "".join(answer["message"]).strip()
    if answer["return_code"]:
        raise UnavailableError(f"{program} does not start: {text}", hint="install it again")
    return text


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the few variables of an environment that apptainer needs to run a container.

    Others are left out: proxies and ``APPTAINERENV_*`` would reach the container in spite of
    ``--containall``, and variables such as ``APPTAINER_BIND`` would change the command.
    """
    kept = [*_KEPT, *(f"{p}_{name}" for p in ("APPTAINER", "SINGULARITY") for name in _KEPT_OWN)]
    return {name: environ[name] for name in kept if name in environ}


def build_environment() -> dict[str, str]:
    """Return the variables for a build, which runs code of its base images.

    These are apptainer's settings, and variables that are needed to reach registries.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith(_OWN)}
    kept = {name: os.environ[name] for name in _KEPT_FOR_BUILDS if name in os.environ}
    return {**environment(), **kept, **own}


def exec_privileges() -> list[str]:
    """Return the options with which this user can start a container here and be root in it."""
    if os.geteuid() != 0:
        if not _NAMESPACES.exists() or _NAMESPACES.read_text().strip() == "0":
            raise UnavailableError(
                "ordinary users may make no user namespaces here, which their containers need",
                hint="as root: sysctl user.max_user_namespaces=10000",
            )
        # Root's setuid programs, such as newuidmap, do not work where root is not mapped, as in the
        # namespaces of hosts on one machine.
        return ["--fakeroot"] if _root_is_real() else ["--fakeroot", "--ignore-subuid"]
    missing = _missing_capabilities()
    if not missing:
        return []
    # apptainer requests every capability, and fails if one is refused. Many virtual machines and
    # job steps lack only this one.
    if missing == {CAP_SYS_RESOURCE}:
        return ["--drop-caps", "CAP_SYS_RESOURCE"]
    return ["--no-privs"]


def own_ids() -> str:
    """Return the id maps for a container's user namespace; empty if apptainer makes them itself.

    In the namespace of a host on this machine, which has the user's subordinate ids, this process
    may map them itself: root in the container is this user, as with ``--fakeroot``.
    """
    if os.geteuid() == 0 or _root_is_real():
        return ""
    found = subordinate.ids()
    if found is None or not found.mapped() or not _may_map():
        return ""
    user = f"0 {os.geteuid()} 1\n1 {found.user} {found.count}\n"
    return f"{user}\n0 {os.getegid()} 1\n1 {found.group} {found.count}\n"


def _may_map() -> bool:
    return {CAP_SETGID, CAP_SETUID} <= linux.capabilities("CapEff")


def _root_is_real() -> bool:
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    return any(line.split()[:2] == ["0", "0"] for line in lines)


def build_privileges() -> list[str]:
    """Return the options with which this user can build an image here."""
    return ["--fakeroot"] if os.geteuid() != 0 or _missing_capabilities() else []


def _missing_capabilities() -> set[int]:
    """Return the numbers of the capabilities that this process lacks."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    return set(range(last + 1)) - linux.capabilities("CapPrm")


def build(
    definition: Path,
    image: Path,
    *,
    options: Sequence[str],
    log: Path,
    scratch: Path,
    on_line: Callable[[], object],
) -> None:
    """Build ``image`` from ``definition``, in the definition's own directory.

    Args:
        definition: the ``.def`` file.
        image: the SIF to write.
        options: further options of ``apptainer build``.
        log: file to which the build's output is written; see ``logs.cut``.
        scratch: directory for the build's temporary files.
        on_line: called for every line.

    Raises:
        ContainerError: the build failed; its processes have ended.
        UnavailableError: apptainer is missing.
        WaitError: the build writes nothing any more.
    """
    command = [str(find()), "build", *build_privileges(), *options, str(image), str(definition)]
    written = _Written(
        [scratch, image, log, _cache()],
        BUILD_TIMEOUT,
        "the build has written nothing",
        f"check the network if it downloads, then run it again; the full log is {log}",
    )
    if code := _logged(command, definition.parent, log, scratch, on_line, written):
        reason, advice = _explain(log.read_text(encoding="utf-8", errors="replace"))
        raise ContainerError(
            f"{definition.name} did not build: {reason or f'exit code {code}'}",
            hint=f"{advice}; the full log is {log}" if advice else f"the full log is {log}",
        )


def pull(reference: str, image: Path, *, scratch: Path, on_line: Callable[[], object]) -> None:
    """Pull an image from a registry into a SIF file.

    Args:
        reference: the image, in apptainer's notation: ``docker://python:3.12-slim``.
        image: the SIF to write.
        scratch: directory for temporary files.
        on_line: called for every line that apptainer prints.

    Raises:
        ContainerError: the image cannot be pulled; all processes of the pull have ended.
        UnavailableError: apptainer is missing.
        WaitError: the registry sends nothing any more.
    """
    log = scratch / "log"
    # Without apptainer's own cache, which would keep all of it a second time.
    command = [str(find()), "pull", "--force", "--disable-cache", str(image), reference]
    written = _Written(
        [scratch, image],
        PULL_TIMEOUT,
        "nothing of the image has arrived",
        "check the network and the registry's address, then run it again",
    )
    if code := _logged(command, scratch, log, scratch, on_line, written):
        reason, advice = _explain(log.read_text(encoding="utf-8", errors="replace"))
        raise ContainerError(
            f"{reference} cannot be pulled: {reason or f'exit code {code}'}",
            hint=advice
            or "try `apptainer pull`; a private registry needs `apptainer registry login`",
        )


class _Written(NamedTuple):
    """What a command writes, and the error if it writes nothing any more.

    Attributes:
        paths: files and directories that it writes to.
        timeout: seconds for which it may write nothing.
        message: says that it has written nothing.
        hint: what to do then.
    """

    paths: Sequence[Path]
    timeout: float
    message: str
    hint: str


def _logged(
    command: Sequence[str],
    cwd: Path,
    log: Path,
    scratch: Path,
    on_line: Callable[[], object],
    written: _Written,
) -> int:
    """Run a command that pulls or builds an image; return its exit code.

    Raises:
        WaitError: it has written nothing for too long.
    """
    log.unlink(missing_ok=True)
    with (
        log.open("a", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(
            command,
            cwd=cwd,
            umask=owned.umask(),
            env={**build_environment(), "APPTAINER_TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all its processes can be stopped
        ) as process,
        _ended_if_still(process.pid, written),
    ):
        try:
            while line := cast(IO[bytes], process.stdout).readline(LINE):
                file.write(plain(line.decode(errors="replace")))
                logs.cut(file.fileno())
                on_line()
            process.wait()
        except BaseException:
            stop(process.pid)
            raise
    return process.returncode


@contextlib.contextmanager
def _ended_if_still(session: int, written: _Written) -> Iterator[None]:
    """End a session's processes during the context if what they write does not change any more.

    apptainer waits for ever for a registry that sends nothing.
    """
    left, still = threading.Event(), threading.Event()

    def watch() -> None:
        size, since = -1, time.monotonic()
        while not left.wait(written.timeout / 20):
            if (now := sum(map(_size, written.paths))) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() > since + written.timeout:
                still.set()
                stop(session)
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        left.set()
        watching.join()
    if still.is_set():
        raise WaitError(f"{written.message} for {written.timeout:g} s", hint=written.hint)


def _cache() -> Path:
    """Return the directory in which apptainer keeps what it has got of registries."""
    given = build_environment().get("APPTAINER_CACHEDIR")
    return Path(given) if given else Path.home() / ".apptainer" / "cache"


def _size(path: Path) -> int:
    """Return a number that changes with every byte that is written to a file or directory."""
    size = 0
    files = [path, *(Path(place, name) for place, _, names in os.walk(path) for name in names)]
    for each in files:
        with contextlib.suppress(OSError):  # deleted meanwhile
            state = each.lstat()
            size += state.st_size + state.st_blocks * 512  # a file may be made large, then filled
    return size


def make_overlay(path: Path, size: int) -> None:
    """Make an overlay in one file for containers of this user.

    Args:
        path: the file.
        size: MiB, 64 or more; unused parts take no space.

    Raises:
        ContainerError: it cannot be made.
        UnavailableError: apptainer is missing.
    """
    # Containers of ordinary users run in user namespaces, and need other owners in the overlay.
    private = ["--fakeroot"] if os.geteuid() != 0 else []
    answer = run_command(
        [str(find()), "overlay", "create", *private, "--sparse", "--size", str(size), str(path)],
        quiet=True,
        environ=environment(),
    )
    if answer["return_code"]:
        reason, advice = _explain(plain("".join(answer["message"])))
        raise ContainerError(
            f"no overlay of {size} MiB can be made: {reason}",
            hint=advice or "wheelmount doctor checks what containers need on this machine",
        )


def inspect(image: Path) -> dict[str, Any]:
    """Return apptainer's description of an image: its ``labels`` and its ``deffile``.

    Raises:
        ContainerError: the file is not an image.
        UnavailableError: apptainer is missing.
    """
    wrong = "build it again"
    try:
        done = child.run(
            [str(find()), "--silent", "inspect", "--json", "--labels", "--deffile", str(image)],
            timeout=DESCRIPTION_TIMEOUT,
            environ=environment(),
            most=DESCRIPTION,
        )
    except subprocess.TimeoutExpired:
        raise ContainerError(
            f"the description of {image} was not read within {DESCRIPTION_TIMEOUT:.0f} s",
            hint=wrong,
        ) from None
    if done.code:
        said = _reason(done.stderr + done.stdout)
        raise ContainerError(f"{image} cannot be read as an image: {said}", hint=wrong)
    try:
        attributes: dict[str, Any] = json.loads(done.stdout)["data"]["attributes"]
    except (ValueError, TypeError, KeyError):
        raise ContainerError(f"{image} has a malformed description", hint=wrong) from None
    return attributes


def plain(text: str) -> str:
    """Remove terminal colors from a text."""
    return _COLOUR.sub("", text)


def start_error(image: Path, output: str) -> ContainerError:
    """Make the error of a container that did not start, from apptainer's output."""
    reason, advice = _explain(plain(output))
    return ContainerError(
        f"apptainer could not start a container of {image}: {reason or 'it did not say why'}",
        hint=advice or "wheelmount doctor checks what containers need on this machine",
    )


def _reason(output: str) -> str:
    """Return the last informative line of an output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        # Skip the shell's trace, and apptainer's own line about the failure of another program.
        if not line.startswith(("INFO:", "+ ")) and not re.search(r"exit status \d+$", line)
    ]
    last = (telling or lines or [""])[-1]
    return re.sub(r"^(FATAL|ERROR)\s*:\s*", "", last[:REASON])


_KNOWN = {
    "/etc/subuid": "as root: apptainer config fakeroot --add USER",
    "failed to change uid and gids": "to build images with files of several users, you need "
    "subordinate ids: as root: apptainer config fakeroot --add USER",
    "user namespace": "ordinary users need user namespaces: sysctl user.max_user_namespaces",
    "Requesting capability set": "set 'root default capabilities = no' in apptainer.conf",
    "debootstrap is not in PATH": "install debootstrap; on Debian, as root: wheelmount setup",
    "while mounting overlay": "that directory cannot hold an overlay now: use another one "
    "(--overlay NAME), or set WHEELMOUNT_STATE_DIR",
    "seccomp": "this apptainer was built without seccomp: install Debian's, or give --privileged",
    "cannot use cgroups": "apptainer cannot bound what containers take here (it needs systemd, and "
    "cgroups v2 for ordinary users): leave --memory and --cpus out, or have Slurm bound the job",
    "No space left": "free some space, or set TMPDIR to a larger directory",
    "HTTP response to HTTPS client": "for a registry without TLS: APPTAINER_NO_HTTPS=true",
    "unauthorized": "check the name, and log in: apptainer registry login",
    "/dev/fuse": "load the fuse module; as root: chmod 666 /dev/fuse",
}
"""Advice for known failures, by a part of their message."""


def _explain(output: str) -> tuple[str, str | None]:
    """Return cause and advice: of a known failure, or of the last line that tells a cause."""
    reason = _reason(output)
    lines = [line for line in output.splitlines() if not line.startswith("INFO:")]
    for line in (reason, *lines):
        for sign, advice in _KNOWN.items():
            if sign in line:
                return _reason(line), advice
    return reason, None


def stop(session: int) -> None:
    """End every process of a session: by SIGTERM, and after `GRACE` seconds by SIGKILL.

    Its process group alone would not do: for ordinary users apptainer starts FUSE helpers in groups
    of their own, and they outlive a killed apptainer.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while _members(session):
        if time.monotonic() > deadline:
            for process in _members(session):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return
        time.sleep(0.02)


def _members(session: int) -> list[int]:
    """Return the ids of a session's processes that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything; state, parent, group, session follow it.
            fields = entry.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found
