"""What ranks print and are given: nothing is lost, mixed up, or changed on the way."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import read_rank
from tests.varuna_core.agent.local_run import Stage, make_group, make_plan, wait_until
from varuna_core.records.logs.rank_output import locate_output
from varuna_core.records.nodes import read_report
from varuna_core.records.plan import Prediction
from varuna_core.records.record import read_events
from vjob.jobs.monitor.readers.gpu_logs import GpuSamples

MakeStage = Callable[..., Stage]

AWKWARD = (
    "two words",
    'it\'s "quoted"',
    "$(touch /tmp/no) `id` $HOME",
    "line one\nline two\n",
    "모델 ü \U0001f600",
    "",
    "*",
    "\\ back\\slash",
    "{name}",
    "--",
)
REPEAT = """
import json, os, sys
with open(os.environ["SINK"], "w") as sink:
    json.dump([sys.argv[1:], dict(os.environ)], sink)
"""
TALK = """
import os, sys
rank, out = os.environ["RANK"], sys.stdout
for number in range(50_000):
    out.write(f"{rank} says {number} {'x' * (number % 90)}\\n")
"""
FLOOD = """
import sys
block = b"y" * 8191 + b"\\n"
for _ in range(2000):
    sys.stdout.buffer.write(block)
sys.stdout.flush()
print("done", file=sys.stderr, flush=True)
sys.exit(5)
"""

NVIDIA_SMI = """\
#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA A10 (UUID: GPU-1)"; echo "GPU 1: NVIDIA A10 (UUID: GPU-2)" ;;
  *) echo "0, NVIDIA A10, 49, 3, 512, 22731, 15.61"; echo "1, NVIDIA A10, 50, 0, 0, 22731, 9" ;;
