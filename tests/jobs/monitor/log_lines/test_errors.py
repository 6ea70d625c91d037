"""The table of known lines: what tools print, and what merely looks like it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.facts.catalogue.test_containers import MESSAGES
from varuna_core.facts.catalogue.known_line import KnownLine, Proof, Scope
from varuna_core.facts.remedy import Context, explain
from vjob.jobs.monitor.log_lines.errors import (
    _NO_DIGITS,
    _scope,
    classify_line,
    explain_parts,
    find_literals,
    find_row,
    first_root,
    load_table,
    merge_same,
    strip_tags,
)
from vjob.jobs.monitor.model.snapshot import Line

ROWS = load_table().rows


def is_told(row: KnownLine) -> bool:
    return row.proof is not Proof.IGNORE


WATCHDOG = (
    "[rank3]:[E1121 12:00:00.000000000 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1042, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600042 milliseconds before timing out."
)
ROOTS = {
    "xid": "[12345.678] NVRM: Xid (PCI:0000:3b:00): 119, pid=2193, Timeout waiting for RPC",
    "off the bus": "NVRM: Xid (PCI:0000:3b:00): 79, pid=2193, GPU has fallen off the bus.",
    "program xid": "NVRM: Xid (PCI:0000:3b:00): 31, pid=411, name=python, Ch 00000008, MMU Fault",
    "ecc": "3: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "nvlink": "NVRM: Xid (PCI:0000:3b:00): 74, pid='<unknown>', NVLink: fatal error detected",
    "pcie": "pcieport 0000:17:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction",
    "overheated": "GPU 3 of n061: thermal shutdown",
    "cuda out of memory": (
        "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 "
        "has a total capacity of 22.06 GiB of which 1.21 GiB is free."
    ),
    "device-side assert": (
        "../aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [73,0,0], "
        "thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    ),
    "illegal memory access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "no kernel image": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ),
    "torch without CUDA": "AssertionError: Torch not compiled with CUDA enabled",
    "driver": "RuntimeError: Found no NVIDIA driver on your system. Please check that you have",
    "gpu busy": "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    "device number": "RuntimeError: CUDA error: invalid device ordinal",
    "host out of memory": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks "
        "have been OOM Killed."
    ),
    "time limit": (
        "slurmstepd: error: *** JOB 4711 ON n060 CANCELLED AT 2024-05-01T10:00:00 DUE TO TIME "
        "LIMIT ***"
    ),
    "preempted": (
        "slurmstepd: error: *** JOB 4711 ON n060 CANCELLED AT 2024-05-01T10:00:00 DUE TO "
        "PREEMPTION ***"
    ),
    "node failure": "srun: error: Node failure on n061",
    "requeued": (
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2024-05-01T10:00:00 DUE TO JOB "
        "REQUEUE ***"
    ),
    "cancelled": "slurmstepd: error: *** JOB 4711 ON n060 CANCELLED AT 2024-05-01T10:00:00 ***",
    "launch failed": ("slurmstepd: error: execve(): /opt/run.sh: No such file or directory"),
    "not a number": (
        "[rank3]: AssertionError: Rank 3: found NaN in local grad norm in backward pass"
    ),
    "loss scale": (
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. "
        "Exiting run."
    ),
    "schedule of a checkpoint": (
        "[rank0]: AssertionError: OptimizerParamScheduler: class input value 40 and "
        "checkpointvalue 16 for total number of iterations do not match"
    ),
    "shared memory": (
        "RuntimeError: DataLoader worker (pid 2193) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory."
    ),
    "segmentation fault": "7: Fatal Python error: Segmentation fault",
    "bus error": "Fatal Python error: Bus error",
    "illegal instruction": "line 3: 88 Illegal instruction (core dumped) python train.py",
    "quota": "OSError: [Errno 122] Disk quota exceeded: '/home/a/ckpt/3.pt'",
    "disk full": "OSError: [Errno 28] No space left on device",
    "file not written": "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos "
    "1280 vs 1172",
    "stale file handle": "OSError: [Errno 116] Stale file handle: '/data/x.bin'",
    "file system": "OSError: [Errno 5] Input/output error",
    "no memory": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 8589934592 bytes."
    ),
    "limits": "OSError: [Errno 24] Too many open files",
    "port in use": (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE, message: address "
        "already in use"
    ),
    "name lookup": "socket.gaierror: [Errno -2] Name or service not known",
    "no interface": (
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:83] ifa "
        "!= nullptr. Unable to find address for: ib7"
    ),
    "infiniband": (
        "n061:2193:2201 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.3<42313> with status=12 opcode=0 len=0 vendor err 129"
    ),
    "no rank": (
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
        "variable RANK expected, but not set"
    ),
    "rendezvous": (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 15/16 "
        "clients joined."
    ),
    "nccl": (
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCL.cpp"
        ":268, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5"
    ),
    "connection refused": "ConnectionRefusedError: [Errno 111] Connection refused",
    "import": "[rank0]: ModuleNotFoundError: No module named 'flash_attn'",
    "checkpoint": "RuntimeError: Error(s) in loading state_dict for GPTModel:",
    "shapes": ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x1600 and 1024x4096)"),
    "folder taken": "varuna_core.checkpoint.format.errors.FolderTaken: job 3e221f4d has saved into",
    "no such file": "FileNotFoundError: [Errno 2] No such file or directory: 'data/x.idx'",
    "permission": "PermissionError: [Errno 13] Permission denied: '/data/x.bin'",
    "command not found": "/var/spool/slurmd/job12/slurm_script: line 5: bash: ptrain: "
    "command not found",
    "arguments": "pretrain_gpt.py: error: unrecognized arguments: --layers 3",
    "refused by vjob": "vjob agent: every port from 61000 to 65499 is in use on this host",
    "cuda error": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x",
    "data worker": "RuntimeError: DataLoader worker (pid(s) 99) exited unexpectedly",
    "missing key": "KeyError: 'WANDB_API_KEY'",
    "python exception": "12: varuna_core.runtime.split.cut.LeakError: mask goes around the cut",
    "fatal error": "fatal: not a git repository",
    "no nccl": "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "no input": "EOFError: EOF when reading a line",
    "debugger": "bdb.BdbQuit",
    "cut file": "EOFError: Ran out of input",
}
OTHERS = {
    "module not found": "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'x'",
    "ended after a node failure": "slurmstepd-b3: error: *** JOB 21 ON b3 DUE TO NODE FAILURE",
    "xid cleanup": "NVRM: Xid (PCI:0000:3b:00): 45, pid=2193, Ch 00000010",
    "link notice": "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13",
    "xid notice": "NVRM: Xid (PCI:0000:3b:00): 63, pid=9, Row Remapper: New row marked",
    "hot": "CPU3: Core temperature above threshold, cpu clock throttled",
    "overflow": (
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    ),
    "file server": "nfs: server fs1 not responding, still trying",
    "collective timeout": WATCHDOG,
    "aborted with others": (
        "[rank3]:[E1121 12:00:01 ProcessGroupNCCL.cpp:1153] [Rank 3] To avoid data inconsistency, "
        "we are taking the entire process down."
    ),
    "end of a stream": "EOFError",
    "connection lost": (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [10.77.0.3]:41234"
    ),
    "another rank's error": (
        "1: [rank1]: varuna_core.failure.RankFailed: rank 1 (stage 0, replica 1) stops: rank 5 "
        "(stage 1, replica 1): OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ),
    "attempt ended": "n061: stopping the attempt: rank 3 on n061 was ended by SIGKILL",
    "nothing to do": "0: nothing to do: train.steps is 1000, and all are done",
    "nccl warning": "n061:2193:2201 [1] NCCL WARN Cuda graphs are not supported",
    "launcher summary": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "srun ends the step": "srun: error: n061: tasks 4-7: Killed",
    "killed": "Killed",
    "aborted as it ended": "terminate called without an active exception",
    "aborted": "terminate called after throwing an instance of 'c10::DistBackendError'",
    "interrupted": "KeyboardInterrupt",
    "logged error": "2024-05-01 10:00:00,123 ERROR wandb: network down",
}
VARIANTS = (
    # Slurm 18 to 25.05
    (
        "host out of memory",
        "slurmstepd: error: Step 4711.0 exceeded memory limit (9 > 8), being killed",
    ),
    (
        "host out of memory",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=10.0 cgroup. Some of your "
        "processes may have been killed by the cgroup out-of-memory handler.",
    ),
    ("host out of memory", "Out of memory: Killed process 2193 (python) total-vm:9kB"),
    (
        "srun ends the step",
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2025-05-01T10:00:00 DUE to SIGNAL "
        "Terminated ***",
    ),
    (
        "cancelled",
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2025-05-01T10:00:00 DUE to SIGNAL "
        "Terminated ***",
    ),
    (
        "time limit",
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2024-05-01T10:00:00 DUE TO "
        "TIME LIMIT ***",
    ),
    ("srun ends the step", "srun: error: n060: task 3: Killed"),
    ("launch failed", "srun: error: Unable to create step for job 12: Job step already completing"),
    ("segmentation fault", "srun: error: n061: task 7: Segmentation fault (core dumped)"),
    ("attempt ended", "n061: stopping the attempt: rank 3 on n061 exited 1: ValueError: no"),
    ("attempt ended", "attempt 0: code 1: rank 3 on n061 exited 1: No module named 'x'"),
    # torch
    ("cuda out of memory", "ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'"),
    ("cuda out of memory", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate"),
    ("torch without CUDA", "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'"),
    ("collective timeout", "RuntimeError: Socket Timeout"),
    ("rendezvous", "RuntimeError: Gloo connectFullMesh failed with [/gloo/pair.cc:144] no error"),
    (
        "collective timeout",
        "RuntimeError: [pair.cc:81] Timed out waiting 1800000ms for recv operation",
    ),
    ("python exception", "triton.runtime.errors.OutOfResources: out of resource: shared memory"),
    ("python exception", "KeyError: 5"),
    ("python exception", "KeyError: 'LOCAL_RANK'"),
    ("python exception", "AssertionError"),
    ("checkpoint", "RuntimeError: PytorchStreamReader failed reading zip archive: not found"),
    ("not a number", "Loss is nan, stopping training"),
    (
        "not a number",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
    ),
    (
        "import",
        "python: error while loading: libcudnn.so.9: cannot open shared object file: No such",
    ),
    (
        "no such file",
        "python: can't open file '/data/train.py': [Errno 2] No such file or directory",
    ),
)
NOTHING = (
    "[W1129 06:00:00.123456789 socket.cpp:759] [c10d] The client socket has failed to connect to "
    "[localhost]:29500 (errno: 97 - Address family not supported by protocol).",
    "[rank0]:[W1129 06:00:00.123 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
    "destroy_process_group() was not called before program exit, which can leak resources.",
    "",
    " iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration "
    "(ms): 1423.8 | lm loss: 1.017721E+01 | loss scale: 262144.0 | grad norm: 16.666 | number of "
    "skipped iterations:   0 | number of nan iterations:   0 |",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "3: /opt/torch/nn/x.py:12: UserWarning: CUDA initialization: The NVIDIA driver on your system "
    "is too old",
    "x.py:1: FutureWarning: torch.cuda.amp raises RuntimeError: this will be an Error",
    "DeprecationWarning: use of ValueError: is out",
    "  warnings.warn(",
    "    raise RuntimeError('CUDA out of memory')",
    "error: 0",
    "test finished, 0 errors",
    "errors=0 failures: 0",
    "grad_error: 0.01",
    "MeanSquaredError: 0.0123",
    "epoch 3 | MaxAbsError: 1.2e-3, MeanError: 4",
    "the reconstruction error is small",
    "Recovered from NCCL error, going on",
    "Connection refused, retrying in 5 s",
    "This may be caused by a CUDA out of memory error on another rank",
    "check_for_nan_in_loss_and_grad .................. True",
    "  exit_on_missing_checkpoint ...................... False",
    "NCCL_ASYNC_ERROR_HANDLING=1",
    "  inprocess_heartbeat_timeout ..................... 60",
    "Traceback (most recent call last):",
    "slurmstepd: error: Detected 0 oom_kill events",
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    "[before the start of training step] datetime: 2023-06-14 16:08:12 ",
    "> loading checkpoint from data/ckpt at iteration 20",
    "resumed from iteration 40 in ckpt",
    "attempt 0: code 0: all 4 ranks exited 0",
    "group slave of attempt 0: code 0",
)


@pytest.mark.parametrize(("name", "text"), [*ROOTS.items(), *OTHERS.items(), *VARIANTS])
def test_known_lines_are_recognised(name: str, text: str) -> None:
    assert classify_line(text) == name


def test_every_row_has_a_message() -> None:
    told = {row.name for row in ROWS if is_told(row) and row.scope is not Scope.CONTAINER}
    assert told == {*ROOTS, *OTHERS}
    proofs = {row.name: row.proof for row in ROWS if row.scope is not Scope.CONTAINER}
    assert {proofs[name] for name in ROOTS} == {Proof.CAUSE}
    assert {proofs[name] for name in OTHERS} == {Proof.FALLOUT, Proof.WARNING}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("n1: stopping the attempt: rank 1 on n1 exited 3", "rank 1 ended with 3 and printed no"),
        ("attempt 0: code 3: rank 1 on n1 exited 3\n", "rank 1 ended with 3 and printed no"),
        ("n1: stopping the attempt: rank 1 on n1 exited 1: ValueError: no", ""),
        ("n1: stopping the attempt: rank 1 on n1 was ended by SIGKILL", ""),
        ("n1: stopping the attempt: SIGTERM from the scheduler, seen first on n1", ""),
        ("RankFailed: rank 1 stops: rank 5: OutOfMemoryError: no", "another rank failed first"),
    ],
)
def test_only_a_rank_that_quotes_another_is_said_to_have_failed_later(
    text: str, remedy: str
) -> None:
    """`sys.exit(3)`, a kill and the time limit were explained by "another rank failed first"."""
    parts = explain_parts(Line(text=text, kind=classify_line(text) or ""))
    said = explain(*parts, Context.CONF)
    assert said.startswith(remedy) and bool(said) == bool(remedy)


@pytest.mark.parametrize("text", NOTHING)
def test_lines_like_any_other_are_left_alone(text: str) -> None:
    assert classify_line(text) is None


@pytest.mark.parametrize(
    "tag", ["3: ", "[rank3]: ", "[1,3]<stderr>:", "2024-05-01 10:00:00,1 ", ""]
)
def test_tags_before_a_line_change_nothing(tag: str) -> None:
    assert strip_tags(f"{tag}ValueError: no") == "ValueError: no"
    assert classify_line(f"{tag}ValueError: no") == "python exception"


@pytest.mark.parametrize(("trouble", "text"), MESSAGES)
def test_what_container_runtimes_say_is_a_root(trouble: str, text: str) -> None:
    names = [classify_line(line) for line in text.splitlines()]
    rows = [find_row(name) for name in names if name]
    assert any(row is not None and row.proof is Proof.CAUSE for row in rows), (trouble, names)


@given(st.text())
def test_any_text_has_an_answer(text: str) -> None:
    name = classify_line(text)
    assert name is None or find_row(name) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_pattern_asks_for_a_literal(row: KnownLine) -> None:
    assert all(len(literal) > 2 for literal in find_literals(row.pattern)), row.name


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        (r"(cp|tar): .*No space left|quota", {"no space left", "quota"}),
        (r"(?:a cat|a dog)s? (?!never)mat", {"a cat", "a dog"}),
        (r"colou?r", {"colo"}),
        (r"x(yz)?", {"x"}),
        (r"(one|two+|[3-9]) things", {" things"}),
        (r"\d+", {""}),
        (r"(?i:BIG) error 12", {" error "}),
    ],
)
def test_literals_are_what_must_be_there(pattern: str, literals: set[str]) -> None:
    assert find_literals(pattern) == literals


@given(st.data(), st.sampled_from(ROWS))
def test_what_a_pattern_fits_has_one_of_its_literals(data: st.DataObject, row: KnownLine) -> None:
    fits = st.from_regex(re.compile(_scope(row.pattern)))
    low = data.draw(fits).translate(_NO_DIGITS).lower()
    assert any(literal in low for literal in find_literals(_scope(row.pattern)))


def line(text: str, **facts: object) -> Line:
    return Line(text=text, kind=classify_line(text) or "", **facts)  # type: ignore[arg-type]


def test_the_root_comes_before_the_noise_that_was_first_in_the_file() -> None:
    lines = [
        line(WATCHDOG, rank=3, node="n061"),
        line("[rank5]: torch.OutOfMemoryError: CUDA out of memory.", rank=5, node="n062"),
        line("RuntimeError: Connection closed by peer", rank=2, node="n060"),
    ]
    root = first_root(lines)
    assert root is not None and (root.rank, root.node) == (5, "n062")


def test_noise_is_the_root_where_nothing_else_is() -> None:
    lines = [line("Killed", rank=0), line("loss is fine")]
    root = first_root(lines)
    assert root is not None and root.kind == "killed"
    assert first_root([line("loss is fine")]) is None
    assert first_root([]) is None


def test_times_decide_and_a_line_without_one_is_as_old_as_its_neighbour() -> None:
    late = line("ValueError: late", at=20.0, node="a", file="a.err", order=5)
    lines = [
        late,
        line("ERROR start", at=5.0, node="b", file="b.err", order=1),
        line("KeyError: 'early'", node="b", file="b.err", order=2),
    ]
    root = first_root(lines)
    assert root is not None and root.text == "KeyError: 'early'"
    assert first_root(lines[:1]) == late


def test_the_same_error_of_all_ranks_is_one() -> None:
    lines = [
        line(f"[rank{rank}]: ImportError: libx.so.{rank % 1}: no", rank=rank, num_same=2)
        for rank in range(8)
    ]
    merged = merge_same(lines)
    assert [(item.rank, item.num_same) for item in merged] == [(0, 16)]
    root = first_root(lines)
    assert root is not None and root.num_same == 16
