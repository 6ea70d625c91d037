"""Checkpoints between CPU and GPU, a profile, readings, profilers, apex and NCCL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from tests import ROOT
from tests.command import PROGRAMS, Vjob, read_out, wait_for
from tests.models.profiled import MIDDLE, WIDTH, Ladder, make_batch
from tests.ranks.device import CPU, VARIABLE, bring, choose_device
from tests.ranks.save_rank import Case
from tests.varuna_core.profiling.test_profiler import FLOAT, assert_every_time
from tests.varuna_core.programs import program_rank
from tests.varuna_core.programs.test_float8 import HALF
from tests.varuna_core.runtime.optim.test_optimizers import make_parameters
from tests.varuna_core.runtime.saving.test_saving import LAYOUTS, assert_goes_on, start
from varuna_core import Profiler
from varuna_core.checkpoint.format.entries import make_entry
from varuna_core.checkpoint.format.manifest import WEIGHT
from varuna_core.checkpoint.store.writer import Staging
from varuna_core.profiling.ranks import name_kind
from varuna_core.runtime.engine.cuda_graphs import CudaRecorder
from varuna_core.runtime.engine.weight_grads import add_product
from varuna_core.runtime.optim import fixed_sums
from varuna_core.runtime.optim.grads import can_add_wide
from varuna_core.runtime.optim.optimizers import APEX, build_optimizer, why_no_apex

pytestmark = pytest.mark.gpu

# Not the kind with dropout: a GPU draws other numbers than a processor.
CLOSE = {"half": {"rtol": 2e-2, "atol": 2e-3}, "norm": {"rtol": 1e-3, "atol": 1e-4}}
OTHER = {"device": "host", "host": "device"}


@pytest.fixture(scope="module")
def stores(device: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two stages on each place, loaded by two replicas on the other."""
    folder = tmp_path_factory.mktemp("stores")
    kinds = {"device": device, "host": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        for loads in (False, True):
            for place, word in kinds.items():
                patch.setenv(VARIABLE, word)
                source = OTHER[place] if loads else place
                layout: dict[str, Any] = LAYOUTS["1x2" if loads else "2x1"][1]
                cases = [
                    Case(
                        name=f"{kind} of {source} on {place}",
                        kind=kind,
                        store=f"{kind} {source}",
                        load=loads,
                        **layout,
                    )
                    for kind in CLOSE
                ]
                start(folder, 2, cases)
    return folder


@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("source", OTHER)
def test_a_checkpoint_of_the_one_goes_on_on_the_other(stores: Path, source: str, kind: str) -> None:
    saved, loaded = (
        [
            torch.load(stores / f"{kind} of {source} on {place}.{rank}.pt", map_location=CPU)
            for rank in range(2)
        ]
        for place in (source, OTHER[source])
    )
    assert_goes_on(kind, saved, loaded, CLOSE[kind])


def test_a_profile_has_every_time_and_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    device = choose_device()
    profile = Profiler(Ladder(), device).profile_all(make_batch, [1, 2], tmp_path)
    (kind,) = profile.gpus
    assert kind == name_kind(device)
    assert_every_time(profile.gpus[kind])
    cell = profile.gpus[kind].cells[2, 1]
    assert any(cell.action_host_s) == (device.type == "cuda")
    assert cell.output_bytes == (2 * WIDTH * FLOAT, 2 * MIDDLE * FLOAT, 0)


STANDIN = """#!/bin/sh
# For processors: as nvidia-smi and the profilers, as far as vjob calls them.
case "$1" in
-L) echo "GPU 0: stand-in (UUID: GPU-1)"; exit ;;
--query-compute-apps*) exit ;;
--query-gpu*) echo "0, stand-in, 49, 99, 100, 22731, 15.61, GPU-1, 0, 0x0"; exit ;;
esac
for word in "$@"; do
  case "$word" in
  --output=*) echo "$@" > "${word#--output=}.nsys-rep" ;;
  --export=*) echo "$@" > "${word#--export=}.ncu-rep" ;;
  esac
done
while case "$1" in profile|-*) true ;; *) false ;; esac; do shift; done
exec "$@"
"""
CONF = """
name: held
program: {{script: {script}, args: [{args}]}}
cluster:
  scheduler: local
  walltime_min: 5
  sample_s: 1
  nodes: [{{group: m, count: 1, gpus: 1}}]
env: {{{variable}: {device}, PATH: "{path}", PYTHONPATH: {root}}}
{more}
"""


@pytest.fixture
def vjob(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vjob:
    """With stand-ins on the PATH where there is no GPU."""
    if device == "cpu":
        tools = tmp_path / "tools"
        tools.mkdir()
        for name in ("nvidia-smi", "nsys", "ncu"):
            (tools / name).write_text(STANDIN)
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{Vjob(tmp_path).env['PATH']}")
    return Vjob(tmp_path)


def write_conf(vjob: Vjob, device: str, args: str = "", more: str = "") -> str:
    return CONF.format(
        script=PROGRAMS / "holds_device.py",
        args=args,
        variable=VARIABLE,
        device=device,
        path=vjob.env["PATH"],
        root=vjob.env["PYTHONPATH"],
        more=more,
    )


def test_status_shows_the_readings_of_a_gpu_that_is_used(device: str, vjob: Vjob) -> None:
    done = vjob.folder / "done"
    run = vjob.submit(write_conf(vjob, device, args=str(done)))
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [gpu for node in vjob.status(str(run.path))["nodes"] for gpu in node["gpus"]]
        return bool(found) and f"on {device}" in read_out(run)

    wait_for(look, 120, lambda: vjob.explain(run))
    done.touch()
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    (gpu, *_) = found
    assert device == "cpu" or gpu["name"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["memory_used_mb"] <= gpu["memory_total_mb"]
    assert 0 <= gpu["utilization"] <= 100 and 0 < gpu["temperature"] < 120 and gpu["power_w"] > 0


@pytest.mark.usefixtures("only_gpu")
def test_a_process_that_is_not_the_jobs_is_told(device: str, vjob: Vjob) -> None:
    done, word = vjob.folder / "done", "GPUs with processes that do not belong to the job"
    other = subprocess.Popen(
        [sys.executable, PROGRAMS / "holds_device.py", str(done)],
        env={**vjob.env, VARIABLE: device},
    )
    try:
        run = vjob.submit(write_conf(vjob, device, args=str(done)))

        def is_told() -> bool:
            remarks = vjob.status(str(run.path))["verdict"]["remarks"]
            return any(word in remark for remark in remarks) and f"on {device}" in read_out(run)

        wait_for(is_told, 120, lambda: vjob.explain(run))
        done.touch()
        assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    finally:
        done.touch()
        other.wait(60)


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_profiler_leaves_its_file_with_the_run(device: str, vjob: Vjob, tool: str) -> None:
    if shutil.which(tool, path=vjob.env["PATH"]) is None:
        pytest.skip(f"{tool} is not on the PATH")
    options = ", options: [--clock-control=none]" if tool == "ncu" else ""
    run = vjob.submit(write_conf(vjob, device, more=f"profile: {{{tool}: true{options}}}"))
    record = vjob.wait_over(run, 240, may_fail=True)
    if "ERR_NVGPUCTRPERM" in read_out(run):
        pytest.skip("the driver lets only administrators read the counters that ncu wants")
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    (left,) = run.path.glob(f"attempt-0/ranks/0.{tool}-rep")
    assert left.stat().st_size > 0 and f"on {device}" in read_out(run)


@pytest.mark.parametrize("name", APEX)
def test_apex_steps_as_torchs_own(device: str, name: str) -> None:
    missing = why_no_apex()
    if missing and device != "cpu":  # there torch's own stands for it
        pytest.skip(missing)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    options |= {"momentum": 0.9} if name == "sgd" else {"eps": 1e-3}
    held = [
        [nn.Parameter(bring(p.detach(), choose_device())) for p in make_parameters()]
        for _ in range(2)
    ]
    own = {"max_grad_norm": None} if name == "lamb" else {}
    both = [
        build_optimizer(name, held[0], apex=True, **options, **(own if missing else {})),
        build_optimizer(name, held[1], **options, **own),
    ]
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        for pair in zip(*held, strict=True):
            gradient = bring(torch.randn(pair[0].shape, generator=draw), choose_device())
            for parameter in pair:
                parameter.grad = gradient.clone()
        for optimizer in both:
            optimizer.step()
    for a, b in zip(*held, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize(
    "change",
    [{"precision": "fp8"}, {"cuda_graphs": True}, {"cuda_graphs": True, "compile": True}],
    ids=["fp8", "cuda_graphs", "compile and cuda_graphs"],
)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it is made of
def test_the_built_in_program_loses_as_in_bf16(change: dict[str, Any]) -> None:
    plain = replace(HALF, schedule="1f1b", lr=1e-3)  # steps that do not double a rounding
    half, ours = (
        program_rank.train(program_rank.Case(name="", stage_map="0;", training=one), 0, 1).losses
        for one in (plain, replace(plain, **change))
    )
    assert ours == pytest.approx(half, rel=0.01)


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_products_in_half_precision_add_up_in_fp32(half: torch.dtype) -> None:
    device, draw = choose_device(), torch.Generator().manual_seed(0)
    grad, input, total = (torch.randn(256, n, generator=draw).to(device) for n in (48, 64, 64))
    grad, input, total = grad.to(half), input.to(half), total[:48].contiguous()
    expected = total.double() + 0.375 * (grad.double().t() @ input.double())
    assert can_add_wide(total)
    add_product((total, 0.375), grad, input)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_half_gradient_adds_up_in_fp32(half: torch.dtype) -> None:
    """By a kernel of our own; its last block is not full."""
    device, draw = choose_device(), torch.Generator().manual_seed(0)
    gradient, total = (torch.randn(259, 401, generator=draw).to(device) for _ in range(2))
    gradient, factor = gradient.to(half), torch.tensor(0.7, device=device)
    expected = total.double() + 0.7 * gradient.double()
    fixed_sums.add_scaled(total, gradient, factor)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    assert fixed_sums._build_kernel.cache_info().currsize == 1, "not torch's own"


def test_a_forward_that_cuda_does_not_record_runs_without_or_ends_in_words(device: str) -> None:
    """In a process of its own: torch before 2.12 cannot go on after that."""
    script = [sys.executable, PROGRAMS / "reads_a_value.py"]
    env = {**os.environ, VARIABLE: device, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    if device == "cpu":
        assert done.stdout == "True\n", done.stderr
    elif TorchVersion(torch.__version__) < "2.12":
        assert "omit cuda_graphs, or use torch 2.12" in done.stderr
    else:
        assert done.stdout == "True\n" and "stage 0: no CUDA graphs" in done.stderr, done.stderr


@pytest.mark.usefixtures("only_gpu")
def test_an_older_recording_that_python_collects_breaks_off_none() -> None:
    device = choose_device()
    cycle: list[Any] = [CudaRecorder(device).record(lambda: torch.zeros(1, device=device))]
    cycle.append(cycle)
    del cycle

    def work() -> torch.Tensor:
        for _ in range(2**16):  # the collector has cause to run
            held: list[Any] = []
            held.append(held)
        return torch.full((4,), 2.0, device=device) * 3

    made, run_again = CudaRecorder(device).record(work)
    made.zero_()
    run_again()
    assert made.tolist() == [6.0] * 4


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_gpus_write_to_a_copy_on_a_ram_disk_by_themselves(later: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        staging = Staging(Path(folder))
        held = [torch.arange(1e6, device=choose_device()), torch.tensor(3.0)]
        held += [torch.full((5, 7), 0.5, dtype=torch.bfloat16, device=choose_device())]
        staging.take({0: [make_entry(WEIGHT, str(n), t) for n, t in enumerate(held)]}, later=later)
        assert staging._buffer.is_pinned()
        copies = [entry.load() for entry in staging.finish()[0]]
        assert all(torch.equal(copy, one.cpu()) for copy, one in zip(copies, held, strict=True))


@pytest.mark.usefixtures("only_gpu")
def test_nccl_sums_on_a_gpu() -> None:
    device = choose_device()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        held = torch.arange(8.0, device=device)
        dist.all_reduce(held)
        assert held.tolist() == list(range(8))
    finally:
        dist.destroy_process_group()
