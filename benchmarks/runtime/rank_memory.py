"""Memory of a rank beside its stage's share: eight stages of a GPT, eight processes.

    python -m benchmarks.runtime.rank_memory [--hidden 1280] [--steps 2] [--write]

The share of a rank is what it must hold at once: its stage's weights, their gradients and AdamW's
moments (fp32 masters too, in bf16), and the graphs of the micro-batches that its schedule keeps
alive, each as autograd's saved tensors were counted. The peak is that of the process' resident
memory, above what it held when all imports were done. It is read for each phase of a training
apart. A model that is given with real weights is whole on each rank until Varuna has it: its bound
is on what comes after.
"""

from __future__ import annotations

import argparse
import gc
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from benchmarks import RESULTS
from varuna_core import Options, Varuna
from varuna_core.programs.gpt import Gpt
from varuna_core.runtime.engine.graph_memory import GraphMeter
from varuna_core.runtime.optim.optimizers import build_optimizer
from varuna_core.schedule.actions import Action

RESULT = RESULTS / "rank_memory.md"
BOUND = 1.3
STAGES, MICRO, NUM_MICROBATCHES, SEQUENCE, VOCAB = 8, 2, 16, 64, 8192
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train."""

    name: str
    on_meta: bool = True
    """The model is built without memory; else with weights."""

    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    """Of Varuna."""


CASES = (
    Case(name="built on meta, fp32"),
    Case(name="built on meta, bf16", precision="bf16"),
    Case(name="built on meta, recompute", options={"recompute": "full"}),
    Case(name="built on meta, zero bubble", options={"schedule": "zero_bubble"}),
    Case(name="given with weights, fp32", on_meta=False),
)


@dataclass(kw_only=True)
class Phase:
    """Memory above the imports', in bytes."""

    name: str
    peak: int
    after: int


@dataclass(kw_only=True)
class RankFigures:
    """Figures of one rank."""

    rank: int
    state: int
    """Bytes of weights, gradients, moments and masters."""

    graphs: int
    """Bytes of the most graphs that are alive at once."""

    phases: list[Phase]

    @property
    def share(self) -> int:
        return self.state + self.graphs

    def find_peak(self, from_step: bool) -> int:
        """Of all phases, or of those from the first step on."""
        return max(phase.peak for phase in self.phases[2 if from_step else 0 :])


# The process' memory.


def read_status(name: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


class MemoryWatch:
    """Peaks of the phases, above a baseline."""

    def __init__(self) -> None:
        gc.collect()
        self.baseline = read_status("VmRSS")
        self.phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        yield
        peak, after = (read_status(word) - self.baseline for word in ("VmHWM", "VmRSS"))
        self.phases.append(Phase(name=name, peak=peak, after=after))


# One rank.


def count_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def count_state(varuna: Varuna, optimizer: Any) -> int:
    """While gradients are there, after the optimizer's first step."""
    held: list[Tensor] = [*varuna.part.parameters().values(), *varuna.part.buffers().values()]
    held += varuna.parameters()
    held += [parameter.grad for parameter in held if parameter.grad is not None]
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, Tensor)]
    return count_bytes(held)


def count_graphs(actions: Iterable[Action], meter: GraphMeter) -> int:
    """Bytes of graphs and kept inputs at the worst moment of the list."""
    held = most = 0.0
    for action in actions:
        graph, kept = meter.graphs[action.stage], meter.inputs[action.stage]
        # An f keeps the inputs, an R makes the graph of them; an I keeps what its W multiplies,
        # which is counted as the whole graph.
        held += {"F": graph, "f": kept, "R": graph - kept, "B": -graph, "W": -graph, "I": 0.0}[
            action.kind
        ]
        most = max(most, held)
    return int(most)


def build_model(case: Case, hidden: int) -> nn.Module:
    with torch.device("meta" if case.on_meta else "cpu"):
        return Gpt(
            layers=STAGES,
            hidden=hidden,
            heads=hidden // 64,
            sequence=SEQUENCE,
            vocab=VOCAB,
            dropout=0.0,
        )


