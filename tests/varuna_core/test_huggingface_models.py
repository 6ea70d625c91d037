"""A folder of Hugging Face's, trained in stages and exported, is the model that trained plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.foreign import load_transformers, make_text
from tests.ranks.foreign_rank import BATCH
from tests.ranks.huggingface_rank import MODELS, WORLD, build
from tests.ranks.start import collect, start_ranks
from varuna_core import open_weights
from varuna_core.checkpoint.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what transformers itself warns of
]
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("huggingface")
    with start_ranks("tests.ranks.huggingface_rank", 1, str(made)) as ranks:
        ((code, output),) = collect(ranks)
    assert code == 0, output
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_over_two_stages_gives_the_plain_models_logits(
    folder: Path, name: str, tmp_path: Path
) -> None:
    words = ["export", "--hf", str(folder / f"{name}.ckpt"), str(tmp_path / "out")]
    words += ["--config", str(folder / name), "--shard-mb", "0"]
    assert main(words) == 0
    plain = torch.load(folder / f"{name}.plain.pt")
    library = load_transformers()
    kind = getattr(library, type(build(name, 0)).__name__)
    # A folder of GPT-2 without its head says so in its config, and its names are the head's now.
    found, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert all(parameter.dtype == torch.float32 for parameter in found.parameters())
    with torch.no_grad():
        logits = found.eval()(**make_text(BATCH, 99)).logits
    torch.testing.assert_close(logits, plain["logits"], atol=2e-5, rtol=2e-5)
    assert found.state_dict().keys() == plain["state"].keys()
    for key, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, plain["state"][key], atol=2e-6, rtol=2e-5, msg=key)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(
        open_weights(tmp_path / "out")
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_own_stage_and_no_more(folder: Path, name: str) -> None:
    said = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD)]
    for one in said:
        assert one["read"] == one["held"] < one["whole"], said
