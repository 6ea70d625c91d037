"""The benchmarks that `make bench` runs, in this order, and their peers.

The module of each says what it measures; the bounds stand in what it prints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A module of benchmarks/, and how to call it."""

    name: str
    """As `--only` takes it."""

    module: str
    """Below benchmarks/; a package is run by its __main__."""

    title: str
    peer: str
    """Reference of its ratios; without a peer the bound is named."""

    words: tuple[str, ...] = ()
    """Arguments of a full run."""

    quick: tuple[str, ...]
    """Arguments of a look that takes seconds: smaller inputs, fewer rounds."""

    needs: tuple[str, ...] = ()
    """Modules without which it cannot run."""

    ranks: bool = False
    """Two processes that torchrun starts."""

    image: bool = False
    """It asks for a container image, which VJOB_BENCH_IMAGE names."""

    scripts: bool = False
    """It reads launch scripts in the folder that VJOB_BENCH_SCRIPTS names."""

    def build_command(self, python: str, is_quick: bool, image: str | None = None) -> list[str]:
        words = [python, *(RANKS if self.ranks else ()), "-m", f"benchmarks.{self.module}"]
        words += [image] if self.image and image else []
        return [*words, *(self.quick if is_quick else self.words)]

    def find_obstacle(self, image: str | None) -> str | None:
        """Why it cannot run here, as far as that is known before it starts."""
        if missing := [name for name in self.needs if find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}"
        if self.image and image is None:
            return "VJOB_BENCH_IMAGE names no .sqsh file"
        if self.scripts and not os.environ.get("VJOB_BENCH_SCRIPTS"):
            return "VJOB_BENCH_SCRIPTS names no folder"
        return None


