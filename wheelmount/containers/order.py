"""Orders to run a container, which a client sends and a host carries out."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from wheelmount import config
from wheelmount.config import Settings, private_directory
from wheelmount.containers.container import Bind, Container
from wheelmount.containers.instance import Instance
from wheelmount.containers.leftovers import PREFIX, claimed
from wheelmount.containers.overlay import Kind, Overlay, name_for
from wheelmount.containers.process import Stream
from wheelmount.containers.terminal import Size, Terminal
from wheelmount.errors import OvertimeError

PASSED_ON = ("WHEELMOUNT_HOST", "WHEELMOUNT_RANK", "WHEELMOUNT_SIZE", "WHEELMOUNT_LOCAL_RANK")
"""Variables of the host that are passed into containers: they tell a command its rank."""

OUTPUT = "/run/wheelmount/output"
"""Path in a container of the directory for files to collect."""

_OUTPUT = "WHEELMOUNT_OUTPUT"

PREPARATION = 120.0
"""Seconds that a container may take to start and to end beside the time of its command."""

ARCHIVING = 600.0
"""Seconds in which its files are archived, if the time of the command is bounded."""

_ARCHIVE = """
if [ -d "$1" ]; then cd -- "$1" && exec tar -cf - .
elif [ -e "$1" ]; then cd -- "$(dirname -- "$1")" && exec tar -cf - -- "$(basename -- "$1")"
else echo "there is nothing at $1 in the container" >&2; exit 1; fi
"""

PROGRAM = "python", "-m", "wheelmount.containers"
"""Module, run by the host's Python, that carries out the order in the file it is given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The description of a container that a host needs to run a command in it.

    Attributes:
        host: the host's name.
        image: path of the SIF there; empty for that of an instance that runs.
        overlay: name of the overlay that keeps changes; empty for the image's own.
        state_dir: where overlays are kept; None for the host's own setting.
        runtime_dir: the setting of that name: what goes with the container is in a private
            directory in it, of the host's own choice.
        overlay_kind: see `Overlay`.
        overlay_size: see `Overlay`.
        instance: name of the instance to run it in, started if it does not run; None for a
            container that ends with the command.
        packages: where the wheelhouse is, or None.
        binds: source, target and whether writable, of further files that it sees.
        environment: variables to set in it.
        files: texts it finds at these paths.
        cwd: where the command starts in it; default the home directory.
        nv: whether it may use NVIDIA devices.
        privileged: see `Container`.
        memory: see `Container`.
        cpus: see `Container`.
        timeout: seconds after which the command is ended with all that it started; None for no
            bound.
        collect: path in the container of what is to be archived when the command has ended, in a
            file that is called as its directory for output, with ``.tar``; None for nothing.
        output: whether it sees the directory of the host that ``WHEELMOUNT_OUTPUT`` names.
        terminal: size of the terminal elsewhere that the command is to have; None for none.
        identity: tells containers of one host apart.
    """

    host: str
    image: str
    overlay: str
    state_dir: str | None
    runtime_dir: str
    overlay_kind: Kind | None = None
    overlay_size: int | None = None
    instance: str | None = None
    packages: str | None = None
    binds: Sequence[tuple[str, str, bool]] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    nv: bool = False
    privileged: bool = False
    timeout: float | None = None
    collect: str | None = None
    output: bool = False
    terminal: Size | None = None
    memory: int | None = None
    cpus: float | None = None
    identity: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))

    @property
    def longest(self) -> float | None:
        """Seconds after which the host ends everything, as where a file system hangs; or None."""
        if self.timeout is None:
            return None
        return self.timeout + PREPARATION + (0.0 if self.collect is None else ARCHIVING)

    def encode(self, argv: Sequence[str]) -> bytes:
        """Encode the order and a command for `PROGRAM`.

        Without a command the program ends with 0 if the order's instance runs, otherwise with 1.
        """
        text = json.dumps([dataclasses.asdict(self), list(argv)], ensure_ascii=False)
        return text.encode(errors="surrogateescape")

    @classmethod
    def decode(cls, encoded: bytes) -> tuple[Order, list[str]]:
        """Decode an order and its command."""
        fields, argv = json.loads(encoded.decode(errors="surrogateescape"))
        return cls(**fields), argv

    def runs(self) -> bool:
        """Return whether the order's instance runs on this host."""
        name = self.instance
        return name is not None and bool(Instance(self._runtime, name, self.host).record())

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: Stream = subprocess.DEVNULL,
        terminal: Terminal | None = None,
    ) -> int:
        """Run a command in the container on this host; return its exit code.

        Args:
            argv: the command.
            stdin: as for `subprocess.Popen`.
            terminal: the command's terminal, in place of all its streams.

        Raises:
            OvertimeError: the time ran out.
            WheelmountError: see `Container.run` and `Instance.run`.
        """
        runtime = self._runtime
        if self.instance is not None:
            instance = Instance(runtime, self.instance, self.host)
            if self.image:
                container = self._container(instance.workdir, self.overlay)
                instance.ensure(container)
            else:
                remembered = instance.record()
                named = self.overlay or ("" if remembered is None else remembered.overlay)
                container = self._container(instance.workdir, named)
                found = instance.find(container)
                container = dataclasses.replace(container, privileged=found.privileged)
            return self._run(argv, partial(instance.run, container), stdin=stdin, terminal=terminal)
        workdir = runtime / f"{PREFIX}{self.identity}"
        made = self._container(workdir, self.overlay)
        with (
            claimed(private_directory(workdir)),
            made as container,
            # Until the files are archived: another container might delete them.
            container.lock(argv) as lock,
        ):
            run = partial(container.run, lock=lock)
            return self._run(argv, run, stdin=stdin, terminal=terminal)

    def _run(self, argv: Sequence[str], run: Callable[..., int], **streams: Any) -> int:
        """Run the command; when it has ended, or its time ran out, archive its files."""
        try:
            code = run(argv, timeout=self.timeout, **streams)
        except OvertimeError:
            self._archive(run)
            raise
        self._archive(run)
        return code

    def _archive(self, run: Callable[..., int]) -> None:
        if self.collect is None:
            return
        path = Path(f"{os.environ[_OUTPUT]}.tar")
        script = ["/bin/sh", "-c", _ARCHIVE, "sh", self.collect]
        bound = None if self.timeout is None else ARCHIVING
        with path.open("wb") as file, path.with_suffix(".lacking").open("wb") as said:
            try:
                code = run(script, stdout=file, stderr=said, timeout=bound)
            except OvertimeError as error:  # the files that are whole by now arrive
                said.write(f"the archive is not whole: {error}\n".encode())
                return
        if not code:
            path.with_suffix(".lacking").unlink()

    @property
    def _runtime(self) -> Path:
        return Settings(runtime_dir=self.runtime_dir).private_runtime()

    def _container(self, workdir: Path, overlay: str) -> Container:
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        image = Path(self.image)
        binds = [Bind(Path(source), target, rw) for source, target, rw in self.binds]
        if self.output:
            binds.append(Bind(Path(os.environ[_OUTPUT]), OUTPUT, writable=True))
            passed_on[_OUTPUT] = OUTPUT
        return Container(
            image=image,
            workdir=workdir,
            overlay=Overlay(
                Path(config.load().state_dir if self.state_dir is None else self.state_dir),
                overlay or name_for(image),
                self.host,
                self.overlay_kind,
                self.overlay_size,
                image if self.image else None,
            ),
            packages=Path(self.packages) if self.packages else None,
            binds=binds,
            env={**passed_on, **self.environment},
            files=self.files,
            cwd=self.cwd,
            nv=self.nv,
            privileged=self.privileged,
            memory=self.memory,
            cpus=self.cpus,
        )
