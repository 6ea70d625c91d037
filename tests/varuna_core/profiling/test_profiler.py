"""A profile on one rank: which segments are run, their bytes, where it stops, what is written."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode

from tests.models import foreign
from tests.models import small as models
from tests.models.profiled import (
    MIDDLE,
    NUM_BLOCKS,
    SCRATCH,
    WIDTH,
    Ladder,
    Stack,
    is_real,
    make_batch,
)
from varuna_core import Profiler
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import HOST_TIMES, TIMES, GpuProfile, Profile
from varuna_core.planner.profile.profile_file import read_profile
from varuna_core.profiling import bench
from varuna_core.profiling.bench import ROUND, Figures, is_out_of_memory, measure_peak
from varuna_core.profiling.measure import Measuring, choose_samples, find_classes, find_spread
from varuna_core.profiling.profile_file import build_cell
from varuna_core.profiling.profiler import remake_optimizer
from varuna_core.runtime.engine.graph_offload import FileCopies, Files
from varuna_core.runtime.split.split import split_model

CPU = torch.device("cpu")
FLOAT = 4


def run_profile(model: nn.Module, folder: Path, sizes: Any = (2,), **options: Any) -> Profile:
    profiler = Profiler(model, "cpu", **options)
    return profiler.profile_all(make_batch, sizes, out_folder=folder)


def read_details(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.profile.json").read_text())[
        "details"
    ]
    return found


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    size = 3
    profile = run_profile(Ladder(), tmp_path, [size])
    cell = profile.gpus["cpu"].cells[size, 1]
    assert cell.output_bytes == (size * WIDTH * FLOAT, size * MIDDLE * FLOAT, 0)
    # The batch is there whatever is done; else each layer keeps what came in, the last its loss.
    assert cell.graph_bytes[:2] == (0, size * WIDTH * FLOAT)
    assert size * MIDDLE * FLOAT < cell.graph_bytes[2] < size * MIDDLE * FLOAT + 32
    assert cell.work_bytes[2] >= SCRATCH * FLOAT > 10 * max(cell.work_bytes[:2])
    assert profile.model.parameters[1] == (
        WIDTH * WIDTH + WIDTH,
        MIDDLE * WIDTH + MIDDLE,
        MIDDLE + 1,
    )


def test_every_time_is_there(tmp_path: Path) -> None:
    profile = run_profile(Ladder(), tmp_path, [1, 2])
    assert profile.model.num_segments == 3
    assert_every_time(profile.gpus["cpu"])
    for cell in profile.gpus["cpu"].cells.values():
        assert not any(cell.action_host_s), "there is no host apart from the device"
        assert not any(any(getattr(cell, name)) for name in HOST_TIMES)


def test_ways_of_recompute_are_measured(tmp_path: Path) -> None:
    size = 3
    profile = run_profile(Ladder(), tmp_path, [size])
    assert profile.knows("selective") and profile.knows("offload")
    assert not profile.gpus["cpu"].copies_beside, "the host waits for its files"
    cell = profile.gpus["cpu"].cells[size, 1]
    # What each linear layer has made.
    assert cell.kept_bytes == tuple(size * width * FLOAT for width in (WIDTH, MIDDLE, 1))
    assert min(*cell.offload_s, *cell.load_s) > 0
    assert len(cell.selective_s) == 3
    compiled = run_profile(Ladder(), tmp_path / "compiled", [size], selective=False)
    assert not compiled.knows("selective") and compiled.knows("offload")


def test_a_large_graph_is_not_copied_to_know_how_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy_out(self: Files, memories: Sequence[torch.Tensor]) -> FileCopies:
        copied.append(sum(map(len, memories)))
        return FileCopies(tempfile.TemporaryFile(buffering=0), memories)

    monkeypatch.setattr(Files, "copy_out", copy_out)
    monkeypatch.setattr(bench, "MOST_COPIED", 3 * WIDTH * FLOAT)
    cells = run_profile(Stack(), tmp_path, [1, 2, 4], samples=NUM_BLOCKS).gpus["cpu"].cells
    # What a block after the first has saved beside its input: the output of its relu.
    assert set(copied) <= {0, WIDTH * FLOAT, 2 * WIDTH * FLOAT}
    two, four = cells[2, 1], cells[4, 1]
    for name in ("offload_s", "load_s"):
        pairs = zip(getattr(two, name), getattr(four, name), strict=True)
        assert all(large == pytest.approx(2 * small) for small, large in list(pairs)[1:-1]), name


def test_what_cannot_be_measured_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Files, "copy_out", refuse)
    profile = run_profile(Ladder(), tmp_path)
    assert not profile.knows("offload") and profile.knows("selective")
    assert sum("offload is not measured: [Errno 28]" in line for line in caplog.messages) == 4

    class Watching(Ladder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if get_current_dispatch_mode() is not None and is_real(x):
                raise ValueError("who watches?")
            return super().forward(x)

    profile = run_profile(Watching(), tmp_path / "watched")
    assert not profile.knows("selective")
    assert "segment 0: recompute selective is not measured: who watches?" in caplog.messages


def test_a_model_that_makes_other_products_again_recomputes_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it looks whether gradients are on, a stage keeps no products: it says so once."""

    class Looking(Ladder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            return loss + (x @ x.T).sum() * 0 if torch.is_grad_enabled() else loss

    cell = run_profile(Looking(), tmp_path).gpus["cpu"].cells[2, 1]
    assert cell.kept_bytes[2] == 0 < cell.kept_bytes[0]
    assert sum("runs other matrix products" in line for line in caplog.messages) == 1


def assert_every_time(gpu: GpuProfile) -> None:
    """Of three segments, and of the optimizer."""
    for cell in gpu.cells.values():
        # A device that is not the host does nothing for a stage without layers.
        own = cell.action_host_s if any(cell.action_host_s) else cell.action_s
        for name, action_s in zip(TIMES, cell.action_s, strict=True):
            figures = getattr(cell, name)
            # Of layers so small an action's own cost may be all.
            assert len(figures) == 3 and min(figures) >= 0 and action_s + max(figures) > 0
        assert min(own[:2]) > 0
        assert cell.spread is not None and cell.spread.rounds[0] < cell.spread.rounds[4]
    assert min(gpu.optimizer_s[1]) > 0


def test_a_slow_round_is_told_from_uneven_actions() -> None:
    """Two segments, one ten times as long: the machine is half as fast in one round of five, and
    one of the long one's forwards took twice as long."""
    usual = {0: [1.0] * len(ROUND), 1: [10.0] * len(ROUND)}
    paces = [1.0, 1.0, 2.0, 1.0, 1.0]
    rounds = {s: [[took * pace for took in row] for pace in paces] for s, row in usual.items()}
    spread = find_spread([rounds])
    assert spread is not None
    assert spread.rounds[:3] == (1.0,) * 3 and spread.rounds[4] > 1.5
    assert {row for row in spread.actions} == {(1.0,) * 5}
    rounds[1][1][ROUND.index(("F", 0))] = 20.0
    uneven = find_spread([rounds])
    assert uneven is not None
    assert uneven.actions[0][4] > 1.2 and uneven.actions[3][4] < 1.05
    short = {0: [[1.0] * len(ROUND)] * 5, 1: [[10.0] * len(ROUND)] * 5}
    short[0] = [[2.0] * len(ROUND), *short[0][1:]]
    third = find_spread([short])
    assert third is not None and third.rounds[4] < 1.1, "what is short counts for little"
    assert find_spread([{}]) is None


def make_figures(seconds: float) -> Figures:
    times = {f.name: seconds if f.name.endswith("_s") else 1.0 for f in fields(Figures)}
    return Figures(**times)


def test_what_an_action_costs_by_itself_is_in_no_segment() -> None:
    cell = build_cell([make_figures(5.0), make_figures(3.0)], make_figures(1.0))
    assert cell.forward_s == cell.backward_s == (4.0, 2.0)
    assert cell.action_s == (1.0,) * len(TIMES) and cell.output_bytes == (1.0, 1.0)
    quick = build_cell([make_figures(5.0), make_figures(3.0)], make_figures(4.0))
    assert quick.forward_s == (1.0, 0.0) and quick.action_s[0] == 4.0
    alone = build_cell([make_figures(5.0)], None)
    assert alone.forward_s == (5.0,) and not any(alone.action_s)


def test_a_model_of_one_segment_has_no_stage_without_any(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layer(x).mean()
            return loss

    cell = run_profile(Loss(), tmp_path).gpus["cpu"].cells[2, 1]
    assert not any(cell.action_s) and cell.forward_s[0] > 0


def test_the_graphs_of_segments_add_up_to_that_of_a_stage(tmp_path: Path) -> None:
    from varuna_core.profiling.bench import Bench, Crossings

    model, inputs = models.Gpt(), models.make_inputs(2)
    profiler = Profiler(model, "cpu")
    cell = profiler.profile_all(models.make_inputs, [2], tmp_path).gpus["cpu"].cells[2, 1]
    split = split_model(model, inputs, 3, [1, 4, 1])
    bench = Bench(split, 1, Crossings(split), loss_scale=1.0, seed=1, sharding=None)
    assert bench.measure(inputs, 2).graph_bytes == sum(cell.graph_bytes[1:5])


def test_only_samples_of_equal_segments_are_run(tmp_path: Path) -> None:
    model = Stack()
    run_profile(model, tmp_path, samples=2)
    # The first block has no layer before it whose gradient it makes; the last ends in the loss.
    assert {number for number, _ in model.runs} == {0, 1, NUM_BLOCKS - 2, NUM_BLOCKS - 1}
    (detail,) = read_details(tmp_path, "Stack")
    assert detail["equals"] == [[0], [1, 2, 3], [4]]
    assert detail["measured"] == {"2": [0, 1, 3, 4]}


def test_equal_segments_have_the_figures_of_their_samples(tmp_path: Path) -> None:
    profile = run_profile(Stack(), tmp_path, samples=1)
    cell = profile.gpus["cpu"].cells[2, 1]
    rows = list(zip(*(getattr(cell, name) for name in TIMES), strict=True))
    assert rows[1] == rows[2] == rows[3] != rows[4]


@pytest.mark.parametrize("build", [models.Gpt, models.TiedGpt, models.DictGpt, models.InPlaceGpt])
def test_blocks_of_a_transformer_are_equal(build: Any) -> None:
    model, inputs = build(), models.make_inputs(2)
    count = len(split_model(model, inputs, 1).record.costs)
    split = split_model(model, inputs, count, [1] * count)
    classes = find_classes(split)
    assert sorted(segment for equals in classes for segment in equals) == list(range(count))
    assert (0,) in classes and (count - 1,) in classes and len(classes) < count


def test_samples_are_spread_over_their_class() -> None:
    classes = [(0,), tuple(range(1, 49)), (49,)]
    assert list(choose_samples(classes, 1)) == [0, 1, 49]
    assert list(choose_samples(classes, 3)) == [0, 1, 25, 48, 49]
    assert len(choose_samples([(3, 4)], 9)) == 2


def test_wider_blocks_are_not_taken_for_equal() -> None:
    model = Stack()
    model.blocks[2].linear = nn.Linear(WIDTH, WIDTH, bias=False)
    split = split_model(model, make_batch(1), NUM_BLOCKS, [1] * NUM_BLOCKS)
    assert (2,) in find_classes(split)


# Memory.


def test_sizes_stop_where_memory_does(tmp_path: Path) -> None:
    model = Stack(limit=4)
    profile = run_profile(model, tmp_path, None, samples=NUM_BLOCKS)
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1), (4, 1)}
    assert max(size for _, size in model.runs) == 8
    (detail,) = read_details(tmp_path, "Stack")
    assert detail["largest_micro_batch"] == 4
    assert detail["stopped"] == "out of memory at micro-batch 8: segment 2"


