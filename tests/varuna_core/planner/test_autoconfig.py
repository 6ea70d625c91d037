"""The ancestor's call: the best depth and micro-batch size, equal to trying them all."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from varuna_core import AutoConfig
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.profile.profile_file import write_profile
from varuna_core.planner.profile.transformer import Transformer, estimate_profile

MODEL = Transformer(name="m", layers=6, hidden=1024, heads=8, length=512, vocabulary=8000)


def make_profile(*kinds: str) -> Profile:
    return estimate_profile(
        MODEL, kinds or ("A10",), micro_batches=(1, 2, 4), degrees=(1,), inter_gb_s=2.0
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path / "m.profile.json", make_profile())
    return tmp_path


def test_the_least_of_all_depths(folder: Path) -> None:
    said: list[str] = []
    config = AutoConfig(8, 4, 32, folder, say=said.append)
    stages, micro_batch, took = config.get_min()
    assert config.batch_times.keys() == config.micro_batch.keys() == set(range(1, 9))
    assert took == min(config.batch_times.values()) == config.batch_times[stages]
    assert micro_batch == config.micro_batch[stages]
    assert len(said) == 8
    for count, candidate in config.candidates.items():
        shape = candidate.option.shape
        assert len(candidate.placed.sites) == count
        assert shape.replicas * count <= 8 and 32 % (shape.replicas * shape.micro_batch) == 0
    assert config.candidates[3].option.shape.replicas == 2, "two GPUs are left over"


def test_memory_rules_depths_out(folder: Path) -> None:
    whole = AutoConfig(4, 4, 16, folder, verbose=False)
    need = sum(whole.profile.model.parameters[1]) * 9 + 1.5 * 2**30  # weights, ZeRO 1
    config = AutoConfig(4, 4, 16, folder, gpu_memory_capacity=need, verbose=False)
    assert 1 in whole.batch_times and 1 not in config.batch_times and 4 in config.batch_times
    with pytest.raises(PlanningError, match="memory"):
        AutoConfig(4, 4, 16, folder, gpu_memory_capacity=2e9, verbose=False).get_min()


def test_sizes_between_measured_ones_only_if_asked_for(folder: Path) -> None:
    config = AutoConfig(1, 1, 3, folder, verbose=False)
    assert set(config.micro_batch.values()) == {1}
    filled = AutoConfig(1, 1, 3, folder, verbose=False, autofill_missing_compute=True)
    assert set(filled.micro_batch.values()) == {3}


def test_a_profile_of_one_machine_plans_for_one_machine(tmp_path: Path) -> None:
    """Nobody measured a link between nodes, and no plan needs one; tied weights meet inside."""
    whole = make_profile()
    assert whole.model.ties
    inside = {key: link for key, link in whole.network.links.items() if key[2] == "intra"}
    alone = replace(whole, network=replace(whole.network, links=inside))
    write_profile(tmp_path / "m.profile.json", alone)
    config = AutoConfig(4, 4, 16, tmp_path, verbose=False)
    assert config.batch_times.keys() == {1, 2, 3, 4}
    with pytest.raises(MissingData, match="inter-node link from A10 to A10"):
        AutoConfig(8, 4, 16, tmp_path, verbose=False)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match="num_gpus 0"):
        AutoConfig(0, 4, 16, folder)
    with pytest.raises(PlanningError, match="gpu_memory_capacity"):
        AutoConfig(4, 4, 16, folder, gpu_memory_capacity=-1)
    with pytest.raises(PlanningError, match="holds no profile"):
        AutoConfig(4, 4, 16, folder / "none")
    write_profile(folder / "n.profile.json", make_profile("A10", "A40"))
    with pytest.raises(PlanningError, match="several profiles"):
        AutoConfig(4, 4, 16, folder)
    with pytest.raises(PlanningError, match="A10, A40"):
        AutoConfig(4, 4, 16, folder / "n.profile.json")
    with pytest.raises(MissingData, match="B200"):
        AutoConfig(4, 4, 16, folder / "n.profile.json", gpu="B200")
    assert AutoConfig(1, 1, 4, folder / "n.profile.json", gpu="A40", verbose=False).get_min()
    bare = make_profile()
    gpus = {kind: replace(gpu, cells={}) for kind, gpu in bare.gpus.items()}
    write_profile(folder / "o.profile.json", replace(bare, gpus=gpus))
    with pytest.raises(MissingData, match="tensor degree 1"):
        AutoConfig(1, 1, 4, folder / "o.profile.json")


def test_it_loads_no_torch() -> None:
    code = "import sys\nfrom varuna_core import AutoConfig\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
