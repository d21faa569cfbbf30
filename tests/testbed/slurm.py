"""A real Slurm on the lab: its controller on ``login``, the other hosts its nodes."""

from __future__ import annotations

import base64
import secrets
import time

from tests.testbed.lab import LOGIN, Lab, require
from tests.testbed.service import Service
from wheelmount.errors import HostError

CONTROLLER_PORT, NODE_PORT = 6817, 6818

CPUS, MEMORY = 4, 4000
"""What a node is said to have, whatever the machine has; memory in MB."""

TIMEOUT = 30.0
"""Seconds until all nodes must be ready."""

# No cgroups, which belong to the machine; no account of jobs, which needs a database; and no
# waiting for more jobs before one is started.
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
AccountingStorageType=accounting_storage/none
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


def start_slurm(lab: Lab) -> list[Service]:
    """Have ``srun``, ``sbatch`` and the others work on ``login``, with all other hosts as nodes.

    Returns:
        The controller, and what runs on each node.

    Raises:
        UnavailableError: Slurm is not installed.
        HostError: it does not come up.
    """
    require("slurmctld", "slurmd", "munged", "srun", "sbatch")
    key = base64.b64encode(secrets.token_bytes(1024)).decode()
    for host in lab.names:
        prepare = ["sh", "-c", PREPARE, "sh", _configuration(lab)]
        lab.run(host, prepare, stdin=None, input=key, check=True)
    services = [Service(lab, LOGIN, ["slurmctld", "-D", "-i"], CONTROLLER_PORT)]
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


def _configuration(lab: Lab) -> str:
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
    )