def test_what_does_not_fit_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory at micro-batch 1: segment 1"):
        run_profile(Stack(limit=0, where=1), tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_time_ends_the_doubling_but_not_what_was_asked_for(tmp_path: Path) -> None:
    profile = run_profile(Ladder(), tmp_path, None, limit_s=0.0)
    assert set(profile.gpus["cpu"].cells) == {(1, 1)}
    assert "2 skipped" in read_details(tmp_path, "Ladder")[0]["stopped"]
    profile = run_profile(Ladder(), tmp_path, [1, 2, 4], limit_s=0.0)
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1), (4, 1)}


def test_what_would_not_fit_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that share layers; who says so is made up here."""
    monkeypatch.setattr(
        Measuring, "_foresee_too_large", lambda self, measured, growth: growth == 1.5
    )
    profile = run_profile(Ladder(), tmp_path, [1, 2, 3, 4])
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1)}
    assert read_details(tmp_path, "Ladder")[0]["stopped"].startswith("micro-batch 3 skipped")


def test_a_peak_is_what_was_held_at_once() -> None:
    def run() -> None:
        for _ in range(3):
            torch.empty(1 << 16).add(1)

    two = 2 * (1 << 16) * FLOAT
    assert two <= measure_peak(CPU, run) < two + 64  # and a number or two


def test_a_real_failure_to_allocate_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


# What is written.


def test_a_profile_is_extended(tmp_path: Path) -> None:
    run_profile(Stack(), tmp_path, [1])
    profile = run_profile(Stack(limit=3), tmp_path, [2, 4], samples=NUM_BLOCKS)
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1)}
    assert read_profile(tmp_path / "Stack.profile.json") == profile
    run_profile(Stack(), tmp_path, [1], samples=1)
    (detail,) = read_details(tmp_path, "Stack")
    assert detail["measured"] == {"1": [0, 1, 4], "2": [0, 1, 2, 3, 4]}
    assert detail["largest_micro_batch"] == 2 and "at micro-batch 4" in detail["stopped"]


def test_a_profile_of_another_model_is_kept(tmp_path: Path) -> None:
    run_profile(Ladder(), tmp_path)
    path = tmp_path / "Ladder.profile.json"
    before, other = path.read_text(), Stack()
    with pytest.raises(PlanningError, match="Ladder"):
        Profiler(other, "cpu").profile_all(make_batch, [1], path=path)
    assert path.read_text() == before and not other.runs


def test_a_profile_of_other_software_is_kept(tmp_path: Path) -> None:
    run_profile(Ladder(), tmp_path)
    path = tmp_path / "Ladder.profile.json"
    path.write_text(path.read_text().replace(f'"{torch.__version__}"', '"1.0"'))
    with pytest.raises(PlanningError, match=r"torch 1\.0"):
        run_profile(Ladder(), tmp_path)


def test_the_digest_is_of_shapes_and_precision(tmp_path: Path) -> None:
    def take(model: nn.Module, **options: Any) -> str:
        profiler = Profiler(model, "cpu", **options)
        profiler.initialize(make_batch)
        return profiler._describe(profiler._split(1)[0]).digest

    wider = Ladder()
    wider.third = nn.Linear(MIDDLE, 2)
    digests = {take(Ladder()), take(wider), take(Ladder(), precision="bf16")}
    assert len(digests) == 3 and take(Ladder()) in digests


# The calls of the ancestor's users.


def test_the_calls_of_varunas_readme(tmp_path: Path) -> None:
    model = models.TiedGpt()
    profiler = Profiler(model, CPU, fp16=True)

    def get_batch(size: int) -> models.Inputs:
        return models.make_inputs(size)

    profiler.initialize(get_batch)
    profiler.set_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_scale="dynamic",
        min_loss_scale=None,
        amp_opt_level="O2",
    )
    profile = profiler.profile_all(get_batch, list(range(1, 3)), out_folder=str(tmp_path))
    assert set(profile.gpus["cpu"].cells) == {(1, 1), (2, 1)}
    (tie,) = profile.model.ties
    assert tie.segments == (0, 5) and tie.parameters == model.wte.weight.numel()
    full = Profiler(model, CPU).profile_all(get_batch, [1], tmp_path / "full")
    halves = profile.gpus["cpu"].cells[1, 1].output_bytes
    assert [2 * n for n in halves] == list(full.gpus["cpu"].cells[1, 1].output_bytes)


def test_sizes_alone_after_initialize(tmp_path: Path) -> None:
    profiler = Profiler(Ladder(), "cpu")
    with pytest.raises(ValueError, match="initialize"):
        profiler.profile_all([1], out_folder=tmp_path)
    profiler.initialize(make_batch)
    assert profiler.profile_all([1], out_folder=tmp_path).model.num_segments == 3
    with pytest.raises(ValueError, match="1 or more"):
        profiler.profile_all([0], out_folder=tmp_path)


class Counting(torch.optim.SGD):
    """Says whose parameters it steps."""

    steps: list[int] = []  # noqa: RUF012 # the test's own

    def step(self, closure: Any = None) -> Any:
        self.steps.append(sum(p.numel() for g in self.param_groups for p in g["params"]))
        return super().step(closure)


def test_the_optimizer_that_was_given_is_timed(tmp_path: Path) -> None:
    model = Ladder()
    profiler = Profiler(model, "cpu")
    profiler.set_optimizer(Counting(model.parameters(), lr=0.5, momentum=0.9))
    profile = profiler.profile_all(make_batch, [1], tmp_path)
    assert set(Counting.steps) == set(profile.model.parameters[1])
    with pytest.raises(ValueError, match="neither is nor builds an optimizer"):
        profiler.set_optimizer(3)


def test_an_optimizer_is_made_anew_with_its_settings() -> None:
    held = [nn.Parameter(torch.ones(2))]
    for made in (
        torch.optim.AdamW(held, lr=0.5, betas=(0.1, 0.2)),
        torch.optim.SGD(held, lr=0.5, momentum=0.3),
    ):
        again = remake_optimizer(made)(held)
        assert type(again) is type(made) and again.defaults == made.defaults


# Models that know nothing of us.


@pytest.mark.filterwarnings("ignore")  # what the libraries that T5 imports warn of
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", pytest.param("t5", marks=pytest.mark.long)]
)
def test_foreign_models(name: str, tmp_path: Path) -> None:
    if not foreign.is_installed(name):
        pytest.skip(f"{foreign.LIBRARY[name]} is not installed")
    profiler = Profiler(foreign.BUILD[name](), "cpu", name=name, samples=1)
    profile = profiler.profile_all(foreign.make_text, [1, 2], tmp_path)
    one, two = (profile.gpus["cpu"].cells[size, 1] for size in (1, 2))
    assert one.action_s[0] > 0 and profile.model.num_segments == len(one.forward_s)
    for small, large in zip(one.output_bytes[:-1], two.output_bytes, strict=False):
        assert small < large <= 2 * small  # T5's bias by position is the same for all samples
    assert all(n > 0 for n in one.output_bytes[:-1]) and one.output_bytes[-1] == 0
    assert replace(profile.model, name="") == replace(read_profile(next(tmp_path.iterdir())).model,
                                                      name="")  # fmt: skip
