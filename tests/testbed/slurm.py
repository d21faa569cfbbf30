"""A real Slurm on the lab: its controller on ``login``, the other hosts its nodes."""

from __future__ import annotations

import base64
import secrets
import time

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

# No cgroups, which belong to the machine; accounts of jobs only if asked for, as they need a
# database; and no waiting for more jobs before one is started.
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
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
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
printf "CgroupPlugin=cgroup/v1\\nCgroupAutomount=no\\n" >/etc/slurm/cgroup.conf  # looks for nothing
munged --force --key-file /run/munge/key
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


def start_slurm(lab: Lab, *, accounts: bool = False) -> list[Service]:
    """Have ``srun``, ``sbatch`` and the others work on ``login``, with all other hosts as nodes.

    Args:
        lab: of the hosts.
        accounts: keep accounts of jobs, which ``sacct`` shows, in a database.

    Returns:
        The controller, and what runs on each node.

    Raises:
        UnavailableError: Slurm is not installed.
        HostError: it does not come up.
    """
    require("slurmctld", "slurmd", "munged", "srun", "sbatch")
    key = base64.b64encode(secrets.token_bytes(1024)).decode()
    for host in lab.names:
        prepare = ["sh", "-c", PREPARE, "sh", _configuration(lab, accounts=accounts)]
        lab.run(host, prepare, stdin=None, input=key, check=True)
    if accounts:
        _start_accounts(lab)
    services = [Service(lab, LOGIN, [*CONTROLLER, "-i"], CONTROLLER_PORT)]
    services += [Service(lab, host, ["slurmd", "-D"], NODE_PORT) for host in lab.hosts]
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


def _configuration(lab: Lab, *, accounts: bool) -> str:
    storage = f"slurmdbd\nAccountingStorageHost={LOGIN}" if accounts else "none"
    nodes = [
        f"NodeName={host} NodeAddr={lab.address(host)} CPUs={CPUS} RealMemory={MEMORY}"
        for host in lab.hosts
    ]
    return CONFIGURATION.format(
        login=f"{LOGIN}({lab.address(LOGIN)})",
        controller=CONTROLLER_PORT,
        port=NODE_PORT,
        memory=MEMORY // 2,
        nodes="\n".join(nodes),
        accounts=f"AccountingStorageType=accounting_storage/{storage}",
    )
