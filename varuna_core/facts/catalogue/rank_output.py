"""Lines that ranks, their libraries and launchers print: their meanings and remedies.

Patterns are matched without the tags of ranks and times before a line. Errors count only on
standard error, since a script that catches an exception and prints it continues. Rows with
`Stream.ANY` are for tools that write to standard output.
tests/jobs/monitor/log_lines/test_errors.py has the messages as the tools print them. The file has
one table, however long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from varuna_core.facts.catalogue.known_line import TEARDOWN_S, Proof, Scope, Stream, make_row
from varuna_core.facts.catalogue.remedies import (
    EXCLUDE,
    EXCLUDE_IF_ALONE,
    FEWER_WORKERS,
    MAKE_ROOM,
    MORE_MEMORY,
    MOVE_CHECKPOINTS,
    MOVE_LOGS,
    SHOW_KERNEL,
    SHOW_STACK,
    ask_admin,
    do,
    look_at,
    set_env,
)
from varuna_core.facts.cause import EndCause
from varuna_core.facts.remedy import Action, Remedy, Target

PYTHON_EXCEPTION = "python exception"
"""Name of the row for an exception of any kind."""
ATTEMPT_ENDED = "attempt ended"
"""Name of the lines that say how an attempt ended: with an error or only with an exit code."""
REFUSED_BY_VJOB = "refused by vjob"
"""Name of the lines by which an agent ends an attempt: its outcome has the same words."""

cause = partial(make_row, Scope.RANK, Proof.CAUSE, stream=Stream.STDERR)
fallout = partial(make_row, Scope.RANK, Proof.FALLOUT, stream=Stream.STDERR)
warning = partial(make_row, Scope.RANK, Proof.WARNING)
ignore = partial(make_row, Scope.RANK, Proof.IGNORE)

NEVER = (
    ignore(
        "advice",
        r"CUDA_LAUNCH_BLOCKING|(may|might|can|could) (also )?be caused by|asynchronously reported"
        r"|TORCH_USE_CUDA_DSA|elastic/errors\.html",
    ),
    ignore(
        "python warning",
        r"\b\w*Warning: |\bwarnings\.warn\(",
    ),
    ignore(
        "torch's second try",
        r"\(errno: \d+ - Address family not supported|destroy_process_group\(\) was not called",
    ),
    ignore(
        "recovery",
        r"(?i)\brecovered\b|\brecovering from\b|\bretrying\b|\bwill (retry|try again)\b"
        r"|\btrying again\b|^Exception ignored (in|while)",
    ),
    ignore(
        "source line",
        r"^(\S+:\d+:)?\s*(raise|except|assert) ",
    ),
)

"""Rows that are tried first: a line that matches one of these is ignored."""

WARNED = (
    ignore(
        "logged warning",
        r"^WARN(ING)?\b|- WARN(ING)? -|\[WARN(ING)?\]|level=warning\b",
    ),
)

"""Rows for warnings, tried after the warnings that container runtimes print before they fail."""

QUOTES = (
    fallout(
        "another rank's error",
        r"^(\w+\.)*(RankFailed|ChannelClosed)\b",
        "another rank failed first: the line names it",
    ),
    fallout(
        ATTEMPT_ENDED,
        r": stopping the attempt: |^(group \S+ of )?attempt \d+: code [1-9]",
        stream=Stream.ANY,
    ),
)

"""Lines of vjob that quote an error printed elsewhere, whatever that error is."""

CUDA = (
    cause(
        "cuda out of memory",
        r"(CUDA|HIP|XPU|NPU) out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|^(\w+\.)*OutOfMemoryError\b"
        r"|(?i:cuda failure).{0,20}out of memory",
        "",
        Remedy(Action.LOWER, Target.BATCH_SIZE),
        Remedy(Action.SET, Target.RECOMPUTE, "full", when="the program is built in"),
        Remedy(Action.RAISE, Target.STAGES, instead=True),
        Remedy(Action.RAISE, Target.ZERO, instead=True),
        Remedy(Action.LOWER, Target.LAYERS, instead=True),
        fatal=True,
    ),
    cause(
        "device-side assert",
        r"device-side assert|block: \[\d+,\d+,\d+\], thread: \[.{0,200}\bAssertion\b.{0,400}failed",
        "most often an index beyond a table, such as a token beyond the vocabulary or a "
        "position beyond the sequence",
        do("run once without GPUs"),
        replace(SHOW_KERNEL, instead=True),
        fatal=True,
    ),
    cause(
        "illegal memory access",
        r"illegal memory access|CUDA error: (misaligned address|an illegal instruction"
        r"|unspecified launch failure|invalid program counter)|CUDA_ERROR_(ILLEGAL|LAUNCH_FAILED)",
        "a kernel accesses memory that it does not own",
        SHOW_KERNEL,
        EXCLUDE_IF_ALONE,
        fatal=True,
    ),
    cause(
        "no kernel image",
        r"no kernel image is available|CUDA capability sm_\d+ is not compatible"
        r"|CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the ranks' torch was not built for this GPU",
        Remedy(Action.CHANGE, Target.IMAGE, "a newer one"),
        Remedy(Action.EXCLUDE, Target.NODE, "such nodes", instead=True),
        fatal=True,
    ),
    cause(
        "torch without CUDA",
        r"'torch\._C' has no attribute '_cuda_|Torch not compiled with CUDA enabled",
        "the ranks' torch was built without CUDA",
        Remedy(Action.INSTALL, value="torch for CUDA", detail="in the ranks' Python"),
        Remedy(Action.CHANGE, Target.IMAGE, "one that has it", instead=True),
        fatal=True,
    ),
    cause(
        "driver",
        r"(?i)driver version is insufficient|NVIDIA driver on your system is too old"
        r"|Driver/library version mismatch|forward compatibility was attempted"
        r"|no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|driver initialization failed|CUDA unknown error|couldn't communicate with the NVIDIA "
        r"driver|unsupported display driver",
        "the driver and CUDA of this node are incompatible, or no GPU is visible there",
        look_at("nvidia-smi", "on the node, and compare its CUDA version with torch's"),
        Remedy(Action.INSPECT, Target.GPUS),
        fatal=True,
    ),
    cause(
        "gpu busy",
        r"devices? (is|are) busy or unavailable",
        "a process of another job holds the GPU",
        look_at("nvidia-smi", "on that node"),
        fatal=True,
    ),
    cause(
        "device number",
        r"invalid device ordinal",
        "a rank requests a GPU that is not visible on its node",
        Remedy(
            Action.INSPECT,
            Target.GPUS,
            detail="against the number of ranks and CUDA_VISIBLE_DEVICES",
        ),
        fatal=True,
    ),
)

PROGRAM = (
    cause(
        "not a number",
        r"(?i)\bloss\b[^|]{0,40} (is nan|is inf|was nan|was inf|became nan|became inf|turned nan"
        r"|turned to nan|returned nan|not finite|non-finite)\b"
        r"|\b(found|detected|encountered|unexpected result) (a |an )?(nan|infs?)\b"
        r"|\bnan (or inf )?(loss|values?|gradients?|grads?) (was |were |is |are )?(detected|found"
        r"|encountered)|\bnan (detected|found|encountered)\b|returned nan values in its",
        "",
        Remedy(Action.LOWER, Target.LEARNING_RATE),
        Remedy(Action.LOWER, Target.GRADIENT_CLIPPING, instead=True),
        do("go back to a checkpoint from before the NaN"),
        do("look at the samples of that step"),
        cause=EndCause.NOT_A_NUMBER,
        stream=Stream.ANY,
    ),
    cause(
        "loss scale",
        r"(?i)loss scale already at minimum|minimum loss scale (is |was )?reached"
        r"|loss[ _]scale .{0,40}below (the )?(minimum|threshold)",
        "gradients overflow at any loss scale",
        Remedy(Action.LOWER, Target.LEARNING_RATE),
        Remedy(Action.SET, Target.PRECISION, "bf16", instead=True),
        fatal=True,
        stream=Stream.ANY,
    ),
    warning(
        "overflow",
        r"OVERFLOW!|[Gg]radient overflow\.|[Oo]verflow.{0,60}(reducing|skipping)",
        "normal in the first steps of fp16, and occasionally later",
        stream=Stream.ANY,
    ),
    warning(
        "nothing to do",
        r"^nothing to do: train\.steps is \d+",
        "",
        Remedy(Action.RAISE, Target.STEPS, detail="to go on"),
        Remedy(Action.CHANGE, Target.CHECKPOINT, detail="to start from step 0", instead=True),
        stream=Stream.ANY,
    ),
    cause(
        "schedule of a checkpoint",
        r"OptimizerParamScheduler: class input value .* do not match",
        "the checkpoint was written for another number of steps or another schedule",
        Remedy(
            Action.ADD,
            Target.PROGRAM,
            "`--override-opt_param-scheduler`",
            "to train with the new values",
        ),
        Remedy(
            Action.ADD,
            Target.PROGRAM,
            "`--use-checkpoint-opt_param-scheduler`",
            "to train with the values of the checkpoint",
            instead=True,
        ),
        fatal=True,
    ),
    cause(
        "shared memory",
        r"(?i)(out of|insufficient|unable to (open|allocate|mmap|resize)) shared memory"
        r"|creating shared memory segment|/dev/shm.*No space|No space left on device.*(shm|nccl-)"
        r"|is killed by signal: Bus error",
        "/dev/shm of the node or container is too small",
        do("enlarge it"),
        replace(FEWER_WORKERS, instead=True),
        fatal=True,
    ),
    cause(
        "segmentation fault",
        r"(?i)\bSegmentation fault\b|\bsegfault at\b|\bSIGSEGV\b(?!.*exitcode)",
        "native code crashed",
        SHOW_STACK,
        do("compare the versions of the program's libraries with the driver"),
        fatal=True,
        cause=EndCause.RANK_SIGNAL,
    ),
    cause(
        "bus error",
        r"^(Fatal Python error: )?Bus error\b|: Bus error\b|\bSIGBUS\b",
        "a mapped file shrank, a disk or /dev/shm is full, or memory is faulty",
        look_at("df", "on that node"),
        fatal=True,
        cause=EndCause.RANK_SIGNAL,
    ),
    cause(
        "illegal instruction",
        r"\bIllegal instruction\b|\bSIGILL\b|\bFloating point exception\b|\bSIGFPE\b",
        "a library was built for another processor",
        Remedy(Action.CHANGE, Target.IMAGE),
        Remedy(Action.EXCLUDE, Target.NODE, "such nodes", instead=True),
        fatal=True,
        cause=EndCause.RANK_SIGNAL,
    ),
    cause(
        "quota",
        r"(?i)Disk quota exceeded|\bEDQUOT\b|\[Errno 122\]|quota .{0,30}exceeded",
        "the quota for bytes or for the number of files is used up",
        MAKE_ROOM,
        MOVE_LOGS,
        MOVE_CHECKPOINTS,
    ),
    cause(
        "disk full",
        r"No space left on device|\[Errno 28\]|\bENOSPC\b|(?i:\binodes? .{0,20}(exhausted"
        r"|full|used "
        r"up)|no free inodes)",
        "a disk, or /dev/shm, has no room or no inodes left (`df`, `df -i`)",
        MAKE_ROOM,
        MOVE_LOGS,
        MOVE_CHECKPOINTS,
    ),
    cause(
        "file not written",
        r"unexpected pos \d+ vs \d+|basic_ios::clear: iostream error|PytorchStreamWriter failed",
        "torch could not write a file; the disk may be full or its quota used up",
        look_at("df", "on that node"),
        MAKE_ROOM,
        MOVE_CHECKPOINTS,
    ),
    cause(
        "stale file handle",
        r"Stale (NFS )?file handle|\[Errno 116\]",
        "a file or mount was replaced on the file server",
        ask_admin("to mount it again on that node"),
    ),
    cause(
        "file system",
        r"Input/output error|\[Errno (5|30|107)\]|Read-only file system"
        r"|Transport endpoint is not connected|Cannot send after transport endpoint shutdown",
        "a file system of that node fails",
        look_at("dmesg", "and the mounts of that node"),
        replace(EXCLUDE, instead=True),
    ),
    cause(
        "no memory",
        r"DefaultCPUAllocator: |std::bad_alloc|^MemoryError\b|Cannot allocate memory"
        r"|\[Errno 12\]|numpy\.\S*MemoryError",
        "the memory of the node, or a limit on it, is used up",
        MORE_MEMORY,
        replace(FEWER_WORKERS, instead=True),
    ),
    cause(
        "limits",
        r"Too many open files|\[Errno 24\]|can't start new thread|pthread_create\(?\)? failed"
        r"|fork: .*Resource temporarily unavailable",
        "a limit of the node on files or processes is reached",
        look_at("ulimit -a", "in a job there"),
    ),
    cause(
        "data worker",
        r"DataLoader worker .*(exited unexpectedly|is killed by signal)",
        "a data worker died, most often because memory ran out",
        FEWER_WORKERS,
        replace(MORE_MEMORY, instead=True),
    ),
)

NETWORK = (
    cause(
        "port in use",
        r"Address already in use|\bEADDRINUSE\b|\[Errno 98\]|\bport \d+ (is )?already in use",
        "a process of an earlier job may hold the port",
        Remedy(Action.SET, Target.PORT, "auto"),
        Remedy(Action.SET, Target.MASTER_PORT, "a free port"),
        fatal=True,
    ),
    cause(
        "name lookup",
        r"Name or service not known|Temporary failure in name resolution|\bgaierror\b"
        r"|nodename nor servname|[Cc]ould not resolve host",
        "a host name cannot be resolved on that node",
        do("check /etc/hosts and DNS of that node"),
    ),
    cause(
        "no interface",
        r"[Nn]o socket interface found|Unable to find address for|No interfaces? found matching"
        r"|find a (network )?interface",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of that node",
        Remedy(Action.SET, Target.INTERFACE, "auto", "or to an interface shown by `ip -br a`"),
        Remedy(Action.SET, Target.INTERFACE_VARIABLES, "an interface shown by `ip -br a`"),
        fatal=True,
    ),
    cause(
        "infiniband",
        r"\bibv_\w{1,40}.{0,60}(fail|error|timed? ?out)|(?i:call to ibv_\w+ failed)"
        r"|NET/IB ?: ?.{0,40}([Gg]ot completion|async (fatal )?event|error|fail)"
        r"|mlx5.*(syndrome|fatal|Completion with error)",
        "the network card or its link fails",
        look_at("ibstat", "and `ibdev2netdev` there"),
        set_env("NCCL_IB_DISABLE=1", "to see whether the run goes on without InfiniBand"),
        EXCLUDE,
        stream=Stream.ANY,
    ),
    fallout(
        "collective timeout",
        r"collective operation timeout|before timing out|Timeout at NCCL work"
        r"|[Hh]eartbeat.{0,60}(timed out|timeout(?! \.\.))|operations have failed or timed out"
        r"|[Ff]light [Rr]ecorder|observed a timeout|\bTimed out waiting \d+ ?ms for (recv|send)"
        r"|monitored[Bb]arrier|^RuntimeError: Socket Timeout"
        r"|c10d::.{0,200}barrier.{0,200}timed out|Application timeout caused pair closure",
        "a rank did not join the collective",
        do("look at the rank that is not among those that timed out, and at its first error"),
        Remedy(Action.INSPECT, Target.STACKS, detail="while it hangs"),
    ),
    fallout(
        "aborted with others",
        r"(?i)(tak(ing|e) the entire process down)|taking the process down|ncclRemoteError"
        r"|remote process (has )?exited|NCCL communicator (was|has been) aborted"
        r"|attempting to dump debug info|\b(previous|earlier) errors?\b|due to another rank"
        r"|\bmisses rank \d+"
        r"|NCCL operation.*was aborted|\baborting (all|the) (processes|communicators)",
        "another rank failed first",
    ),
    fallout(
        "connection lost",
        r"Connection (closed|reset) by( remote)? peer|\b[Bb]roken ?[Pp]ipe(Error)?\b"
        r"|(sendBytes|recvBytes|recvValue|recvVector).{0,40}failed|failed to recv, got 0 bytes"
        r"|[Ff]ailed to (check|get|set).{0,60}TCPStore|socket (was )?closed by peer"
        r"|Connection was (likely )?closed",
        "the process at the other end has exited",
        do("look at the first error of that process"),
    ),
    fallout(
        "end of a stream",
        r"^EOFError:?$",
        "",
        do("see the frame above this line: another process exited, or a file ends too early"),
    ),
    cause(
        "no rank",
        r"env:// rendezvous: environment variable \w+ expected, but not set",
        "the program asks for torchrun's variables, and was started without them",
        Remedy(Action.SET, Target.LAUNCH, "torchrun"),
    ),
    cause(
        "rendezvous",
        r"Rendezvous(Connection|Timeout|Closed|State)?Error\b|waiting for clients|clients joined"
        r"|DistStoreError|DistNetworkError|client socket has (timed out|failed)"
        r"|wait timeout after \d+ ?ms|connectFullMesh|full mesh"
        r"|gloo.{0,80}connect.{0,20}(fail|time)",
        "the ranks could not connect to each other",
        do("check that every node started and can reach the address and port of rank 0"),
        Remedy(Action.INSPECT, Target.LOGS, detail="for a node that writes nothing"),
    ),
    cause(
        "no nccl",
        r"Distributed package doesn't have NCCL|ProcessGroupNCCL is only supported with GPUs",
        "the program asks for NCCL, which needs a GPU and a torch that was built with CUDA",
        do("choose the backend gloo where there is no GPU, or install torch with CUDA"),
        fatal=True,
    ),
    cause(
        "nccl",
        r"unhandled system error|unhandled cuda error|ncclSystemError|ncclUnhandledCudaError"
        r"|ncclInternalError|ncclInvalidUsage|NCCL error(?! *handling)|NCCL failure"
        r"|invalid usage \(run with NCCL_DEBUG",
        "often caused by the interface, /dev/shm or a GPU of that node",
        set_env("NCCL_DEBUG=INFO", "and look at the first NCCL WARN"),
    ),
    cause(
        "connection refused",
        r"Connection refused|No route to host|Network is unreachable|Connection timed out"
        r"|\[Errno (110|111|113)\]",
        "a node cannot be reached: a firewall, a wrong interface, or the process there is gone",
    ),
    warning(
        "nccl warning",
        r"\bNCCL WARN\b",
        "a hint from NCCL",
        stream=Stream.ANY,
    ),
)

ENDS = (
    fallout(
        "launcher summary",
        r"ChildFailedError|torch\.distributed\.elastic|torch/distributed/elastic"
        r"|\bexitcode\s*: -?\d"
        r"|first observed failure|SignalException|Killing subprocess \d|exits with return code"
        r"|CalledProcessError|Sending process \d+ closing signal|workers failed"
        r"|\bSignal \d+ \(SIG[A-Z]+\) received|multiprocessing\.errors",
        "a launcher sums up",
        do("look for the first error of the rank that this line names"),
        stream=Stream.ANY,
    ),
    fallout(
        "killed",
        r"^(Killed|Terminated)$|: line \d+: +\d+ (Killed|Terminated)\b"
        r"|killed by signal: (Terminated"
        r"|Killed)|^\S*bash: .*: (Killed|Terminated)",
        "somebody sent a signal; only a line about memory or the scheduler says who",
    ),
    fallout(
        "aborted as it ended",
        r"terminate called without an active exception",
        "a thread of a library, such as gloo's, was still at work when Python ended, often after "
        "all work was done",
        do("end the program with torch.distributed.destroy_process_group(), if it does not yet"),
        do("if it does, something may still refer to the group; the last checkpoint may be whole"),
        fatal=True,
    ),
    fallout(
        "aborted",
        r"Fatal Python error: Aborted|\bAborted \(core dumped\)|^Aborted$|\bSIGABRT\b"
        r"|terminate called after|: Aborted$",
        "a library aborted: the line before says why",
        fatal=True,
    ),
    fallout(
        "interrupted",
        r"^KeyboardInterrupt\b",
        cause=EndCause.RANK_SIGNAL,
    ),
)

_NUMBER_ALONE = r"(?!:\s*[-+]?[\d.]+(e[-+]?\d+)?%?\s*($|[,|;]))"
"""Excludes a metric, such as `MeanSquaredError: 0.012`."""

PYTHON = (
    cause(
        "import",
        r"^(ModuleNotFoundError|ImportError)\b|cannot open shared object file|undefined symbol: "
        r"|version `GLIBC\w{0,20}[\d.]{1,20}' not found|No module named \S+$",
        "the ranks' Python lacks a module or library",
        Remedy(Action.INSTALL, value="it there"),
        Remedy(Action.CHANGE, Target.PYTHON, detail="(`vjob run --python`)", instead=True),
        Remedy(Action.CHANGE, Target.IMAGE, when="they run in a container", instead=True),
        fatal=True,
    ),
    cause(
        "no input",
        r"^EOFError: EOF when reading a line$",
        "the program asks for input, and a rank has no standard input",
        Remedy(Action.ADD, Target.PROGRAM, "the answer", "and do not call input()"),
        cause=EndCause.RANK_EXCEPTION,
        fatal=True,
    ),
    cause(
        "debugger",
        r"^(bdb\.)?BdbQuit$",
        "the program stops in a debugger, and a rank has no standard input",
        do("remove breakpoint() and pdb.set_trace()"),
        cause=EndCause.RANK_EXCEPTION,
        fatal=True,
    ),
    cause(
        "cut file",
        r"^EOFError: (Ran out of input|Compressed file ended before)",
        "a file ends too early: it is empty, cut off, or still being written",
        do("find the file in the traceback, and create it again"),
        cause=EndCause.RANK_EXCEPTION,
        fatal=True,
    ),
    cause(
        "folder taken",
        r"^(\w+\.)*FolderTaken\b",
        "another job saves its checkpoints in the same folder",
        Remedy(Action.CHANGE, Target.CHECKPOINT, detail="so that each job has a folder of its own"),
        cause=EndCause.RANK_EXCEPTION,
        fatal=True,
    ),
    cause(
        "checkpoint",
        r"in loading state_dict|key\(s\) in state_dict|PytorchStreamReader failed"
        r"|^(\w+\.)*(Damaged|Foreign|No)Checkpoint\b|^(\w+\.)*CheckpointError\b"
        r"|(?i:\bcheckpoints?\b.{0,60}(does not match|do not match|mismatch|corrupt))",
        "the checkpoint is of another model or is damaged",
        Remedy(Action.CHANGE, Target.CHECKPOINT),
        Remedy(Action.INSPECT, detail="remove the newest checkpoint", instead=True),
    ),
    cause(
        "shapes",
        r"size mismatch for|shapes cannot be multiplied"
        r"|[Ss]izes? of tensors? \w{0,20} ?.{0,200}must match"
        r"|size of tensor a|shape '\[.*\]' is invalid|Expected input batch_size"
        r"|could not broadcast input array",
        "sizes of the model, data and layout do not match each other or the checkpoint",
    ),
    cause(
        "no such file",
        r"^FileNotFoundError\b|: No such file or directory\b|can't open file '",
        "a path is missing on that node",
        do("check its spelling, and that it exists on the rank's machine"),
        Remedy(Action.ADD, Target.MOUNTS, when="the ranks run in a container"),
    ),
    cause(
        "permission",
        r"^PermissionError\b|: Permission denied\b",
        "the user of the job may not use that path on that node",
    ),
    cause(
        "command not found",
        r"\b(ba|z|da)?sh: .*: (command )?not found$|: command not found$|^env: .*: No such file",
        "that program is not on the PATH of the ranks",
        do("give its full path"),
        Remedy(Action.CHANGE, Target.IMAGE, instead=True),
        fatal=True,
    ),
    fallout(
        "module not found",
        r"^Lmod has detected the following error|\bUnable to locate a modulefile for\b",
        "that module cannot be loaded on that node",
        look_at("module spider"),
    ),
    cause(
        "arguments",
        r"^\S+: error: (unrecognized arguments|the following arguments|argument "
        r"|ambiguous|invalid)",
        "the program does not accept its arguments",
        Remedy(Action.INSPECT, Target.PROGRAM),
        fatal=True,
    ),
    cause(
        REFUSED_BY_VJOB,
        r"^vjob agent: (?!the attempt was (?:asked|told) to stop)|^launch: cannot go on",
        "",
        Remedy(Action.RESUBMIT, detail="after you have corrected what the message names"),
        fatal=True,
        stream=Stream.ANY,
    ),
    cause(
        "cuda error",
        r"\b(CUDA|HIP) error: |\bCUDA (driver )?failure\b|CUBLAS_STATUS_[A-Z_]+"
        r"|CUDNN_STATUS_[A-Z_]+"
        r"|cuDNN error: |^(\w+\.)*AcceleratorError\b",
        "",
        SHOW_KERNEL,
        EXCLUDE_IF_ALONE,
        fatal=True,
    ),
    cause(
        "missing key",
        r"^KeyError: '(?!(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)'|MASTER_)[A-Z][A-Z0-9_]+'$",
        "",
        Remedy(
            Action.ADD,
            Target.PASSED_ENVIRONMENT,
            "the name",
            when="the key is an environment variable",
        ),
        cause=EndCause.RANK_EXCEPTION,
        within_s=TEARDOWN_S,
    ),
    cause(
        PYTHON_EXCEPTION,
        r"^(?:[A-Za-z_]\w{0,60}\.){0,12}(?:(?:ArithmeticError|AssertionError|AttributeError|Exception"
        r"|IndexError|KeyError|NotImplementedError|OSError|OutOfResources|OverflowError|RuntimeError|TypeError"
        r"|ValueError|ZeroDivisionError)(?:: .*)?$|[A-Z]\w{0,80}(?:Error|Exception)"
        rf"{_NUMBER_ALONE}(?:: .*)?$)",
        cause=EndCause.RANK_EXCEPTION,
        within_s=TEARDOWN_S,
    ),
    cause(
        "fatal error",
        r"^Fatal Python error: |^(FATAL|fatal)( error)?: ",
    ),
)

LOGGED = (
    ignore(
        "no error",
        r"(?i)\b(no|0|zero|without( any)?) (errors?|exceptions?|failures?)\b"
        r"|\b(errors?|failures?|exceptions?)[\"']? ?[:=] ?(0|none|null|false)\b(?!\.\d)"
        r"|\bDetected 0 oom",
    ),
    warning(
        "logged error",
        r"^(ERROR|CRITICAL|FATAL)\b|\[(ERROR|CRITICAL|FATAL)\]|- (ERROR|CRITICAL) -"
        r"|(^|\s)level=(error|fatal)\b|^(?i:error): \S|\b\w+: error: \S",
        "the line is logged as an error; the training may continue",
    ),
)

ROWS = (
    *NEVER,
    *QUOTES,
    *WARNED,
    *CUDA,
    *PROGRAM,
    *NETWORK,
    *ENDS,
    *PYTHON,
    *LOGGED,
)
"""All rows in order. The first match counts, so rows are sorted from strong to weak evidence and
from specific to general."""
