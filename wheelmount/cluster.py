"""``Cluster``: what the command line does, from Python, on hosts that stay for several calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from wheelmount import config
from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts import runtime
from wheelmount.hosts.commands import Results
from wheelmount.hosts.session import hosts_by_default, hosts_named
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.operations import containers, environments, installs, pools, scripts
from wheelmount.operations.environments import Needed
from wheelmount.operations.image import Image
from wheelmount.operations.installs import Tool, Venv
from wheelmount.operations.launch import Launch
from wheelmount.operations.pools import Held
from wheelmount.operations.scripts import Program
from wheelmount.operations.site import Site
from wheelmount.progress import SILENT, Progress
from wheelmount.wheels import inline
from wheelmount.wheels.wanted import Wanted

Words: TypeAlias = Sequence[str | os.PathLike[str]]
StrPath: TypeAlias = str | os.PathLike[str]


class Cluster:
    """Hosts on which directories are mounted, scripts and containers run, packages are installed.

    ::

        with Cluster("slurm:4") as cluster:
            cluster.install("requests", venv="/tmp/venv")
            results = cluster.run("train.py", mount="project")
            results.raise_for_status()

    Hosts start once, and mounts stay until the end: a second call with the same directory sends
    only changed files. Each method does the same as the command of its name and raises the errors
    that the command would print. A command that fails on a host raises nothing until
    ``Results.raise_for_status``. In a running loop, ``async with`` starts and ends the
    hosts, and ``await asyncio.to_thread(cluster.run, …)`` lets the loop go on; one call at a time.

    Args:
        hosts: where hosts come from, as ``--hosts`` has it: ``local:2``, ``ssh:a,b``,
            ``slurm:4,partition=gpu``, ``session:NAME``, …; default as the command line's.
        namespaces: give each host on this machine a mount namespace, so that all mount a directory
            at the same path, and each host on which only root may bind; the calling process and
            what others start on the hosts do not see those mounts. Without namespaces each host on
            this machine needs its own mount point, such as ``/tmp/{host}``.
        settings: default: those of the environment and of settings files.
        progress: receives the progress of each step.
    """

    def __init__(
        self,
        hosts: str | None = None,
        *,
        namespaces: bool = True,
        settings: Settings | None = None,
        progress: Progress = SILENT,
    ) -> None:
        settings = settings or config.load()
        spec = hosts_named(hosts or hosts_by_default(settings), settings)
        self._site = Site(spec, settings, progress)
        self._namespaces = namespaces
        self._ends = ExitStack()
        self._held: Held | None = None

    def __repr__(self) -> str:
        spec = self._site.spec
        where = f"session:{spec.session}" if spec.session else str(spec)
        state = "not started" if self._held is None else ", ".join(self.hosts)
        return f"<cluster {where}: {state}>"

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order.

        Raises:
            InputError: the hosts are not started.
        """
        return [host.name for host in self._open.pool.chosen]

    def start(self) -> None:
        """Start the hosts, or connect to those of a session.

        Raises:
            HostError, WaitError: a host does not come up; none is left running.
        """
        if self._held is not None:
            raise InputError("the cluster is started already", hint="make another one")
        runtime.keep()
        self._held = self._ends.enter_context(pools.hold(self._site, namespaces=self._namespaces))

    def stop(self) -> None:
        """Unmount everything and end the hosts. Hosts and mounts of a session stay."""
        self._held = None
        self._ends.close()

    def on(self, *names: str) -> Cluster:
        """Return this cluster with commands limited to some hosts; all hosts get the mounts.

        Args:
            names: names of hosts.

        Raises:
            InputError: a name is not that of a host.
        """
        pools.check(names, self.hosts)
        some = Cluster.__new__(Cluster)
        vars(some).update(vars(self))
        some._ends = ExitStack()  # the hosts end with the whole
        held = replace(self._open, only=names)
        some._held = replace(held, pool=held.pool.narrowed(names))
        return some

    def mount(self, source: StrPath, mntpoint: str | None = None) -> RemoteMount:
        """Mount a directory of this machine read-only on every host, as it is now.

        Args:
            source: the directory.
            mntpoint: where hosts mount it; see ``remotemount``.

        Returns:
            The mount, which stays as long as the hosts. ``wait`` waits for all bytes, ``refresh``
            follows the directory.

        Raises:
            WheelmountError: the directory cannot be mounted; ``RemoteMount.open`` has the cases.
        """
        at = pools.at(self._here, namespaces=self._namespaces)
        with at as pool, pool.mount(Path(source), mntpoint) as mount:
            return mount

    def run(
        self,
        script: StrPath | Words,
        *arguments: str,
        mount: StrPath | None = None,
        mntpoint: str | None = None,
        packages: Sequence[str] = (),
        image: StrPath | Image | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        per_host: int = 1,
    ) -> Results:
        """Run a script, or a command, on every host, and wait for it.

        Args:
            script: path of a script on this machine; or the words of a command.
            arguments: arguments of the script.
            mount: a directory to mount; the script starts in it.
            mntpoint: mount point of the directory on the hosts; default its own path.
            packages: requirements of an environment that is made here, mounted, and used by the
                script, besides those of the script's own metadata (PEP 723).
            image: a SIF file; the script runs in an offline container of this image.
            variables: environment variables of the script, besides those of an ``Image``.
            cwd: working directory of the script.
            timeout: seconds after which the script is ended.
            per_host: number of copies of the script on each host; one in containers.

        Returns:
            The exit code and output on each host, or the reason why the script did not run there.

        Raises:
            WheelmountError: the script or directory cannot be read, hosts cannot mount the
                directory, or the packages cannot be downloaded.
        """
        site = self._here
        launch = Launch(variables=variables or {}, cwd=cwd, timeout=timeout, copies=per_host)
        if isinstance(script, str | os.PathLike):
            path = os.fspath(script)
            program = Program((path, *arguments), scripts.read(path))
        else:
            program = Program((*(os.fspath(word) for word in script), *arguments))
        source = None if mount is None else Path(mount)
        shown = None if image is None else _image(image, launch.variables)
        inner = None if program.text is None else inline.read(program.text)
        if packages or inner is not None:
            needed = Needed.of(packages, script=inner)
            return environments.run(
                site, needed, program, shown, launch, source=source, mntpoint=mntpoint
            )
        if source is not None:
            if shown is not None:
                return containers.script(site, shown, source, program, mntpoint, launch)
            return scripts.run(site, source, program, mntpoint, launch)
        if shown is not None:
            if program.text is not None:
                raise InputError(
                    "a container sees no script of this machine",
                    hint="give the directory that it is in: mount=…",
                )
            return containers.execute(site, shown, program.words, None, launch)
        command = program.command(program.through(), launch.variables, launch, None, site.settings)
        with pools.at(site, namespaces=self._namespaces) as pool:
            return pool.run(dict.fromkeys(self.hosts, command), "run", launch)

    def exec(
        self,
        image: StrPath | Image,
        command: Sequence[str],
        *,
        packages: StrPath | None = None,
        overlay: str | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
    ) -> Results:
        """Run a command on every host in an offline container.

        Args:
            image: a SIF file.
            command: the words of the command.
            packages: a wheelhouse to mount; pip and uv in the container install from it.
            overlay: name of the overlay that keeps the files that the container writes; default
                the overlay of the image.
            variables: environment variables of the command, besides those of an ``Image``.
            cwd: working directory of the command.
            timeout: seconds after which the command is ended.

        Returns:
            The exit code and output on each host, as ``run`` returns them.

        Raises:
            WheelmountError: the image or wheelhouse cannot be used.
        """
        shown = _image(image, variables or {})
        if overlay is not None:
            shown = replace(shown, overlay=overlay)
        wheels = None if packages is None else Path(packages)
        launch = Launch(cwd=cwd, timeout=timeout)
        return containers.execute(self._here, shown, command, wheels, launch)

    def install(
        self,
        *requirements: str,
        files: Sequence[StrPath] = (),
        venv: str | None = None,
        image: StrPath | Image | None = None,
        tool: Tool = "uv",
    ) -> Results:
        """Download packages here, and install them on every host from a mount, offline.

        Args:
            requirements: PEP 508 requirements, or paths of wheels and projects.
            files: requirements files, ``pyproject.toml`` files or locks.
            venv: path of a virtual environment on the hosts, created if missing, which may be
                relative to this process's working directory; ``{host}`` becomes the host's name.
            image: a SIF file; packages are installed into its overlay instead.
            tool: the installer on the hosts.

        Returns:
            The exit code and output on each host, as ``run`` returns them.

        Raises:
            WheelmountError: the packages cannot be downloaded or do not fit the hosts' Python; or
                both or neither of ``venv`` and ``image`` are given.
        """
        if (venv is None) == (image is None):
            raise InputError("where to install?", hint="give either venv=PATH or image=SIF")
        into = Venv(str(Path(venv).absolute())) if venv is not None else _image(image or "")
        wanted = Wanted.of(requirements, map(Path, files))
        return installs.install(self._here, wanted, into, tool=tool)

    @property
    def _open(self) -> Held:
        if self._held is None:
            raise InputError(
                "the cluster is not started", hint="use it in a `with` block, or call start()"
            )
        return self._held

    @property
    def _here(self) -> Site:
        return replace(self._site, spec=self._open)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Cluster:
        await runtime.in_thread(self.start, self.stop)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.to_thread(self.stop)


def _image(image: StrPath | Image, variables: Mapping[str, str] | None = None) -> Image:
    given = image if isinstance(image, Image) else Image({"": Path(image)})
    return replace(given, variables={**given.variables, **(variables or {})})
