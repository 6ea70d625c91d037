"""Lines that go with failures: what they mean for a verdict, and what to do. Data alone.

The first row that fits a line is the line's; so rows go from what proves most to what proves least,
and from special to general. Patterns meet the line without the tags of ranks and times before it.
tests/jobs/monitor/log_lines/test_errors.py holds the messages, as the tools print them. One table,
however long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vjob.containers.catalogue import CATALOGUE

ATTEMPT_ENDED = "attempt ended"
"""Name of the lines that say how an attempt ended, with an error or a bare exit code."""
Kind = Literal["root", "fallout", "warning", "never"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """One known line."""

    name: str
    kind: Kind
    """root: may be where it began. fallout: others' failure, or a summary; the root only where
    nothing else is. warning: worth showing, no failure. never: looks like one and is none."""
    pattern: str
    """Regular expression, searched for."""
    remedy: str = ""
    is_final: bool = False
    """The process that this befell cannot go on."""


def _known(
    kind: Kind, name: str, pattern: str, remedy: str = "", *, is_final: bool = False
) -> Known:
    return Known(
        name=name,
        kind=kind,
        pattern=pattern,
        remedy=remedy,
        is_final=is_final,
    )


NEVER = (
    _known(
        "never",
        "advice",
        r"CUDA_LAUNCH_BLOCKING|(may|might|can|could) (also )?be caused by|asynchronously reported"
        r"|TORCH_USE_CUDA_DSA|elastic/errors\.html",
    ),
    _known(
        "never",
        "python warning",
        r"\b\w*Warning: |\bwarnings\.warn\(",
    ),
    _known(
        "never",
        "recovery",
        r"(?i)\brecovered\b|\brecovering from\b|\bretrying\b|\bwill (retry|try again)\b"
        r"|\btrying again\b|^Exception ignored (in|while)",
    ),
    _known("never", "source line", r"^\s*(raise|except|assert) "),
)
"""Looked for first: a line that one of these fits is a line like any other."""

WARNED = (
    _known(
        "never", "logged warning", r"^WARN(ING)?\b|- WARN(ING)? -|\[WARN(ING)?\]|level=warning\b"
    ),
)
"""The same, after what container runtimes warn of before they give up."""

QUOTES = (
    _known(
        "fallout",
        "another rank's error",
        r"^(\w+\.)*(RankFailed|ChannelClosed)\b",
        "another rank failed first: the line quotes its error",
    ),
    _known(
        "fallout",
        ATTEMPT_ENDED,
        r": stopping the attempt: |^(group \S+ of )?attempt \d+: code [1-9]",
    ),
)
"""Lines of ours that quote an error that stands elsewhere, whatever that is."""

GPU = (
    _known(
        "fallout",
        "xid cleanup",
        r"\bXid \(.*?\): 45\b",
        "a process died while it used the GPU: look for the error before",
    ),
    _known(
        "warning",
        "xid notice",
        r"\bXid \(.*?\): (63|92)\b",
        "memory of this GPU was remapped: tell an admin, and drain the node if it happens again",
    ),
    _known(
        "root",
        "program xid",
        r"\bXid \(.*?\): (13|31|43|68|69)\b",
        "most often the program's own bad access to GPU memory: run one rank under "
        "compute-sanitizer; if only this GPU does it, leave its node out with cluster.exclude",
        is_final=True,
    ),
    _known(
        "root",
        "off the bus",
        r"fallen off the bus|\bGPU is lost\b|[Uu]nable to determine the device handle",
        "the GPU is gone until its node is restarted: leave the node out with cluster.exclude, and "
        "tell an admin",
        is_final=True,
    ),
    _known(
        "root",
        "ecc",
        r"(?i)uncorrectable (ECC|NVLink|memory)|double[- ]bit ECC|uncorrected ECC"
        r"|\bXid \(.*?\): (48|64|94|95)\b",
        "this GPU's memory is faulty: leave the node out with cluster.exclude, and tell an admin",
        is_final=True,
    ),
    _known(
        "root",
        "nvlink",
        r"(?i)NVLink\b.{0,60}\b(fatal|error|failed|failure|down)\b|SXid \(|\bXid \(.*?\): 74\b"
        r"|fabric ?manager\b.{0,40}\b(error|failed|not running)|cudaErrorSystemNotReady"
        r"|CUDA error: system not yet initialized",
        "links between this node's GPUs fail: leave it out with cluster.exclude; an admin looks at "
        "`nvidia-smi nvlink -e` and the fabric manager",
        is_final=True,
    ),
    _known(
        "root",
        "xid",
        r"\bXid \(.*?\): \d+",
        "the driver reports a fault of this GPU: leave the node out with cluster.exclude, and tell "
        "an admin the number",
        is_final=True,
    ),
    _known(
        "root",
        "pcie",
        r"PCIe Bus Error: severity=Uncorrect|pcieport\b.*\bUncorrect",
        "the link to this GPU or network card fails: leave the node out with cluster.exclude",
        is_final=True,
    ),
    _known(
        "root",
        "overheated",
        r"(?i)\boverheat(ed|ing)\b|thermal (shutdown|trip|violation)|critical temperature reached",
        "cooling of this node fails: leave it out with cluster.exclude, and tell an admin",
        is_final=True,
    ),
    _known(
        "warning",
        "hot",
        r"(?i)temperature (is )?above threshold|(HW|SW|hardware|software) thermal slowdown",
        "the node slows down for heat: tell an admin",
    ),
)

CUDA = (
    _known(
        "root",
        "cuda out of memory",
        r"(CUDA|HIP|XPU|NPU) out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|^(\w+\.)*OutOfMemoryError\b"
        r"|(?i:cuda failure).{0,20}out of memory",
        "lower the batch size: your script's own (program.args), or train.micro_batch_size of a "
        "built-in program, which can also take parallel.recompute: full, more stages or zero, or "
        "fewer layers for this stage in parallel.partition",
        is_final=True,
    ),
    _known(
        "root",
        "device-side assert",
        r"device-side assert|block: \[\d+,\d+,\d+\], thread: \[.*\bAssertion\b.*failed",
        "most often an index beyond a table, such as a token beyond model.vocab or a position "
        "beyond model.sequence: run once on processors, or with env CUDA_LAUNCH_BLOCKING=1",
        is_final=True,
    ),
    _known(
        "root",
        "illegal memory access",
        r"illegal memory access|CUDA error: (misaligned address|an illegal instruction"
        r"|unspecified launch failure|invalid program counter)|CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED)",
        "a kernel reads what is not there: run with env CUDA_LAUNCH_BLOCKING=1; if only one GPU "
        "does it, leave its node out with cluster.exclude",
        is_final=True,
    ),
    _known(
        "root",
        "no kernel image",
        r"no kernel image is available|CUDA capability sm_\d+ is not compatible"
        r"|CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the image's torch was not built for this GPU: take a newer image as container.image, or "
        "other nodes",
        is_final=True,
    ),
    _known(
        "root",
        "driver",
        r"(?i)driver version is insufficient|NVIDIA driver on your system is too old"
        r"|Driver/library version mismatch|forward compatibility was attempted"
        r"|no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|driver initialization failed|CUDA unknown error|couldn't communicate with the NVIDIA "
        r"driver|unsupported display driver",
        "driver and CUDA of this node do not fit, or no GPU is visible there: compare `nvidia-smi` "
        "on it with container.image, and see gpus of the node group",
        is_final=True,
    ),
    _known(
        "root",
        "gpu busy",
        r"devices? (is|are) busy or unavailable",
        "a process of another job holds the GPU: see `nvidia-smi` on that node",
        is_final=True,
    ),
    _known(
        "root",
        "device number",
        r"invalid device ordinal",
        "a rank asks for a GPU that its node does not show: gpus and ranks of the node group, and "
        "CUDA_VISIBLE_DEVICES, must fit",
        is_final=True,
    ),
)

SCHEDULER = (
    _known(
        "root",
        "host out of memory",
        r"(?i)Detected [1-9]\d* oom[-_ ]?kill|Out of memory: Killed process|oom-kill:constraint"
        r"|Memory cgroup out of memory|oom_kill_process|invoked oom-killer"
        r"|cgroup out-of-memory handler|Exceeded (job|step) memory limit"
        r"|tasks? [\d,\[\]-]+: Out Of Memory|exceeded (virtual )?memory limit",
        "the node's memory was used up: raise memory_gb of the node group (0 is all), or lower "
        "the number of data workers",
        is_final=True,
    ),
    _known(
        "root",
        "time limit",
        r"DUE TO TIME LIMIT|\bthe time limit was reached\b",
        "raise cluster.walltime_min; with train.checkpoint the next submit goes on from there",
        is_final=True,
    ),
    _known(
        "root",
        "preempted",
        r"DUE TO PREEMPTION|\bjob \S+ (was )?preempted\b",
        "a job of higher priority took its nodes: submit again, it goes on from its checkpoint",
        is_final=True,
    ),
    _known(
        "root",
        "node failure",
        r"DUE TO NODE FAIL|srun: error: Node failure on|Job \S+ killed due to node failure"
        r"|error: Nodes? \S+ (are |is )?not responding|\bwas lost: no sign of life\b",
        "the node went away: a run with morph.enabled goes on without it, any other is submitted "
        "again without it (cluster.exclude)",
        is_final=True,
    ),
    _known(
        "root",
        "requeued",
        r"\*\*\* (JOB|STEP) .*\bDUE TO JOB REQUEUE",
        "the job was put back into the queue, by you, an admin or a preemption",
        is_final=True,
    ),
    _known(
        "root",
        "cancelled",
        r"\*\*\* JOB \S+ ON \S+ CANCELLED AT ",
        "somebody cancelled it: you, with vjob cancel or scancel, or an admin",
        is_final=True,
    ),
    _known(
        "root",
        "launch failed",
        r"srun: error: (Task|Application) launch (.*)failed|slurmstepd: error: execve\(\)"
        r"|slurmstepd: error: couldn't chdir|Slurmd could not connect IO"
        r"|[Jj]ob credential (expired|revoked|replayed)"
        r"|srun: error: Unable to (create step|confirm allocation|allocate)"
        r"|Requested (node|partition) configuration (is )?not available|More processors requested",
        "the step could not start: is log_folder there on that node, does the job ask for what its "
        "nodes have, and do its clock and Slurm's version fit the others'?",
        is_final=True,
    ),
)

PROGRAM = (
    _known(
        "root",
        "not a number",
        r"(?i)\bloss\b[^|]{0,40} (is nan|is inf|was nan|was inf|became nan|became inf|turned nan"
        r"|turned to nan|returned nan|not finite|non-finite)\b"
        r"|\b(found|detected|encountered|unexpected result) (a |an )?(nan|infs?)\b"
        r"|\bnan (or inf )?(loss|values?|gradients?|grads?) (was |were |is |are )?(detected|found"
        r"|encountered)|\bnan (detected|found|encountered)\b|returned nan values in its",
        "lower the learning rate or clip gradients; go back to a checkpoint before it, and look "
        "at the samples of that step",
    ),
    _known(
        "root",
        "loss scale",
        r"(?i)loss scale already at minimum|minimum loss scale (is |was )?reached"
        r"|loss[ _]scale .{0,40}below (the )?(minimum|threshold)",
        "gradients overflow whatever the scale is: lower the learning rate or use bf16",
        is_final=True,
    ),
    _known(
        "warning",
        "overflow",
        r"OVERFLOW!|[Gg]radient overflow\.|[Oo]verflow.{0,60}(reducing|skipping)",
        "ordinary in the first steps of fp16, and now and then later",
    ),
    _known(
        "warning",
        "nothing to do",
        r"^nothing to do: train\.steps is \d+",
        "raise train.steps to go on, or name another train.checkpoint.folder to start from step 0",
    ),
    _known(
        "root",
        "schedule of a checkpoint",
        r"OptimizerParamScheduler: class input value .* do not match",
        "the checkpoint was written for other train.steps or another schedule: add "
        "--override-opt_param-scheduler to program.args to train by the conf's, or "
        "--use-checkpoint-opt_param-scheduler by the checkpoint's",
        is_final=True,
    ),
    _known(
        "root",
        "shared memory",
        r"(?i)(out of|insufficient|unable to (open|allocate|mmap|resize)) shared memory"
        r"|creating shared memory segment|/dev/shm.*No space|No space left on device.*(shm|nccl-)"
        r"|is killed by signal: Bus error",
        "/dev/shm of the node or container is too small: enlarge it, or use fewer data workers",
        is_final=True,
    ),
    _known(
        "root",
        "segmentation fault",
        r"(?i)\bSegmentation fault\b|\bsegfault at\b|\bSIGSEGV\b(?!.*exitcode)",
        "native code crashed: the lines below `Fatal Python error` (env PYTHONFAULTHANDLER=1) say "
        "where; compare versions of the image's libraries with the driver's",
        is_final=True,
    ),
    _known(
        "root",
        "bus error",
        r"^(Fatal Python error: )?Bus error\b|: Bus error\b|\bSIGBUS\b",
        "a mapped file shrank, a disk or /dev/shm is full, or memory is faulty: see `df` there",
        is_final=True,
    ),
    _known(
        "root",
        "illegal instruction",
        r"\bIllegal instruction\b|\bSIGILL\b|\bFloating point exception\b|\bSIGFPE\b",
        "a library was built for another processor: take another image or other nodes",
        is_final=True,
    ),
    _known(
        "root",
        "quota",
        r"(?i)Disk quota exceeded|\bEDQUOT\b|\[Errno 122\]|quota .{0,30}exceeded",
        "a quota of bytes or of files is used up: make room, or move log_folder and "
        "train.checkpoint.folder",
    ),
    _known(
        "root",
        "disk full",
        r"No space left on device|\[Errno 28\]|\bENOSPC\b|(?i:\binodes? .{0,20}(exhausted"
        r"|full|used "
        r"up)|no free inodes)",
        "a disk has no room or no inodes left (`df`, `df -i`): make room, or move log_folder and "
        "train.checkpoint.folder",
    ),
    _known(
        "root",
        "stale file handle",
        r"Stale (NFS )?file handle|\[Errno 116\]",
        "a file or mount was replaced on the file server: have that node mount it again",
    ),
    _known(
        "root",
        "file system",
        r"Input/output error|\[Errno (5|30|107)\]|Read-only file system"
        r"|Transport endpoint is not connected|Cannot send after transport endpoint shutdown",
        "a file system of that node fails: look at `dmesg` and its mounts, or leave the node out",
    ),
    _known(
        "warning",
        "file server",
        r"(nfs|lustre|LustreError).*\bnot responding\b|Connection to .* was lost; in progress",
        "the file server is slow or gone for now",
    ),
    _known(
        "root",
        "no memory",
        r"DefaultCPUAllocator: |std::bad_alloc|^MemoryError\b|Cannot allocate memory"
        r"|\[Errno 12\]|numpy\.\S*MemoryError",
        "the node's memory, or a limit on it, is used up: raise memory_gb of the node group",
    ),
    _known(
        "root",
        "limits",
        r"Too many open files|\[Errno 24\]|can't start new thread|pthread_create\(?\)? failed"
        r"|fork: .*Resource temporarily unavailable",
        "a limit of the node on files or processes: see `ulimit -a` in a job there",
    ),
)

NETWORK = (
    _known(
        "root",
        "port in use",
        r"Address already in use|\bEADDRINUSE\b|\[Errno 98\]|\bport \d+ (is )?already in use",
        "set cluster.port to auto, or to a free port; a process of an earlier job may hold it",
        is_final=True,
    ),
    _known(
        "root",
        "name lookup",
        r"Name or service not known|Temporary failure in name resolution|\bgaierror\b"
        r"|nodename nor servname|[Cc]ould not resolve host",
        "a host name means nothing on that node: check its /etc/hosts and DNS",
    ),
    _known(
        "root",
        "no interface",
        r"[Nn]o socket interface found|Unable to find address for|No interfaces? found matching"
        r"|find a (network )?interface",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of that node: set interface "
        "of its group to auto, or to one that `ip -br a` shows there",
        is_final=True,
    ),
    _known(
        "root",
        "infiniband",
        r"\bibv_\w+.{0,60}(fail|error|timed? ?out)|(?i:call to ibv_\w+ failed)"
        r"|NET/IB ?: ?.{0,40}([Gg]ot completion|async (fatal )?event|error|fail)"
        r"|mlx5.*(syndrome|fatal|Completion with error)",
        "the network card or its link fails: `ibstat` and `ibdev2netdev` there; leave "
        "the node out, "
        "or set env NCCL_IB_DISABLE=1 to see",
    ),
    _known(
        "fallout",
        "collective timeout",
        r"collective operation timeout|before timing out|Timeout at NCCL work"
        r"|[Hh]eartbeat.{0,60}(timed out|timeout)|operations have failed or timed out"
        r"|[Ff]light [Rr]ecorder|observed a timeout|\bTimed out waiting \d+ ?ms for (recv|send)"
        r"|monitored[Bb]arrier|^RuntimeError: Socket Timeout"
        r"|c10d::.*barrier.*timed out|Application timeout caused pair closure",
        "a rank did not come to the collective: look at the rank that is not among those that "
        "timed out, and at its first error; `vjob stacks JOB` while it hangs",
    ),
    _known(
        "fallout",
        "aborted with others",
        r"(?i)(tak(ing|e) the entire process down)|taking the process down|ncclRemoteError"
        r"|remote process (has )?exited|NCCL communicator (was|has been) aborted"
        r"|attempting to dump debug info|\b(previous|earlier) errors?\b|due to another rank"
        r"|\bmisses rank \d+"
        r"|NCCL operation.*was aborted|\baborting (all|the) (processes|communicators)",
        "another rank failed first",
    ),
    _known(
        "fallout",
        "connection lost",
        r"Connection (closed|reset) by( remote)? peer|\b[Bb]roken ?[Pp]ipe(Error)?\b"
        r"|(sendBytes|recvBytes|recvValue|recvVector).{0,40}failed|failed to recv, got 0 bytes"
        r"|[Ff]ailed to (check|get|set).{0,60}TCPStore|^EOFError\b|socket (was )?closed by peer"
        r"|Connection was (likely )?closed",
        "the process at the other end went away: look at its first error",
    ),
    _known(
        "root",
        "rendezvous",
        r"Rendezvous(Connection|Timeout|Closed|State)?Error\b|waiting for clients|clients joined"
        r"|DistStoreError|DistNetworkError|client socket has (timed out|failed)"
        r"|wait timeout after \d+ ?ms|connectFullMesh|full mesh"
        r"|gloo.{0,80}connect.{0,20}(fail|time)",
        "the ranks did not find each other: did every node start, and can each reach rank 0's "
        "address and port? see `vjob logs JOB` for a node that says nothing",
    ),
    _known(
        "root",
        "nccl",
        r"unhandled system error|unhandled cuda error|ncclSystemError|ncclUnhandledCudaError"
        r"|ncclInternalError|ncclInvalidUsage|NCCL error(?! *handling)|NCCL failure"
        r"|invalid usage \(run with NCCL_DEBUG",
        "set env NCCL_DEBUG=INFO and look at the first NCCL WARN; often the interface, /dev/shm or "
        "a GPU of that node",
    ),
    _known(
        "root",
        "connection refused",
        r"Connection refused|No route to host|Network is unreachable|Connection timed out"
        r"|\[Errno (110|111|113)\]",
        "a node cannot be reached: a firewall, a wrong interface, or the process there is gone",
    ),
    _known("warning", "nccl warning", r"\bNCCL WARN\b", "a hint from NCCL"),
)

ENDS = (
    _known(
        "fallout",
        "launcher summary",
        r"ChildFailedError|torch\.distributed\.elastic|torch/distributed/elastic"
        r"|\bexitcode\s*: -?\d"
        r"|first observed failure|SignalException|Killing subprocess \d|exits with return code"
        r"|CalledProcessError|Sending process \d+ closing signal|workers failed"
        r"|\bSignal \d+ \(SIG[A-Z]+\) received|multiprocessing\.errors",
        "a launcher sums up: look for the first error of the rank that it names",
    ),
    _known(
        "fallout",
        "srun ends the step",
        r"\*\*\* STEP \S+ ON \S+ CANCELLED AT |srun: error: \S+: tasks? [\d,\[\]-]+: "
        r"(Terminated|Killed|Exited|Aborted|Force)|srun: (Terminating|Force Terminated|Job step "
        r"aborted|First task exited)|srun: launch/slurm: _step_signal: Terminating"
        r"|slurmstepd: error: .*(Broken pipe|Unable to send|task_exit)",
        "srun ended the others: look at the first rank that failed",
    ),
    _known(
        "fallout",
        "killed",
        r"^(Killed|Terminated)$|: line \d+: +\d+ (Killed|Terminated)\b"
        r"|killed by signal: (Terminated"
        r"|Killed)|^\S*bash: .*: (Killed|Terminated)",
        "somebody sent a signal; only a line about memory or the scheduler says who",
    ),
    _known(
        "fallout",
        "aborted as it ended",
        r"terminate called without an active exception",
        "a thread of a library outlived Python, often after all work was done: end the program "
        "with torch.distributed.destroy_process_group()",
        is_final=True,
    ),
    _known(
        "fallout",
        "aborted",
        r"Fatal Python error: Aborted|\bAborted \(core dumped\)|^Aborted$|\bSIGABRT\b"
        r"|terminate called after|: Aborted$",
        "a library gave up: the line before says why",
        is_final=True,
    ),
    _known("fallout", "interrupted", r"^KeyboardInterrupt\b"),
)

_NUMBER_ALONE = r"(?!:\s*[-+]?[\d.]+(e[-+]?\d+)?%?\s*($|[,|;]))"
"""A metric: MeanSquaredError: 0.012."""

PYTHON = (
    _known(
        "root",
        "import",
        r"^(ModuleNotFoundError|ImportError)\b|cannot open shared object file|undefined symbol: "
        r"|version `GLIBC\w*[\d.]+' not found|No module named \S+$",
        "the ranks' Python lacks a module or library: install it there, or take another "
        "container.image or program.python",
        is_final=True,
    ),
    _known(
        "root",
        "checkpoint",
        r"in loading state_dict|key\(s\) in state_dict|PytorchStreamReader failed"
        r"|^(\w+\.)*(Damaged|Foreign|No)Checkpoint\b|^(\w+\.)*(CheckpointError|FolderTaken)\b"
        r"|(?i:\bcheckpoints?\b.{0,60}(does not match|do not match|mismatch|corrupt))",
        "the checkpoint is of another model or is damaged: name another train.checkpoint.folder, "
        "or remove the newest one",
    ),
    _known(
        "root",
        "shapes",
        r"size mismatch for|shapes cannot be multiplied|[Ss]izes? of tensors? \w* ?.*must match"
        r"|size of tensor a|shape '\[.*\]' is invalid|Expected input batch_size"
        r"|could not broadcast input array",
        "sizes in model, data and parallel do not fit each other or the checkpoint",
    ),
    _known(
        "root",
        "no such file",
        r"^FileNotFoundError\b|: No such file or directory\b|can't open file '",
        "a path is missing on that node: is it on a file system that all nodes see, and among "
        "container.mounts?",
    ),
    _known(
        "root",
        "permission",
        r"^PermissionError\b|: Permission denied\b",
        "the job's user may not use that path on that node",
    ),
    _known(
        "root",
        "command not found",
        r"\b(ba|z|da)?sh: .*: (command )?not found$|: command not found$|^env: .*: No such file",
        "that program is not on the PATH of the ranks: name it whole, or take another image",
        is_final=True,
    ),
    _known(
        "root",
        "arguments",
        r"^\S+: error: (unrecognized arguments|the following arguments|argument "
        r"|ambiguous|invalid)",
        "the program does not know these arguments: see program.args",
        is_final=True,
    ),
    _known(
        "root",
        "refused by vjob",
        r"^vjob agent: (?!the attempt was (?:asked|told) to stop)|^launch: cannot go on",
        "the message says what to change",
        is_final=True,
    ),
    _known(
        "root",
        "cuda error",
        r"\b(CUDA|HIP) error: |\bCUDA (driver )?failure\b|CUBLAS_STATUS_[A-Z_]+"
        r"|CUDNN_STATUS_[A-Z_]+"
        r"|cuDNN error: |^(\w+\.)*AcceleratorError\b",
        "run with env CUDA_LAUNCH_BLOCKING=1 to see where; if one GPU alone does it, leave its "
        "node out with cluster.exclude",
        is_final=True,
    ),
    _known(
        "root",
        "data worker",
        r"DataLoader worker .*(exited unexpectedly|is killed by signal)",
        "a data worker died, most often for memory: use fewer, or raise memory_gb",
    ),
    _known(
        "root",
        "python exception",
        r"^(?:[A-Za-z_]\w*\.)*(?:(?:ArithmeticError|AssertionError|AttributeError|Exception"
        r"|IndexError|KeyError|NotImplementedError|OSError|OutOfResources|OverflowError|RuntimeError|TypeError"
        r"|ValueError|ZeroDivisionError)(?:: .*)?$|[A-Z]\w*(?:Error|Exception)"
        rf"{_NUMBER_ALONE}(?:: .*)?$)",
    ),
    _known("root", "fatal error", r"^Fatal Python error: |^(FATAL|fatal)( error)?: "),
)

CONTAINERS = tuple(
    _known(
        "root",
        f"container: {trouble.name}",
        trouble.pattern,
        f"{trouble.cause}: {trouble.remedy}",
        is_final=True,
    )
    for trouble in CATALOGUE
)
"""What container runtimes say: containers/catalogue.py."""

LOGGED = (
    _known(
        "never",
        "no error",
        r"(?i)\b(no|0|zero|without( any)?) (errors?|exceptions?|failures?)\b"
        r"|\b(errors?|failures?|exceptions?)[\"']? ?[:=] ?(0|none|null|false)\b(?!\.\d)"
        r"|\bDetected 0 oom",
    ),
    _known(
        "warning",
        "logged error",
        r"^(ERROR|CRITICAL|FATAL)\b|\[(ERROR|CRITICAL|FATAL)\]|- (ERROR|CRITICAL) -"
        r"|(^|\s)level=(error|fatal)\b|^(?i:error): \S|\b\w+: error: \S",
        "the line calls itself an error; the training may continue",
    ),
)

ROWS = (
    *NEVER,
    *QUOTES,
    *CONTAINERS,
    *WARNED,
    *GPU,
    *CUDA,
    *SCHEDULER,
    *PROGRAM,
    *NETWORK,
    *ENDS,
    *PYTHON,
    *LOGGED,
)
"""In order: the first that fits."""