BENCHMARKS: Sequence[Benchmark] = (
    Benchmark(
        name="spine",
        module="commands.spine",
        title="The command: start-up and growth",
        peer="a Python that imports click and yaml",
        quick=("--rounds", "3"),
    ),
    Benchmark(
        name="submit",
        module="commands.submit",
        title="A submit",
        peer="submitit",
        needs=("submitit",),
        quick=("--rounds", "3"),
    ),
    Benchmark(
        name="status",
        module="commands.status",
        title="A look at a large job",
        peer="`tail -n 50` over the same files",
        quick=("--nodes", "128", "--rounds", "3"),
    ),
    Benchmark(
        name="report",
        module="commands.report",
        title="Reports",
        peer="`wc -l` with `json.loads`; the seed's scripts, written again; plotly's timeline",
        needs=("pandas", "plotly", "pyarrow", "playwright"),
        quick=(
            *("--trace-mb", "20", "--nodes", "4", "--log-mb", "5", "--seed-mb", "0.2"),
            *("--ranks", "64", "--events", "64000"),
        ),
    ),
    Benchmark(
        name="findings",
        module="commands.findings",
        title="Findings of the report",
        peer="what was staged; all of 39 right, none in 3 healthy runs",
        needs=("pandas", "pyarrow"),
        quick=("--tuning",),
    ),
    Benchmark(
        name="gpu scenes",
        module="commands.gpu_scenes",
        title="Sick, odd and healthy hardware",
        peer="what was staged; all right",
        needs=("pandas",),
        quick=("--only", "an NVLink"),
    ),
    Benchmark(
        name="profiled logs",
        module="commands.profiled_logs",
        title="Status and report of staged logs with calls",
        peer="what was staged; all right, none in healthy jobs",
        needs=("pandas",),
        quick=("--only", "a slow rank"),
    ),
    Benchmark(
        name="data",
        module="runtime.data",
        title="Data",
        peer="a pool as Megatron-LM's preprocess_data.py has it; megatron-core's index maps",
        needs=("megatron", "tokenizers", "torch"),
        quick=("--megabytes", "2", "--rounds", "1"),
    ),
    Benchmark(
        name="checkpoint",
        module="runtime.checkpoint",
        title="Checkpoints",
        peer="the same bytes with fsync; torch.distributed.checkpoint (DCP)",
        needs=("torch",),
        quick=("--rounds", "3", "--millions", "4"),
    ),
    Benchmark(
        name="cross_entropy",
        module="runtime.cross_entropy",
        title="Cross-entropy of many words",
        peer="torch.nn.functional.cross_entropy",
        needs=("torch",),
        quick=("--rounds", "3"),
    ),
    Benchmark(
        name="many_tensors",
        module="runtime.many_tensors",
        title="Many tensors",
        peer="the same bytes in twelve tensors",
        needs=("torch",),
        quick=("--counts", "12", "3000"),
    ),
    Benchmark(
        name="checkpoint_stall",
        module="runtime.checkpoint_stall",
        title="A save beside training",
        peer="DCP's async_save; cloning the same tensors; the same step without",
        needs=("torch",),
        words=("--rounds", "9"),
        quick=("--rounds", "2", "--ways", "fp32"),
        ranks=True,
    ),
    Benchmark(
        name="startup",
        module="runtime.startup",
        title="From the agent's start to the first step",
        peer="none by itself; with --before another checkout",
        needs=("torch",),
        quick=("--rounds", "1"),
    ),
    Benchmark(
        name="count_steps",
        module="runtime.count_steps",
        title="Counting optimizer steps",
        peer="the same calls without the hooks",
        needs=("torch",),
        quick=("--rounds", "2", "--steps", "20"),
    ),
    Benchmark(
        name="idle_groups",
        module="runtime.idle_groups",
        title="Idle groups of gloo",
        peer="as many of torch's own",
        needs=("torch",),
        quick=("--rounds", "1"),
    ),
    Benchmark(
        name="rank_memory",
        module="runtime.rank_memory",
        title="Memory of a rank",
        peer="its share: weights, gradients, optimizer state, live graphs",
        needs=("torch",),
        quick=("--case", "0", "--hidden", "512"),
    ),
    Benchmark(
        name="activations",
        module="runtime.activations",
        title="Memory of activations",
        peer="graphs that are kept",
        needs=("torch",),
        quick=("--hidden", "128", "--rounds", "2"),
    ),
    Benchmark(
        name="pipeline",
        module="pipeline",
        title="The runtime",
        peer="torch.distributed.pipelining; DeepSpeed's pipeline engine; the schedule's theory",
        needs=("torch",),
        words=("torch", "deepspeed", "theory", "staged", "overhead"),
        quick=("torch", "deepspeed", "theory", "--microbatches", "8", "--rounds", "2"),
    ),
    Benchmark(
        name="adaptive",
        module="pipeline",
        title="A schedule that follows measured costs",
        peer="the best order for the true costs, given beforehand",
        needs=("torch",),
        words=("adaptive", "--microbatches", "16", "--rounds", "15"),
        quick=("adaptive", "--microbatches", "8", "--rounds", "3"),
    ),
    Benchmark(
        name="schedules",
        module="pipeline.simulated",
        title="Schedules on the same costs, simulated",
        peer="torch.distributed.pipelining's schedules",
        needs=("torch",),
        words=("--ranks", "2", "3", "4", "6", "8"),
        quick=("--ranks", "2"),
    ),
    Benchmark(
        name="message",
        module="runtime.message",
        title="An action and its message",
        peer="a bare send and receive of gloo",
        needs=("torch",),
        quick=("--rounds", "2"),
    ),
    Benchmark(
        name="tracking",
        module="runtime.tracking",
        title="The tracker beside a training",
        peer="the same run without track",
        quick=("--rounds", "1", "--steps", "50", "--long", "5000"),
    ),
    Benchmark(
        name="trace_hook",
        module="runtime.trace_hook",
        title="A timeline of an engine that is not ours",
        peer="the same training without one",
        needs=("torch",),
        quick=("--pairs", "10"),
    ),
    Benchmark(
        name="tensor",
        module="runtime.tensor",
        title="Shared layers",
        peer="torch's tensor-parallel styles, put on by hand",
        needs=("torch",),
        ranks=True,
        words=("--cpu",),
        quick=("--cpu", "--rounds", "3"),
    ),
    Benchmark(
        name="equality",
        module="runtime.equality",
        title="Random models in random layouts",
        peer="the plain model's own error",
        needs=("torch", "hypothesis"),
        quick=("--draws", "50", "--seed", "2"),
    ),
    Benchmark(
        name="mismatches",
        module="runtime.mismatches",
        title="A rank that differs",
        peer="a bound of ten seconds",
        needs=("torch",),
        ranks=True,
        quick=("--only", "seed"),
    ),
    Benchmark(
        name="morph",
        module="morph",
        title="A node is lost",
        peer="torch elastic with DCP",
        needs=("torch",),
        quick=(),
    ),
    Benchmark(
        name="planner",
        module="planner",
        title="Planning",
        peer="FASOP's search, written from its description",
        needs=("numpy",),
        quick=("--limit", "2", "--rounds", "3"),
    ),
    Benchmark(
        name="planner_exact",
        module="planner.exact",
        title="Plans beside the best of all",
        peer="every plan there is, one by one",
        needs=("numpy",),
        quick=("--count", "100"),
    ),
    Benchmark(
        name="planner_certificates",
        module="planner.certificates",
        title="Certificates beside every plan",
        peer="every plan of small questions, by an enumeration of its own",
        needs=("numpy",),
        quick=("--questions", "60"),
    ),
    Benchmark(
        name="planner_limits",
        module="planner.limits",
        title="The time of a search",
        peer="the limit that it was given",
        needs=("numpy",),
        quick=("--limits", "2"),
    ),
    Benchmark(
        name="simulator",
        module="simulator",
        title="The simulator",
        peer="the engine, measured",
        needs=("torch",),
        quick=("--quick",),
    ),
    Benchmark(
        name="formats",
        module="formats",
        title="Progress formats",
        peer="the truth; steps and totals right in 90 % of 134 programs, no false step",
        quick=("--only", "nanogpt"),
    ),
    Benchmark(
        name="ends",
        module="ends",
        title="Ends of jobs, staged",
        peer="the truth; cause, actor, rank, node and remedies right",
        quick=("--staged", "--only", "TIMEOUT"),
    ),
    Benchmark(
        name="launch_scripts",
        module="launch_scripts",
        title="Public launch scripts",
        peer="a plain bash with stubs; program and words right or honestly refused, none invented",
        scripts=True,
        quick=("--only", "modded-nanogpt"),
    ),
    Benchmark(
        name="scale",
        module="scale",
        title="Up to 10,240 nodes",
        peer="none; growth from 64 nodes on, and a simulated cluster",
        needs=("numpy", "pandas"),
        quick=("--most", "256", "--only", "submit", "manager"),
    ),
    Benchmark(
        name="metadata",
        module="commands.metadata",
        title="Calls on the file server",
        peer="none",
        quick=("--nodes", "2", "--seconds", "30", "--settle", "30"),
    ),
    Benchmark(
        name="scheduler_load",
        module="commands.scheduler_load",
        title="Requests to the scheduler",
        peer="budgets; the lab's Slurm counts",
        quick=(),
    ),
    Benchmark(
        name="truth",
        module="commands.truth",
        title="vjob's word against Slurm's",
        peer="the lab's scontrol and sacct",
        words=("--again",),
        quick=("--only", "(plain|split), scancel, training", "--again"),
    ),
    Benchmark(
        name="accounting",
        module="commands.accounting",
        title="Every second of real runs",
        peer="a count from sacct, lines and events",
        needs=("torch",),
        quick=("--only", "plain|morph"),
    ),
    Benchmark(
        name="checkpoint_faults",
        module="runtime.checkpoint_faults",
        title="Checkpoints under faults",
        peer="none; every call of one rank fails once",
        needs=("torch",),
        quick=("--draws", "1"),
    ),
    Benchmark(
        name="mutants",
        module="suite.mutants",
        title="Mutants",
        peer="none; the share of changed lines that a test notices",
        needs=("torch", "coverage"),
        quick=("--count", "4"),
    ),
    Benchmark(
        name="mutation",
        module="commands.mutation",
        title="Changed files of runs",
        peer="none; no traceback, bounded time and memory",
        quick=("--rounds", "2"),
    ),
    Benchmark(
        name="hostile",
        module="hostile",
        title="Every command over hostile folders and failing disks",
        peer="10 s of processor, 500 MB, a sentence, no secret",
        quick=("--draws", "20"),
    ),
    Benchmark(
        name="storm",
        module="commands.storm",
        title="Live pages under a storm of connections",
        peer="none; the owner is served within 2 s",
        quick=("--connections", "1000", "--asks", "5"),
    ),
    Benchmark(
        name="secrets",
        module="secrets",
        title="Secrets that others would see",
        peer="detect-secrets; gitleaks' rules, from a file that --rules names",
        needs=("detect_secrets",),
        quick=("--seeds", "1"),
    ),
    Benchmark(
        name="containers",
        module="commands.containers",
        title="Containers",
        peer="the same start, bare",
        image=True,
        quick=("--rounds", "3"),
    ),
)
