"""Profile a model: measure its times and memory on the available GPUs and links, for the planner.

profiler = Profiler(model, device, fp16=True)       # on every rank
profiler.initialize(get_batch)                      # get_batch(size) gives a batch
profiler.set_optimizer(optimizer)                   # of the same kind, for each segment
profiler.profile_all(get_batch, [1, 2, 4], out_folder="profiles")

sizes grow ─► each rank measures its segments ─► all ranks gather ─► until one is out of memory
all ranks' figures, times of messages and all-reduces ─► one file, which later profiles extend
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.planner.profile.profile import GpuProfile, Model, Network, Profile
from varuna_core.profiling.bench import BuildOptimizer
from varuna_core.profiling.links import measure_network
from varuna_core.profiling.measure import (
    Measured,
    Measuring,
    choose_samples,
    digest_model,
    find_classes,
    list_ties,
)
from varuna_core.profiling.profile_file import (
    Detail,
    build_cell,
    describe_profile,
    extend_file,
    read_kept,
)
from varuna_core.profiling.ranks import Crew
from varuna_core.records.training import name_profile_file
from varuna_core.runtime.comm.devices import may_share, take_device
from varuna_core.runtime.comm.values import map_leaves
from varuna_core.runtime.engine.microbatch import GetBatch
from varuna_core.runtime.optim.optimizers import build_optimizer
from varuna_core.runtime.optim.precision import choose_precision
from varuna_core.runtime.optim.updates import build_loss_scale
from varuna_core.runtime.split.split import Split, split_model

LARGEST = 64
"""Default micro-batch sizes double up to this one."""
LIMIT_S = 600.0
"""Seconds after which no larger size is begun."""
SAMPLES = 3
"""The number of segments measured in each class of equal ones."""
LOSS_SCALE = 1024.0


class Profiler:
    """Profiles a model on one rank; all ranks must make the same calls."""

    def __init__(
        self,
        model: nn.Module,
        device: int | str | torch.device = -1,
        fp16: bool = False,
        local_rank: int = -1,
        shared_weights: Sequence[Sequence[str]] | None = None,
        *,
        precision: str | None = None,
        tensor: int | Sequence[int] = 1,
        tensor_plan: Mapping[str, Any] | None = None,
        name: str | None = None,
        digest: str | None = None,
        kind: str | None = None,
        samples: int = SAMPLES,
        groups: Sequence[Sequence[int]] = (),
        prepare: Callable[[nn.Module], None] = lambda module: None,
        selective: bool = True,
        limit_s: float = LIMIT_S,
        seed: int = 1234,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`tensor` is a degree, or several, each of which divides the number of ranks.

        `name` and `digest` identify the model, by default its class and a hash of its shapes;
        `kind` names this rank's GPU. `groups` of ranks have their sums timed in addition to the
        usual ones. `prepare` is called with each segment's module before it is measured; if it
        compiles the module, `selective` must be False, since `recompute: selective` does not work
        with compiled modules. `say` gets progress on rank 0.
        """
        self.model, self.device = model, take_device(device, local_rank)
        self.precision = choose_precision(fp16, precision)
        self.degrees = (tensor,) if isinstance(tensor, int) else tuple(tensor)
        self.shared_weights, self.tensor_plan = shared_weights, tensor_plan
        self.name, self.digest = name or type(model).__name__, digest
        self.samples, self.groups, self.seed = max(1, samples), groups, seed
        self.prepare, self.selective, self.limit_s = prepare, selective, limit_s
        self.crew = Crew(self.device, kind, may_share(device))
        for degree in self.degrees:
            if degree < 1 or self.crew.world_size % degree:
                raise ValueError(f"tensor {degree} must divide the {self.crew.world_size} ranks")
        self.say = say if say is not None and self.crew.rank == 0 else lambda line: None
        self.get_batch: GetBatch | None = None
        self.details: list[Detail] = []
        self._build_optimizer: BuildOptimizer = lambda held: build_optimizer("adamw", held)
        self._loss_scale = LOSS_SCALE if self.precision.name == "fp16" else 1.0

    def initialize(self, get_batch: GetBatch) -> None:
        """Set the function that gives inputs of a number of samples, as the model takes them."""
        self.get_batch = get_batch

    def set_optimizer(
        self,
        optimizer: Any,
        loss_scale: float | str = LOSS_SCALE,
        init_loss_scale: float = LOSS_SCALE,
        min_loss_scale: float | None = None,
        amp_opt_level: str | None = None,
    ) -> None:
        """Set the optimizer whose class and settings are timed on each segment's parameters, or a
        function that builds one. The optimizer's own parameters and `amp_opt_level` are ignored."""
        is_made = hasattr(optimizer, "param_groups")
        if not is_made and not callable(optimizer):
            raise ValueError(f"{type(optimizer).__name__} neither is nor builds an optimizer")
        self._build_optimizer = remake_optimizer(optimizer) if is_made else optimizer
        if self.precision.name == "fp16":
            self._loss_scale = build_loss_scale(
                loss_scale, init_loss_scale, min_loss_scale or 1.0
            ).scale

    def profile_all(
        self,
        get_batch: GetBatch | Sequence[int] | None = None,
        microbatch_sizes: Sequence[int] | None = None,
        out_folder: str | Path = "profiles",
        *,
        path: str | Path | None = None,
        links: bool = True,
    ) -> Profile:
        """Measure, write `<out_folder>/<model>.profile.json` or `path`, and return the profile.

        Default sizes double until memory or time (`limit_s` per degree) is spent. An existing file
        must be of the same model and software, and is extended.
        """
        if get_batch is not None and not callable(get_batch):
            get_batch, microbatch_sizes = None, get_batch
        if get_batch is not None:
            self.initialize(get_batch)
        sizes = sorted(set(microbatch_sizes or double_up(LARGEST)))
        limit_s = self.limit_s if not microbatch_sizes else None
        if not sizes or sizes[0] < 1:
            raise ValueError(f"micro-batch sizes {sizes}: expected 1 or more")
        target = Path(path) if path is not None else Path(out_folder) / name_profile_file(self.name)
        error: Exception | None = None
        kept = None
        try:
            split, empty = self._split(sizes[0])
            model = self._describe(split)
            if self.crew.rank == 0:
                kept = read_kept(target)
                if kept is not None:
                    kept.check_is_of(model, self._list_software())
        except Exception as caught:
            error = caught
        self.crew.agree(error)
        classes = find_classes(split)
        samples = choose_samples(classes, self.samples)
        self.say(f"{self.name}: {len(split.stages)} segments, {len(samples)} to be measured")
        found: list[Measured] = []
        for degree in self.degrees:
            measuring = Measuring(
                split,
                empty,
                self.crew,
                degree,
                classes=classes,
                samples=samples,
                tensor_plan=self.tensor_plan,
                loss_scale=self._loss_scale,
                seed=self.seed,
                prepare=self.prepare,
                selective=self.selective,
                say=self.say,
            )
            found += measuring.run(self._make_inputs, sizes, self._build_optimizer, limit_s)
        self.details = [one.describe(classes, samples) for one in found]
        network = Network(links={}, all_reduces={})
        if links:
            network = measure_network(self.crew, used=self.groups, say=self.say)
        try:
            made = self._assemble(model, found, network)
            if self.crew.rank == 0:
                made = extend_file(target, kept, made, self.details)
                self.say(describe_profile(made, self.details))
                self.say(f"written to {target}")
        except Exception as caught:
            error = caught
        self.crew.agree(error)
        everybodys: Profile = self.crew.gather(made if self.crew.rank == 0 else None)[0]
        return everybodys

    # The model.

    def _make_inputs(self, size: int) -> dict[str, Any]:
        if self.get_batch is None:
            raise ValueError("no batches: call initialize(get_batch), or pass it to profile_all")
        cast = self.precision.cast(self.get_batch(size))
        moved: dict[str, Any] = map_leaves(
            lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, dict(cast)
        )
        return moved

    def _split(self, size: int) -> tuple[Split, Split | None]:
        """Split the model into one stage per segment, as counted by a dry run, and again with an
        empty stage (None if the model has one segment)."""
        inputs = self._make_inputs(size)
        types = self.precision.choose_types(self.model)
        more: dict[str, Any] = {
            "shared_weights": self.shared_weights,
            "device": self.device,
            "types": types,
        }
        count = len(split_model(self.model, inputs, 1, **more).record.costs)
        each = split_model(self.model, inputs, count, [1] * count, **more)
        if count == 1:
            return each, None
        return each, split_model(self.model, inputs, 3, [1, 0, count - 1], **more)

    def _describe(self, split: Split) -> Model:
        """Return the entry that describes the model in the profile, as yet without measurements."""
        digest = self.digest
        if digest is None:
            digest = digest_model(self.model, self._make_inputs(1), self.precision.name)
        parameters = {n: p for n, p in self.model.named_parameters() if split.groups[n][0] == n}
        counts = [0] * len(split.stages)
        for name, parameter in parameters.items():
            for segment in split.owners(name):
                counts[segment] += parameter.numel()
        return Model(
            name=self.name,
            digest=digest,
            num_segments=len(counts),
            parameters={1: tuple(counts)},
            ties=list_ties(split),
        )

    def _list_software(self) -> dict[str, str]:
        return {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}

    def _assemble(self, model: Model, found: Sequence[Measured], network: Network) -> Profile:
        gpus: dict[str, GpuProfile] = {}
        for kind in self.crew.kinds:
            own = [one for one in found if one.kind == kind]
            cells = {
                (size, one.tensor): build_cell(figures, one.empty.get(size), one.spreads.get(size))
                for one in own
                for size, figures in one.cells.items()
            }
            if cells:
                gpus[kind] = GpuProfile(
                    memory_bytes=min(p.memory_bytes for p in self.crew.places if p.kind == kind),
                    cells=cells,
                    optimizer_s={one.tensor: tuple(one.optimizer_s) for one in own},
                    copies_beside=self.device.type == "cuda",
                )
        if not gpus:
            where = "; ".join(f"{one.kind}: {one.stopped or 'no ranks'}" for one in found)
            raise RuntimeError(f"nothing could be measured: {where}")
        shares = {one.tensor: tuple(map(int, one.parameters)) for one in found}
        return Profile(
            model=replace(model, parameters={**model.parameters, **shares}),
            software=self._list_software(),
            gpus=gpus,
            network=network,
        )


def double_up(largest: int) -> list[int]:
    return [2**power for power in range(largest.bit_length()) if 2**power <= largest]


def remake_optimizer(optimizer: Any) -> BuildOptimizer:
    """Return a function that builds an optimizer of the same class and settings for parameters."""
    group = {**getattr(optimizer, "defaults", {}), **optimizer.param_groups[0]}
    taken = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in group.items() if key in taken and key != "params"}

    def build(held: list[nn.Parameter]) -> Any:
        return type(optimizer)(held, **options)

    return build
