"""A real Slurm on the lab: its controller on ``login``, the other hosts its nodes."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import time
from pathlib import Path

from tests.testbed.lab import LOGIN, Lab, require
from tests.testbed.service import Service
from wheelmount.errors import HostError

CONTROLLER_PORT, NODE_PORT, ACCOUNTS_PORT, DATABASE_PORT = 6817, 6818, 6819, 3306

SOCKET = "/run/mysqld/mysqld.sock"

CONTROLLER = "slurmctld", "-D"

CPUS, MEMORY = 4, 4000
"""What a node is said to have, whatever the machine has; memory in MB."""

TIMEOUT = 30.0
"""Seconds until all nodes must be ready."""

# Cgroups, which belong to the machine, and accounts of jobs, which need a database, only if asked
# for; and no waiting for more jobs before one is started.
CONFIGURATION = """
ClusterName=lab
SlurmctldHost={login}
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={port}
StateSaveLocation=/var/spool/slurm-controller
SlurmdSpoolDir=/var/spool/slurm-node
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/{processes}
TaskPlugin={tasks}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode={memory}
{accounts}
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
KillWait=5
SchedulerParameters=batch_sched_delay=0,bf_interval=1
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

PREPARE = """
set -e
mkdir -p /run/munge /var/lib/munge /var/log/munge /var/spool/slurm-controller /var/spool/slurm-node
mkdir -p /etc/slurm
base64 -d >/run/munge/key
chmod 400 /run/munge/key
printf %s "$1" >/etc/slurm/slurm.conf
printf %s "$2" >/etc/slurm/cgroup.conf
munged --force --key-file /run/munge/key
"""

NO_CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
"""

CGROUPS = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=yes
ConstrainRAMSpace=yes
"""

CONTROLLERS = "cpuset", "memory", "freezer"
"""Cgroups of version 1 by which Slurm confines jobs."""

# A node's cgroups lie below those of this process, and its host sees no others.
CONFINE = """
set -e
own=$1 places=$2; shift 2
mount -t tmpfs none /sys/fs/cgroup
for each in $places; do
  top=/sys/fs/cgroup/$each
  mkdir $top
  mount -t cgroup -o $each none $top
  above=$(sed -n "s/^[0-9]*:$each://p" /proc/self/cgroup)
  mkdir $top$above/$own
  if [ $each = cpuset ]; then
    for file in cpuset.cpus cpuset.mems; do cat $top$above/$file >$top$above/$own/$file; done
  fi
  echo $$ >$top$above/$own/cgroup.procs
  umount $top
done
exec unshare --cgroup sh -ec '
  for each in $0; do mount -t cgroup -o $each none /sys/fs/cgroup/$each; done; exec "$@"
' "$places" "$@"
"""

RELEASE = """
own=$1 places=$2
for each in $places; do
  mount -t cgroup -o $each none /mnt
  above=$(sed -n "s/^[0-9]*:$each://p" /proc/self/cgroup)
  for node in /mnt$above/$own-*; do
    if [ -d $node ]; then find $node -depth -type d -exec rmdir {} +; fi
  done
  umount /mnt
done
"""


ACCOUNTS = """
set -e
mkdir -p /run/mysqld /var/lib/accounts
umask 077
printf %s "$1" >/etc/slurm/slurmdbd.conf
"""

# The database accepts every user without a password: only its own host can reach it.
DATABASE = (
    *("mariadbd", "--no-defaults", "--skip-grant-tables", "--user=root"),
    *("--datadir=/var/lib/accounts", f"--socket={SOCKET}", "--bind-address=127.0.0.1"),
)

OF_ACCOUNTS = f"""
AuthType=auth/munge
DbdHost={LOGIN}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounts
PidFile=/run/slurmdbd.pid
"""


def start_slurm(lab: Lab, *, accounts: bool = False, confined: bool = False) -> list[Service]:
    """Have ``srun``, ``sbatch`` and the others work on ``login``, with all other hosts as nodes.

    Args:
        lab: of the hosts.
        accounts: keep accounts of jobs, which ``sacct`` shows, in a database.
        confined: nodes have this machine's processors and not more, and cgroups confine each job to
            the processors and the memory that it has.

    Returns:
        The controller, and what runs on each node.

    Raises:
        UnavailableError: Slurm is not installed.
        HostError: it does not come up.
    """
    require("slurmctld", "slurmd", "munged", "srun", "sbatch")
    key = base64.b64encode(secrets.token_bytes(1024)).decode()
    for host in lab.names:
        configuration = _configuration(lab, accounts=accounts, confined=confined)
        prepare = ["sh", "-c", PREPARE, "sh", configuration, CGROUPS if confined else NO_CGROUPS]
        lab.run(host, prepare, stdin=None, input=key, check=True)
    if accounts:
        _start_accounts(lab)
    services = [Service(lab, LOGIN, [*CONTROLLER, "-i"], CONTROLLER_PORT)]
    own = f"testbed-{secrets.token_hex(4)}"
    places = " ".join(CONTROLLERS)
    for host in lab.hosts:
        confine = ["sh", "-c", CONFINE, "sh", f"{own}-{host}", places] if confined else []
        services.append(Service(lab, host, [*confine, "slurmd", "-D"], NODE_PORT))
    if confined:
        release = ["unshare", "--mount", "sh", "-c", RELEASE, "sh", own, places]
        lab.at_end(lambda: subprocess.run(release, check=True))
    for service in services:
        service.await_port()
    deadline = time.monotonic() + TIMEOUT
    idle = ["sinfo", "--noheader", "--states", "idle", "--format", "%D"]
    while lab.run(LOGIN, idle).stdout.strip() != str(len(lab.hosts)):
        if time.monotonic() > deadline:
            seen = lab.run(LOGIN, ["sinfo", "--long", "--Node"]).stdout
            raise HostError(f"Slurm's nodes are not ready within {TIMEOUT:g} s:\n{seen}")
        time.sleep(0.1)
    return services


def _start_accounts(lab: Lab) -> None:
    require("slurmdbd", "mariadbd", "sacct")
    lab.run(LOGIN, ["sh", "-c", ACCOUNTS, "sh", OF_ACCOUNTS], check=True)
    Service(lab, LOGIN, DATABASE, DATABASE_PORT).await_port()
    Service(lab, LOGIN, ["slurmdbd", "-D"], ACCOUNTS_PORT).await_port()
    lab.run(LOGIN, ["sacctmgr", "--immediate", "add", "cluster", "lab"], check=True)


def may_confine() -> bool:
    """Return whether this machine has cgroups of version 1, by which nodes can be confined."""
    mounted = {
        line.split()[0]
        for line in Path("/proc/cgroups").read_text().splitlines()
        if line.split()[1] != "0"
    }
    return mounted.issuperset(CONTROLLERS)


def _configuration(lab: Lab, *, accounts: bool, confined: bool) -> str:
    storage = f"slurmdbd\nAccountingStorageHost={LOGIN}" if accounts else "none"
    cpus = os.cpu_count() if confined else CPUS
    nodes = [
        f"NodeName={host} NodeAddr={lab.address(host)} CPUs={cpus} RealMemory={MEMORY}"
        for host in lab.hosts
    ]
    return CONFIGURATION.format(
        login=f"{LOGIN}({lab.address(LOGIN)})",
        controller=CONTROLLER_PORT,
        port=NODE_PORT,
        memory=MEMORY // 2,
        nodes="\n".join(nodes),
        processes="cgroup" if confined else "linuxproc",
        tasks="task/affinity,task/cgroup" if confined else "task/none",
        accounts=f"AccountingStorageType=accounting_storage/{storage}",
    )
