"""The ancestor's planner call: the best number of stages and micro-batch size for so many GPUs.

```python
config = AutoConfig(num_gpus=32, gpus_per_vm=4, batch_size=512, profile_folder="profiles")
stages, micro_batch, step_s = config.get_min()
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.profile.profile_file import read_profile
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Candidate, Search
from varuna_core.planner.search.space import Wishes

SUFFIX = ".profile.json"


class AutoConfig:
    """Plans in the constructor. As many replicas as the GPUs and the batch allow for each number
    of stages; what is left over stays idle."""

    batch_times: dict[int, float]
    """Seconds of a step, by number of stages; what does not fit is not there."""
    micro_batch: dict[int, int]
    """The best micro-batch size, by number of stages."""
    candidates: dict[int, Candidate]
    """The whole plan, by number of stages."""

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        profile_folder: str | Path,
        gpu_memory_capacity: float | None = None,
        verbose: bool = True,
        autofill_missing_compute: bool = False,
        *,
        gpu: str | None = None,
        training: TrainingModel | None = None,
        limit_s: float = 30.0,
        say: Callable[[str], object] = print,
    ) -> None:
        """`profile_folder` holds one profile, or is its file; `gpu_memory_capacity` is in bytes.

        Micro-batch sizes are those that were measured; `autofill_missing_compute` takes sizes
        between and beyond them too. `gpu` says which of several kinds of a profile is meant,
        `training` how the program trains if not as ours in half precision; `limit_s` is for each
        number of stages.
        """
        if min(num_gpus, gpus_per_vm, batch_size) < 1:
            raise PlanningError(
                f"num_gpus {num_gpus}, gpus_per_vm {gpus_per_vm}, batch_size {batch_size}: "
                "each must be 1 or more"
            )
        self.profile = read_profile(find_file(Path(profile_folder)))
        self.gpu = _choose_gpu(self.profile, gpu)
        if gpu_memory_capacity is not None:
            self.profile = _limit_memory(self.profile, self.gpu, gpu_memory_capacity)
        self.training = replace(training or TrainingModel(batch=batch_size), batch=batch_size)
        self.cluster = _build_cluster(self.gpu, num_gpus, gpus_per_vm)
        self.sizes = self._list_sizes(autofill_missing_compute)
        self.limit_s, self.num_gpus = limit_s, num_gpus
        self.batch_times, self.micro_batch, self.candidates = {}, {}, {}
        self._refusal = "no number of stages is possible"
        for stages in range(1, min(num_gpus, self.profile.model.num_segments) + 1):
            found = self._plan(stages)
            if found is None:
                continue
            self.batch_times[stages] = found.step_s
            self.micro_batch[stages] = found.option.shape.micro_batch
            self.candidates[stages] = found
            if verbose:
                shape = found.option.shape
                say(
                    f"{stages} stages x {shape.replicas} replicas, micro-batch "
                    f"{shape.micro_batch}: {found.step_s:.4g} s"
                )

    def get_min(self) -> tuple[int, int, float]:
        """Stages, micro-batch size and seconds of the fastest; PlanningError if nothing fits."""
        if not self.batch_times:
            raise PlanningError(self._refusal)
        stages = min(self.batch_times, key=lambda count: self.batch_times[count])
        return stages, self.micro_batch[stages], self.batch_times[stages]

    def _list_sizes(self, is_filled: bool) -> list[int]:
        measured = {size for size, tensor in self.profile.find_gpu(self.gpu).cells if tensor == 1}
        if not measured:
            raise MissingData(f"the profile has no times of {self.gpu} with tensor degree 1")
        if is_filled and len(measured) > 1:
            return list(range(1, max(measured) + 1))
        return sorted(measured)

    def _plan(self, stages: int) -> Candidate | None:
        """With the most replicas that can be, of the micro-batch sizes that divide their share."""
        for replicas in range(self.num_gpus // stages, 0, -1):
            share, left = divmod(self.training.batch, replicas)
            sizes = [size for size in self.sizes if not left and share % size == 0]
            found = [one for size in sizes if (one := self._search(stages, replicas, size))]
            if found:
                return min(found, key=lambda one: one.step_s)
        return None

    def _search(self, stages: int, replicas: int, size: int) -> Candidate | None:
        wishes = Wishes(stages=stages, replicas=replicas, tensor=1, micro_batch=size)
        deadline = within(self.limit_s / len(self.sizes))
        try:
            search = Search(self.profile, self.training, self.cluster, wishes, deadline)
            return search.run().best
        except MissingData:
            raise
        except PlanningError as error:
            self._refusal = str(error)
            return None


def find_file(folder: Path) -> Path:
    """The one profile of a folder."""
    if folder.is_file():
        return folder
    found = sorted(folder.glob("*" + SUFFIX)) if folder.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise PlanningError(f"{folder} holds several profiles ({names}): give the file itself")
    raise PlanningError(
        f"{folder} holds no profile (*{SUFFIX}): `vjob profile` or varuna_core.Profiler makes one"
    )


def _choose_gpu(profile: Profile, gpu: str | None) -> str:
    if gpu is not None:
        profile.find_gpu(gpu)
        return gpu
    if len(profile.gpus) == 1:
        return next(iter(profile.gpus))
    raise PlanningError(
        f"the profile is of {', '.join(sorted(profile.gpus))}: say which with gpu=, or use `vjob "
        "plan`, which plans for several kinds at once"
    )


def _limit_memory(profile: Profile, gpu: str, capacity: float) -> Profile:
    if not 0 < capacity < math.inf:
        raise PlanningError(f"gpu_memory_capacity is {capacity}: expected bytes")
    held = profile.find_gpu(gpu)
    limited = replace(held, memory_bytes=capacity)
    return replace(profile, gpus={**profile.gpus, gpu: limited})


def _build_cluster(gpu: str, num_gpus: int, gpus_per_vm: int) -> Cluster:
    """The last machine may have fewer."""
    whole, rest = divmod(num_gpus, gpus_per_vm)
    kinds = []
    if whole:
        kinds.append(NodeKind(name="vm", gpu=gpu, gpus=gpus_per_vm, count=whole))
    if rest:
        kinds.append(NodeKind(name="rest", gpu=gpu, gpus=rest, count=1))
    return Cluster(kinds=tuple(kinds))