def run_rank(rank: int, case: Case, hidden: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", STAGES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
    import_late()
    batch = {"tokens": torch.randint(VOCAB, (MICRO * NUM_MICROBATCHES, SEQUENCE + 1))}
    watch = MemoryWatch()
    with watch.phase("construction"):
        model = build_model(case, hidden)
    with watch.phase("Varuna(...)"):
        varuna = Varuna(
            model,
            "".join(f"{stage};" for stage in range(STAGES)),
            {"tokens": batch["tokens"][:MICRO]},
            MICRO * NUM_MICROBATCHES,
            MICRO,
            device="cpu",
            precision=case.precision,
            options=Options(
                **{"partition": "-".join("1" * STAGES), "schedule": "1f1b", **case.options}
            ),
        )
        del model
        optimizer = build_optimizer("adamw", varuna.parameters(), lr=1e-4)
        varuna.set_optimizer(optimizer)
    meter = varuna.engine.passes.meter = GraphMeter(MICRO)
    state = 0
    for step in range(steps):
        with watch.phase("step" if step else "first step"):
            varuna.step(batch)
        varuna.engine.passes.meter = None
        with watch.phase("optimizer's step" if step else "optimizer's first step"):
            optimizer.step()
        state = state or count_state(varuna, optimizer)
        varuna.zero_grad()
    with watch.phase("checkpoint"):
        varuna.checkpoint(f"{folder}/store_of_checkpoints", on_demand=True)
    with watch.phase("checkpoint loaded"):
        varuna.load_checkpoint(f"{folder}/store_of_checkpoints")
    actions, _ = varuna._plan(NUM_MICROBATCHES)
    figures = RankFigures(
        rank=rank, state=state, graphs=count_graphs(actions, meter), phases=watch.phases
    )
    torch.save(figures, f"{folder}/{rank}.pt")
    varuna.close()
    dist.destroy_process_group()


def import_late() -> None:
    """Modules that torch and the runtime import when they are first used."""
    import torch._dynamo
    import torch._subclasses.fake_tensor
    import torch.utils.flop_counter  # noqa: F401


def measure(case: Case, hidden: int, steps: int) -> list[RankFigures]:
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(
            run_rank, (case, hidden, steps, folder), nprocs=STAGES, start_method="spawn"
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(STAGES)
        ]


# The page.


def render_case(case: Case, figures: Sequence[RankFigures]) -> str:
    def ratio(rank: RankFigures) -> float:
        return rank.find_peak(from_step=not case.on_meta) / rank.share

    shares = sorted(rank.share / MIB for rank in figures)
    return (
        f"| {case.name} | {shares[0]:.0f} to {shares[-1]:.0f} | {max(map(ratio, figures)):.2f} "
        f"| {BOUND} | {min(map(ratio, figures)):.2f} |"
    )


def render_phases(case: Case, figures: Sequence[RankFigures]) -> list[str]:
    lines = [
        f"{case.name}: the largest of all ranks, in MiB",
        "",
        "| phase | peak | held after it | peak / share |",
        "|---|---|---|---|",
    ]
    for place, phase in enumerate(figures[0].phases):
        each = [rank.phases[place] for rank in figures]
        ratio = max(p.peak / rank.share for p, rank in zip(each, figures, strict=True))
        lines.append(
            f"| {phase.name} | {max(p.peak for p in each) / MIB:.0f} "
            f"| {max(p.after for p in each) / MIB:.0f} | {ratio:.2f} |"
        )
    return lines


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1280)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--case", type=int, action="append", help="a number; all by default")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    chosen = [CASES[number] for number in options.case] if options.case else CASES
    found = [(case, measure(case, options.hidden, options.steps)) for case in chosen]
    head = [
        "| training | share, MiB | largest peak / share | bound | smallest |",
        "|---|---|---|---|---|",
    ]
    rows = [render_case(case, figures) for case, figures in found]
    tables = [line for case, figures in found for line in ("", *render_phases(case, figures))]
    text = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}; "
        f"{STAGES} stages of one block of {options.hidden}, {VOCAB} words (the first and the last "
        f"stage hold the tied table), {NUM_MICROBATCHES} micro-batches of {MICRO} x {SEQUENCE}, "
        f"one thread a rank.\n\n"
    ) + "\n".join([*head, *rows, *tables])
    print(text)
    if options.write:
        command = f"python -m benchmarks.runtime.rank_memory --hidden {options.hidden} --write"
        RESULT.write_text(f"# Memory of a rank beside its share\n\nMade by `{command}`. {text}\n")


if __name__ == "__main__":
    main()
