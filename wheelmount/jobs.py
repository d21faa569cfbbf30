"""The work that crosses rooms: a mount, hosts, and something to do on them."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from blake3 import blake3
from packaging.utils import parse_wheel_filename

from wheelmount.config import Settings
from wheelmount.containers import probe
from wheelmount.containers.order import Order
from wheelmount.errors import InputError, SourceError, WheelmountError
from wheelmount.hosts import engine
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.runner import Command, Result, Runners
from wheelmount.hosts.spec import HostSpec
from wheelmount.mount import serving
from wheelmount.mount.remote import RemoteMount, remotemount
from wheelmount.mount.task import Task
from wheelmount.progress import Progress
from wheelmount.wheels import redirect
from wheelmount.wheels.missing import absent
from wheelmount.wheels.target import Target
from wheelmount.wheels.wanted import Wanted
from wheelmount.wheels.wheelhouse import Wheelhouse

Results = Mapping[str, Result | WheelmountError]


def mount(
    spec: HostSpec, source: Path, mntpoint: str | None, settings: Settings, progress: Progress
) -> RemoteMount:
    """Mount a directory and leave it standing; returns when all bytes are there.

    Raises:
        WheelmountError: it could not be; nothing stays mounted.
    """
    namespaces = spec.shared and "{host}" not in (mntpoint or "")
    with spec.make(settings, namespaces=namespaces) as hosts:
        made = remotemount(hosts, source, mntpoint, settings=settings, progress=progress)
        made.open()
        try:
            made.keep()
            made.release()  # hosts that go on would keep what this client started for a minute
        except BaseException:
            made.close(force=True)
            raise
        finally:
            engine.stop()
    return made


def refresh(directories: Sequence[Path], settings: Settings, progress: Progress) -> bool:
    """Have a mount that stands follow its directory.

    Args:
        directories: of the mount on each of its hosts, all on this machine.
        settings: in force.
        progress: told about each step.

    Returns:
        Whether anything had changed.
    """
    within = {}
    for directory in directories:
        task = Task.read(directory)
        within[task.host] = serving.status(directory)["pid"]
    identity = serving.identity(directories[0])
    with LocalHosts(len(within), settings, within=within) as hosts:
        mount = RemoteMount(hosts, task.source, None, settings, progress, identity=identity)
        try:
            mount.adopt()
            return mount.refresh()
        finally:
            mount.release()
            engine.stop()


def run(
    spec: HostSpec,
    source: Path,
    script: str,
    arguments: Sequence[str],
    mntpoint: str | None,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Mount a directory on all hosts and run a bash script on each, in the mounted directory.

    The script finds the mount point in ``WHEELMOUNT_MOUNT``, its host's name and place in
    ``WHEELMOUNT_HOST`` and ``WHEELMOUNT_RANK``.
    """

    def command(_host: str, path: str) -> Command:
        return Command(tuple(arguments), script, {"WHEELMOUNT_MOUNT": path}, cwd=path)

    namespaces = mntpoint is None or (spec.shared and "{host}" not in mntpoint)
    return _on_mounts(
        spec, source, mntpoint, command, settings, progress, "run", namespaces=namespaces
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Venv:
    """Install into a virtual environment of each host.

    Attributes:
        path: where; ``{host}`` becomes the host's name, which is added where hosts share a machine.
    """

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """Work in a container of each host.

    Attributes:
        path: of the SIF.
        overlay: name of the overlay that keeps what is installed.
    """

    path: Path
    overlay: str


def install(
    spec: HostSpec,
    wanted: Wanted,
    into: Venv | Image,
    tool: Literal["uv", "pip"],
    settings: Settings,
    progress: Progress,
    *,
    directory: Path | None = None,
    target: Target | None = None,
) -> Results:
    """Download, prove complete, mount, and install on every host from the mount, offline.

    Args:
        spec: the hosts.
        wanted: what to install.
        into: where to.
        tool: what installs.
        settings: in force.
        progress: told about each step.
        directory: the wheelhouse; default one of its own in the cache for these requirements.
        target: default the image's Python, or this one.
    """
    if target is None:
        target = Target.here()
        if isinstance(into, Image):
            python = probe.python(into.path)
            target = Target.parse(python.version, python.platform)
    house = Wheelhouse(directory or _wheelhouse(settings, wanted, target))
    report = house.add(wanted, targets=[target], progress=progress)
    # What is in the wheels was published so; reading it all would take longer than to install it.
    house.check(wanted, targets=[target], contents=False, progress=progress).raise_if_any()
    named = [str(requirement) for requirement in wanted.requirements]
    if not wanted.by_name:  # hosts do not have the files, and ask by name
        pins = (parse_wheel_filename(wheel)[:2] for wheel in report.wheels)
        named = [f"{name}=={version}" for name, version in pins]
    if isinstance(into, Image):
        argv = [tool, "install"] if tool == "pip" else [tool, "pip", "install"]
        return execute(spec, into, [*argv, "--", *named], house.directory, settings, progress)
    venv = into.path
    if spec.shared and "{host}" not in venv:
        venv += "-{host}"

    def command(host: str, path: str) -> Command:
        where = venv.replace("{host}", host)
        return Command(("python", "-m", "wheelmount.wheels", tool, path, where, *named))

    packages = _packages(settings)
    return _on_mounts(spec, house.directory, packages, command, settings, progress, "install")


def execute(
    spec: HostSpec,
    image: Image,
    argv: Sequence[str],
    packages: Path | None,
    settings: Settings,
    progress: Progress,
) -> Results:
    """Run a command on every host in an offline container.

    Args:
        spec: the hosts.
        image: the container.
        argv: the command.
        packages: a wheelhouse to mount on the hosts and show at ``/packages``.
        settings: in force.
        progress: told about each step.
    """
    if not argv:
        raise InputError("no command to run in the container", hint="name one, such as: -- python")

    def command(host: str, path: str | None) -> Command:
        order = Order(
            host=host,
            image=str(image.path.absolute()),
            overlay=image.overlay,
            state_dir=settings.state_dir,
            runtime_dir=str(settings.private_runtime()),
            packages=path,
            environment=redirect.environment(),
            files={
                redirect.PIP_CONF: redirect.pip_conf(),
                redirect.UV_TOML: redirect.uv_toml(),
            },
        )
        return Command(order.command(argv))

    if packages is not None:
        where = _packages(settings)
        results = _on_mounts(spec, packages, where, command, settings, progress, "run")
        failed = [r for r in results.values() if isinstance(r, Result) and r.code]
        lacking = {name for r in failed for name in absent(r.stderr.decode(errors="replace"))}
        if lacking:
            progress.log(f"hint: wheelmount download {shlex.join(sorted(lacking))} -d {packages}")
        return results
    with spec.make(settings, namespaces=False) as hosts:
        try:
            with (
                Runners(list(hosts), settings.start_timeout) as runners,
                progress.task("run", unit="hosts") as task,
            ):
                results = runners.run({host.name: command(host.name, None) for host in hosts})
                task.advance(len(results))
                return results
        finally:
            engine.stop()


def _on_mounts(
    spec: HostSpec,
    source: Path,
    mntpoint: str | None,
    command: Callable[[str, str], Command],
    settings: Settings,
    progress: Progress,
    step: str,
    *,
    namespaces: bool = False,
) -> Results:
    """Mount a directory on all hosts; run a command on each, made of its name and mount point."""
    with spec.make(settings, namespaces=namespaces) as hosts:
        try:
            with (
                remotemount(hosts, source, mntpoint, settings=settings, progress=progress) as mount,
                Runners(list(hosts), settings.start_timeout) as runners,
                progress.task(step, unit="hosts") as task,
            ):
                results = runners.run({n: command(n, path) for n, path in mount.mntpoints.items()})
                task.advance(len(results))
                return results
        finally:
            engine.stop()


def _wheelhouse(settings: Settings, wanted: Wanted, target: Target) -> Path:
    """The wheelhouse in the cache for one request: what is installed is then what was asked for."""
    name = blake3(f"{target}\0{wanted}".encode()).hexdigest()[:16]
    return Path(settings.cache_dir) / "wheelhouses" / name


def _packages(settings: Settings) -> str:
    """Where a wheelhouse is mounted on hosts."""
    return str(settings.private_runtime() / f"packages-{secrets.token_hex(4)}-{{host}}")


def read_script(path: str) -> str:
    """Text of a script file.

    Raises:
        SourceError: there is none.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SourceError(
            f"cannot read the script {path}: {reason}", hint="give a bash script, or - for stdin"
        ) from None
