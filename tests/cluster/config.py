"""The configuration files of the lab's daemons, as pure text.

It exists so that every setting stands in one place beside its reason. It refuses to read or
write the machine. Checked on Slurm 22.05.8 (Debian 12).
"""

from tests.cluster.record import LabPaths
from tests.cluster.shape import NUM_CPUS, Group, Shape

CLUSTER = "vjoblab"
CONTROLLER_PORT = 27817
SLURMD_PORT = 27818
DBD_PORT = 27819
DATABASE_PORT = 27806
"""All below the ephemeral range (32768 on), so that no client happens to hold one."""
DATABASE_USER = "vjoblab"
SLURMD_TIMEOUT_S = 6
"""With MessageTimeout=5 a node without power is `down` after 16 s; 9 and 10 make that 28 s. Twelve
busy loops on two cores brought no false alarm."""
GRACE_TIME_S = 6
ENROOT_FOLDERS = ("DATA", "RUNTIME", "CACHE", "TEMP")


def render_slurm_conf(shape: Shape, paths: LabPaths, *, host_name: str, accounting: bool) -> str:
    storage = _DBD_STORAGE if accounting else "AccountingStorageType=accounting_storage/none\n"
    queues = "".join(
        f"PartitionName={group.queue} Nodes={','.join(group.nodes)} "
        f"MaxTime=INFINITE DefaultTime=10 PriorityTier=10 PreemptMode=OFF\n"
        for group in shape.groups
    )
    return _SLURM_CONF.format(
        cluster=CLUSTER,
        host_name=host_name,
        controller_address=shape.controller_address,
        controller_port=CONTROLLER_PORT,
        slurmd_port=SLURMD_PORT,
        slurmd_timeout_s=SLURMD_TIMEOUT_S,
        munge_socket=paths.munge_socket,
        folder=paths.folder,
        controller_state=paths.controller_state,
        storage=storage.format(
            controller_address=shape.controller_address,
            dbd_port=DBD_PORT,
            munge_socket=paths.munge_socket,
        ),
        nodes="".join(
            _render_node(group, node, shape.node_addresses[node])
            for group in shape.groups
            for node in group.nodes
        ),
        queues=queues,
        all_nodes=",".join(shape.nodes),
        grace_time_s=GRACE_TIME_S,
    )


def _render_node(group: Group, node: str, address: str) -> str:
    return (
        f"NodeName={node} NodeHostname={node} NodeAddr={address} CPUs={NUM_CPUS} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={NUM_CPUS} ThreadsPerCore=1 "
        f"RealMemory={group.memory_mb} Gres={group.gres} Feature={group.gpu_type}\n"
    )


_DBD_STORAGE = """\
AccountingStorageType=accounting_storage/slurmdbd
# The bridge address, not localhost: sacct on a node has a localhost of its own.
AccountingStorageHost={controller_address}
AccountingStoragePort={dbd_port}
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""

_SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={host_name}({controller_address})
SlurmctldPort={controller_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start: the default is 120 s.
AuthInfo=socket={munge_socket},cred_expire=5
StateSaveLocation={controller_state}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/nodes/%n/slurmd.pid
SlurmdSpoolDir={folder}/nodes/%n/spool
SlurmdLogFile={folder}/log/%n.log
MailProg=/bin/true
# No cgroups: several nodes share one machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=10
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
# The nodes have the CPUs and memory written below, not those of the machine.
SlurmdParameters=config_overrides
# Without bf_hetjob_immediate a het job waits for several backfill rounds.
SchedulerParameters=sched_interval=1,bf_interval=1,bf_hetjob_immediate,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# From 23.02 on this is PreemptParameters=send_user_signal.
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
MinJobAge=300
KillWait=5
# On a busy machine a killed step may take long to go; the default of 60 s would drain its node.
UnkillableStepTimeout=900
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=30
InactiveLimit=0
MessageTimeout=5
TCPTimeout=2
# A conf rewritten for a lab without accounting differs from the one that slurmd has read.
DebugFlags=NO_CONF_HASH
{storage}
{nodes}
{queues}\
PartitionName=all Nodes={all_nodes} Default=YES MaxTime=INFINITE DefaultTime=10 \
PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes={all_nodes} MaxTime=INFINITE DefaultTime=10 \
PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_time_s}
"""


def render_gres_conf(shape: Shape, paths: LabPaths) -> str:
    """`File=` is needed: a type with a count alone registers as 0 GPUs and drains the node."""
    return "".join(
        f"NodeName={','.join(group.nodes)} Name=gpu Type={group.gpu_type} "
        f"File={paths.device(0).with_name('nvidia')}[0-{group.num_gpus - 1}]\n"
        for group in shape.groups
    )


def render_cgroup_conf() -> str:
    """slurmd looks for cgroups even with linuxproc; it must not ask systemd for one."""
    return "CgroupAutomount=no\nIgnoreSystemd=yes\n"


def render_plugstack_conf(paths: LabPaths, plugin: str) -> str:
    """pyxis, with its folder on the node's own disk; Slurm reads this beside slurm.conf."""
    return f"required {plugin} runtime_path={paths.local}/pyxis\n"


def render_enroot_wrapper(paths: LabPaths, enroot: str) -> str:
    """Render a wrapper that sets what a site's enroot.conf does: without it all nodes share
    ~/.local/share/enroot, and the container of one step has the same name on each of them."""
    own = f"{paths.local}/enroot"
    folders = " ".join(f"ENROOT_{name}_PATH={own}/{name.lower()}" for name in ENROOT_FOLDERS)
    return f'#!/bin/sh\nexport {folders}\nexec {enroot} "$@"\n'


def render_slurmdbd_conf(paths: LabPaths, *, password: str) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={paths.munge_socket}
SlurmUser=root
DbdHost=localhost
DbdPort={DBD_PORT}
LogFile={paths.folder}/log/slurmdbd.log
PidFile={paths.folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser={DATABASE_USER}
StoragePass={password}
StorageLoc=slurm_acct_db
"""


def render_database_setup(*, password: str) -> str:
    return (
        f"CREATE USER IF NOT EXISTS '{DATABASE_USER}'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON slurm_acct_db.* TO '{DATABASE_USER}'@'127.0.0.1';\n"
    )


def render_hosts(shape: Shape, *, host_name: str) -> str:
    """The nodes' /etc/hosts; no 127.0.1.1 line, the trap that Debian sets for host names."""
    entries = {host_name: shape.controller_address, **shape.node_addresses}
    lines = "".join(f"{address} {name}\n" for name, address in entries.items())
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{lines}"