esac
"""


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "POSIX"])
def test_words_and_values_reach_the_program_unchanged(make_stage: MakeStage, locale: str) -> None:
    values = {f"AWKWARD_{number}": value for number, value in enumerate(AWKWARD)}
    plan = make_plan(command=(sys.executable, "-X", "utf8", "-c", REPEAT, *AWKWARD), env=values)
    stage = make_stage(plan)
    sink = stage.run.path / "sink.json"
    stage = make_stage(replace(plan, env={**values, "SINK": str(sink)}), stage.run.path)
    stage.open()
    stage.start(0, LC_ALL=locale)
    assert stage.wait() == [0], stage.log("n0", "err")
    words, env = json.loads(sink.read_text())
    assert tuple(words) == AWKWARD
    assert {name: env[name] for name in values} == values


def test_lines_of_two_busy_ranks_stay_whole(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(make_group("a", 1, 2), command=(sys.executable, "-c", TALK)))
    codes, _ = stage.play()
    assert codes == [0]
    lines = stage.log("n0", "out").splitlines()
    assert len(lines) == 100_000
    for rank in ("0", "1"):
        wanted = [f"{rank}: {rank} says {n} {'x' * (n % 90)}" for n in range(50_000)]
        assert [line for line in lines if line.startswith(f"{rank}: ")] == wanted
        own = read_rank(stage.run, int(rank)).splitlines()
        assert own == [line[3:] for line in wanted]


def test_what_is_no_text_passes_as_it_is(make_stage: MakeStage) -> None:
    """But for what a carriage return overwrote, and an end that the last line gets."""
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 3)"
    stage = make_stage(make_plan(command=(sys.executable, "-c", code)))
    stage.play()
    before, after = bytes(range(10)), bytes(range(14, 256))
    seen = before + b"\n" + after
    output = locate_output(stage.attempt, stage.plan, 0, "out")
    assert output.read() == seen[:11] + 2 * (after + seen[:11]) + after + b"\n"


def test_a_line_without_an_end_is_shown_while_the_rank_lives(make_stage: MakeStage) -> None:
    code = "import sys; sys.stdout.write('Password: '); sys.stdout.flush(); sys.stdin.read() or "
    code += "__import__('time').sleep(60)"
    stage = make_stage(make_plan(command=(sys.executable, "-c", code)))
    stage.open()
    stage.start_all()
    stage.wait_for_log("n0", "out", "0: Password: \n")


def test_the_sampler_says_that_there_is_no_gpu(make_stage: MakeStage) -> None:
    stage = make_stage(make_plan(command=("sleep", "60")))
    stage.open()
    stage.start_all()
    wait_until(lambda: stage.log("n0", "gpu.jsonl").count("\n") >= 3, "two samples")
    note, _, sample = map(json.loads, stage.log("n0", "gpu.jsonl").splitlines()[:3])
    assert note["note"] == "no GPU readings (the plan has no GPUs here): processors and memory only"
    assert sample["memory_total_mb"] > 0 and sample["cpu_percent"] is not None
    samples = GpuSamples(stage.attempt.node_log("n0", "gpu.jsonl"))
    samples.poll()
    (line,) = samples.last_lines(3)
    assert re.match(r"\[cpu\] \d+ processors +\| +(\d+|\?\?) % \|", line)
    assert not stage.attempt.node_log("n0", "gpu").exists()


def test_gpus_are_counted_and_sampled_through_nvidia_smi(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    stage = make_stage(make_plan(make_group("a", 1, 1, gpus=2), command=("sleep", "60")))
    stage.open()
    stage.start(0, PATH=f"{smi.parent}:{os.environ['PATH']}")
    stage.wait_for_log("n0", "gpu.jsonl", '"index": 1')
    samples = GpuSamples(stage.attempt.node_log("n0", "gpu.jsonl"))
    samples.poll()
    assert samples.last_lines(9) == (
        "[0] NVIDIA A10       | 49'C,   3 % |   512 / 22731 MB |",
        "[1] NVIDIA A10       | 50'C,   0 % |     0 / 22731 MB |",
    )
    report = read_report(stage.attempt, 0)
    assert report is not None and report.gpus == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo 'Failed to initialize NVML: Driver mismatch'; exit 18",
         {"gpus": [], "gpus_not_known": "nvidia-smi: Failed to initialize NVML: Driver mismatch"}),
        ("echo '1, A10, 1, 2, 3, 4, 5'; echo 'GPU 0: GPU is lost'; exit 15", {"gpus_lost": [0]}),
    ],
)  # fmt: skip
def test_the_sample_log_says_what_is_not_known_of_gpus(
    body: str, expected: dict[str, object], make_stage: MakeStage, tmp_path: Path
) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    listed = "case $1 in -L) echo 'GPU 0: A10'; echo 'GPU 1: A10'; exit;; esac"
    smi.write_text(f"#!/bin/sh\n{listed}\n{body}\n")
    smi.chmod(0o755)
    stage = make_stage(make_plan(make_group("a", 1, 1, gpus=2), command=("sleep", "60")))
    stage.open()
    stage.start(0, PATH=f"{smi.parent}:{os.environ['PATH']}")
    stage.wait_for_log("n0", "gpu.jsonl", '"memory_total_mb"')
    *notes, sample = map(json.loads, stage.log("n0", "gpu.jsonl").splitlines()[:2])
    found = sample if "gpus" in sample else notes[0]
    assert {key: found.get(key) for key in expected} == expected
    assert found["memory_total_mb"] > 0
    if reason := expected.get("gpus_not_known"):
        assert notes[0]["note"] == f"GPUs not read: {reason}"


def test_the_environment_of_a_rank(make_stage: MakeStage, tmp_path: Path) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    groups = (make_group("big", 1, 2, cpus=8), make_group("small", 1, 2, env={"WHO": "small"}))
    plan = make_plan(
        *groups,
        command=(sys.executable, "-c", code),
        env={"WHO": "all", "RANK": "99"},
        stage_map="0;1;",
        pipeline=2,
        tensor=2,
        partition="4-4",
        prediction=Prediction(costs={"forward": (0.5, 0.25)}),
    )
    stage = make_stage(plan)
    assert stage.play()[0] == [0, 0]
    found = [json.loads(read_rank(stage.run, rank)) for rank in range(4)]
    port = found[0]["MASTER_PORT"]  # another than was planned where that is in use
    last = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VJOB_RUN": str(stage.run.path),
        "VJOB_RUN_ID": "demo-1",
        "VJOB_ATTEMPT": "0",
        "VJOB_NODE": "n1",
        "VJOB_GROUP": "small",
        "VJOB_STAGE": "1",
        "VJOB_REPLICA": "0",
        "VJOB_TENSOR_RANK": "1",
        "VJOB_STAGE_MAP": "0;1;",
        "VJOB_PIPELINE": "2",
        "VJOB_DATA": "1",
        "VJOB_TENSOR": "2",
        "VJOB_PARTITION": "4-4",
        "VJOB_COSTS": '{"forward":[0.5,0.25]}',
        "VJOB_TRACE": str(stage.attempt.trace(3)),
        "VJOB_NODE_TRACE": str(stage.attempt.node_trace(1)),
        "WHO": "small",
    }
    assert {name: found[3].get(name) for name in last} == last
    assert (found[0]["WHO"], found[0]["OMP_NUM_THREADS"]) == ("all", "4")
    assert 61000 <= int(port) < 65500


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root that may mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_neither_blocks_ranks_nor_hides_their_end(
    make_stage: MakeStage, tiny_disk: Path
) -> None:
    plan = make_plan(make_group("a", 1, 2), command=(sys.executable, "-c", FLOOD))
    stage = make_stage(plan, tiny_disk / "run")
    stage.open()
    stage.start_all()
    assert stage.wait() == [5]
    result = stage.call("close", "--status", "5")
    assert result.stdout.splitlines()[-1] == "5"
    assert "done" in result.stderr
    first = min(stage.exits().values(), key=lambda item: item.ended)
    assert first.code == 5 and first.last_error == "done"
    assert first.unwritten > 1_000_000
    assert read_events(stage.run)[0]["kind"] == "started"
