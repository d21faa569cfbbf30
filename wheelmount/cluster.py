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
from wheelmount.hosts.command_actor import Command
from wheelmount.hosts.commands import Results
from wheelmount.hosts.session import hosts_by_default, hosts_named
from wheelmount.mount.client.remote import RemoteMount
from wheelmount.operations import containers, environments, installs, pools, scripts
from wheelmount.operations.environments import Needed
from wheelmount.operations.image import Image
from wheelmount.operations.installs import Tool, Venv
from wheelmount.operations.launch import Launch
from wheelmount.operations.pools import Held
from wheelmount.progress import SILENT, Progress
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

    Hosts start once, and what is mounted stays until the end: the second call with the same
    directory ships only what changed in it. The calls are the commands of the same names, take
    what those take, and raise what those end with; a command that fails on a host raises nothing
    until ``Results.raise_for_status``. In a running loop, ``async with`` starts and ends the
    hosts, and ``await asyncio.to_thread(cluster.run, …)`` lets the loop go on; one call at a time.

    Args:
        hosts: where hosts come from, as ``--hosts`` has it: ``local:2``, ``ssh:a,b``,
            ``slurm:4,partition=gpu``, ``session:NAME``, …; default as the command line's.
        namespaces: give hosts on this machine a mount namespace each, so that all have a directory
            at its own path; the caller does not see what is mounted there. Without them each needs
            a mount point of its own, such as ``/tmp/{host}``.
        settings: default those of the environment and of files.
        progress: told about each step.
    """

    def __init__(
        self,
        hosts: str | None = None,
        *,
        namespaces: bool = True,
        settings: Settings | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self._settings = settings or config.load()
        self._spec = hosts_named(hosts or hosts_by_default(self._settings), self._settings)
        self._namespaces, self._progress = namespaces, progress
        self._ends = ExitStack()
        self._held: Held | None = None

    def __repr__(self) -> str:
        where = f"session:{self._spec.session}" if self._spec.session else str(self._spec)
        state = "not started" if self._held is None else ", ".join(self.hosts)
        return f"<cluster {where}: {state}>"

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order.

        Raises:
            InputError: they are not started.
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
        self._held = self._ends.enter_context(
            pools.hold(self._spec, self._settings, self._progress, namespaces=self._namespaces)
        )

    def stop(self) -> None:
        """Take down what is mounted and end the hosts; those of a session stay, with its mounts."""
        self._held = None
        self._ends.close()

    def on(self, *names: str) -> Cluster:
        """Have commands run on some of the hosts only; directories are mounted on all of them.

        Args:
            names: of hosts.

        Raises:
            InputError: there is no host of a name.
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
            WheelmountError: as of ``RemoteMount.open``.
        """
        with self._open.pool.mount(Path(source), mntpoint) as mount:
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
            script: a file of this machine; or the words of a command.
            arguments: of the script.
            mount: a directory to mount, in which it runs.
            mntpoint: where hosts mount that; default its own path.
            packages: requirements of an environment to make here and mount, in which it runs.
            image: a SIF file; it runs in an offline container of that.
            variables: environment variables to set for it.
            cwd: directory that it starts in.
            timeout: seconds after which it is ended.
            per_host: how many of it run on each host at a time.

        Returns:
            By host, its exit code and output, or why it could not be run.

        Raises:
            WheelmountError: the script or directory cannot be read, hosts cannot mount it, or the
                packages cannot be had.
        """
        held, common = self._open, (self._settings, self._progress)
        launch = Launch(variables=variables or {}, cwd=cwd, timeout=timeout, copies=per_host)
        text = None
        if isinstance(script, str | os.PathLike):
            text = scripts.read(os.fspath(script))
            words = (os.fspath(script), *arguments)
        else:
            words = (*(os.fspath(word) for word in script), *arguments)
        source = None if mount is None else Path(mount)
        shown = None if image is None else replace(_image(image), variables=launch.variables)
        if packages:
            needed = Needed(Wanted.of(packages))
            return environments.run(
                held, needed, words, text, shown, launch, *common, source=source, mntpoint=mntpoint
            )
        if source is not None:
            given = source, words, text, mntpoint, launch, *common
            if shown is not None:
                return containers.script(held, shown, *given)
            return scripts.run(held, *given)
        if shown is not None:
            if text is not None:
                raise InputError(
                    "a container sees no script of this machine",
                    hint="give the directory that it is in: mount=…",
                )
            return containers.execute(held, shown, words, None, launch, *common)
        through = words if text is None else scripts.interpreter(text, words[0])
        command = Command(
            tuple(through if text is None else arguments),
            text,
            tuple(through),
            environment=launch.variables,
            cwd=launch.within(None),
            timeout=timeout,
        )
        return held.pool.run(dict.fromkeys(self.hosts, command), "run", launch)

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
            command: its words.
            packages: a wheelhouse to mount, from which pip and uv install in the container.
            overlay: name of the overlay that keeps what is installed or written; default the
                image's own.
            variables: environment variables to set for it.
            cwd: directory that it starts in.
            timeout: seconds after which it is ended.

        Returns:
            See ``run``.

        Raises:
            WheelmountError: the image or wheelhouse cannot be used.
        """
        shown = replace(_image(image), variables=variables or {})
        if overlay is not None:
            shown = replace(shown, overlay=overlay)
        wheels = None if packages is None else Path(packages)
        launch = Launch(cwd=cwd, timeout=timeout)
        return containers.execute(
            self._open, shown, command, wheels, launch, self._settings, self._progress
        )

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
            requirements: as PEP 508 has them, or paths of wheels and projects.
            files: of requirements, ``pyproject.toml`` or locks.
            venv: path of a virtual environment on the hosts, made where there is none; ``{host}``
                becomes the host's name.
            image: a SIF file; packages are installed into its overlay instead.
            tool: what installs on the hosts.

        Returns:
            See ``run``.

        Raises:
            WheelmountError: the packages cannot be had or do not fit the hosts' Python, or both or
                neither of ``venv`` and ``image`` are given.
        """
        if (venv is None) == (image is None):
            raise InputError("where to install?", hint="give either venv=PATH or image=SIF")
        into = Venv(venv) if venv is not None else _image(image or "")
        wanted = Wanted.of(requirements, map(Path, files))
        common = self._settings, self._progress
        return installs.install(self._open, wanted, into, *common, tool=tool)

    @property
    def _open(self) -> Held:
        if self._held is None:
            raise InputError(
                "the cluster is not started", hint="use it in a `with` block, or call start()"
            )
        return self._held

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Cluster:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.to_thread(self.stop)


def _image(image: StrPath | Image) -> Image:
    return image if isinstance(image, Image) else Image({"": Path(image)})
