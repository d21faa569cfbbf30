"""Parse ``--hosts SPEC``, the specification of hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wheelmount.config import Settings
from wheelmount.errors import InputError
from wheelmount.hosts import kubernetes, slurm
from wheelmount.hosts.address import OPEN, SECURE, Address
from wheelmount.hosts.host import Hosts
from wheelmount.hosts.kubernetes import KubernetesHosts
from wheelmount.hosts.local import LocalHosts
from wheelmount.hosts.network import NetworkHosts
from wheelmount.hosts.slurm import SlurmHosts
from wheelmount.hosts.ssh import SshHosts, Target
from wheelmount.progress import SILENT, Progress

MOST_LOCAL = 64
"""Most hosts of ``local:N``; each takes some 50 MB for its processes."""


BINDS = "auto", "bind"
"""Values of the setting ``adapter`` with which hosts bind where they may."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A parsed SPEC.

    Attributes:
        kind: ``local``, ``ssh``, ``slurm``, ``kubernetes``, ``tls`` or ``tcp``.
        count: number of hosts.
        addresses: addresses of the hosts, for ``tls`` and ``tcp``.
        targets: destinations of ssh, for ``ssh``.
        options: options of the job, for ``slurm`` and ``kubernetes``.
        session: name of the session that has the hosts, if they run already.
        only: names of the hosts that run commands; empty for all.
    """

    kind: str
    count: int
    addresses: tuple[Address, ...] = ()
    targets: tuple[Target, ...] = ()
    options: tuple[str, ...] = ()
    session: str | None = None
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.addresses:
            return ",".join(map(str, self.addresses))
        if self.targets:
            return f"{self.kind}:{','.join(map(str, self.targets))}"
        return ",".join([f"{self.kind}:{self.count}", *self.options])

    @property
    def shared(self) -> bool:
        """Whether several of these hosts share one machine, and so its paths."""
        if self.kind == "local":
            return self.count > 1
        machines = {address.host for address in self.addresses}
        machines |= {target.host for target in self.targets}
        return 0 < len(machines) < self.count

    @property
    def lasting(self) -> str | None:
        """Part of the mount points of mounts that later commands on these hosts find again.

        Empty for a session, a token for a ``Cluster``; None if no mount stays.
        """
        return None if self.session is None else ""

    @property
    def local_names(self) -> list[str]:
        """Names of the hosts, if they are on this machine."""
        return [f"host{number}" for number in range(self.count)]

    def make(
        self,
        settings: Settings,
        *,
        namespaces: bool,
        visible: bool = False,
        guarded: bool = True,
        progress: Progress = SILENT,
    ) -> Hosts:
        """Return the hosts, not started yet.

        Args:
            settings: the settings in force.
            namespaces: give hosts on this machine mount namespaces; see ``LocalHosts``.
            visible: whether processes of this user that others start on the hosts have to see the
                mounts. Otherwise hosts where only root may bind get mount namespaces, too, unless
                ``settings.adapter`` needs none.
            guarded: end the hosts when this process ends; otherwise they stay until they are
                stopped.
            progress: informed of waits.
        """
        if self.addresses:
            return NetworkHosts(self.addresses, settings)
        own_mounts = not visible and settings.adapter in BINDS
        if self.kind == "ssh":
            return SshHosts(
                self.targets,
                settings,
                guarded=guarded,
                apart=namespaces,
                own_mounts=own_mounts,
                progress=progress,
            )
        job = self.count, self.options, settings
        if self.kind == "slurm":
            return SlurmHosts(
                *job, guarded=guarded, apart=namespaces, own_mounts=own_mounts, progress=progress
            )
        if self.kind == "kubernetes":
            return KubernetesHosts(*job, guarded=guarded, progress=progress)
        return LocalHosts(self.count, settings, namespaces=namespaces, guarded=guarded)


KINDS: dict[str, type[Hosts]] = {
    "local": LocalHosts,
    "ssh": SshHosts,
    "slurm": SlurmHosts,
    "kubernetes": KubernetesHosts,
    SECURE: NetworkHosts,
    OPEN: NetworkHosts,
}
"""Classes of hosts, by kind."""


def parse(text: str) -> HostSpec:
    """Read ``local:N``, ``ssh:HOST,…``, ``slurm:N,…``, ``kubernetes:N,…`` or ``tls://HOST:PORT,…``.

    Raises:
        InputError: the text is not a valid specification.
    """
    text = text.strip()
    if "://" in text:
        addresses = Address.parse_all(text)
        return HostSpec(addresses[0].scheme, len(addresses), addresses)
    kind, _, rest = text.partition(":")
    if kind == "ssh":
        targets = tuple(map(Target.parse, rest.split(",")))
        return HostSpec(kind, len(targets), targets=targets)
    if kind in ("slurm", "kubernetes"):
        count, options = (slurm if kind == "slurm" else kubernetes).parse(rest)
        return HostSpec(kind, count, options=options)
    match = re.fullmatch(r"local(?::(\d{1,4}))?", text)
    if match is None:
        raise InputError(
            f"invalid --hosts {text!r}",
            hint="give local:N, ssh:HOST,…, slurm:N, kubernetes:N or tls://HOST:PORT,…",
        )
    count = int(match.group(1) or 1)
    if not 1 <= count <= MOST_LOCAL:
        raise InputError(
            f"{text!r} asks for {count} hosts", hint=f"give a number from 1 to {MOST_LOCAL}"
        )
    return HostSpec("local", count)
