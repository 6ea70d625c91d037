"""Models of Hugging Face's transformers trained in stages and replicas as by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.foreign import BUILD, LIBRARY, is_installed, make_text
from tests.ranks.foreign_rank import LAYOUTS, build
from tests.ranks.start import collect, start_ranks
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.weights import parameters_on_meta

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what transformers itself warns of
]
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("foreign")
    with start_ranks("tests.ranks.foreign_rank", 1, str(made)) as ranks:
        ((code, output),) = collect(ranks)
    assert code == 0, output
    return made


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("name", BUILD)
def test_a_foreign_model_trains_as_the_plain_one(folder: Path, name: str, world_size: int) -> None:
    if not is_installed(name):
        pytest.skip(f"{LIBRARY[name]} is not installed")
    plain = torch.load(folder / "1" / f"{name}.0.pt")
    assert plain["losses"][0] != plain["losses"][-1]
    seen: set[str] = set()
    for rank in range(world_size):
        ours = torch.load(folder / str(world_size) / f"{name}.{rank}.pt")
        torch.testing.assert_close(ours["losses"], plain["losses"], atol=2e-6, rtol=2e-5)
        for key, tensor in ours["state"].items():
            torch.testing.assert_close(tensor, plain["state"][key], atol=2e-6, rtol=2e-5, msg=key)
        seen |= ours["state"].keys()
    assert seen == plain["state"].keys()


def test_gpt2_on_the_meta_device_is_initialised_by_its_own_rules() -> None:
    with parameters_on_meta():
        model = build("gpt2")
    stage = split_model(model, make_text(2), 2).make_stage(1, seed=1)
    found = stage.parameters()
    assert 0.015 < found["transformer.h.3.mlp.c_fc.weight"].std() < 0.025
    # Smaller by the root of twice the number of layers: a rule of GPT-2's for one name.
    assert 0.005 < found["transformer.h.3.mlp.c_proj.weight"].std() < 0.01
    assert (found["transformer.h.3.mlp.c_proj.bias"] == 0).all()
