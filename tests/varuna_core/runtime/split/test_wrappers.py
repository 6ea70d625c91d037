"""Models within wrappers of torch's: taken out of them, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import small
from varuna_core import Varuna, cut_before
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.wrappers import take_plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's compiler and of DataParallel


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(model: nn.Module) -> dict[str, Any]:
    return {
        "torch.compile": torch.compile(model),
        "DataParallel": nn.DataParallel(model),
        "DistributedDataParallel": nn.parallel.DistributedDataParallel(model),
        "both": torch.compile(nn.parallel.DistributedDataParallel(model)),
    }


def test_a_wrapped_model_is_trained_under_the_plain_ones_names(group: None) -> None:
    plain, inputs = small.Gpt(), small.make_inputs(2)
    alone = Varuna(plain, "0;", inputs, 2, 2, device="cpu")
    expected = alone.step(inputs)[0]
    for kind, wrapped in wrap(plain).items():
        model = Varuna(wrapped, "0;", inputs, 2, 2, device="cpu")
        assert model.state_dict().keys() == plain.state_dict().keys(), kind
        assert torch.equal(model.step(inputs)[0], expected), kind
        model.close()
    alone.close()


def test_cuts_are_placed_in_a_wrapped_model_by_the_plain_ones_names(group: None) -> None:
    for kind in ("torch.compile", "both"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        wrapped = wrap(net)[kind]
        assert cut_before(wrapped, "1.*") is wrapped
        assert hasattr(net[1][0], "cut_before_this"), kind


def test_a_wrapper_within_the_model_is_refused_by_name(group: None) -> None:
    model = small.Gpt()
    model.blocks[1] = torch.compile(model.blocks[1])  # type: ignore[assignment]  # a module
    with pytest.raises(SplitError, match=r"module 'blocks\.1' is wrapped by torch\.compile: pass"):
        take_plain(model)
    model = small.Gpt()
    model.blocks[1] = nn.parallel.DistributedDataParallel(model.blocks[1])
    with pytest.raises(SplitError, match=r"module 'blocks\.1' is wrapped by DistributedDataPar"):
        Varuna(model, "0;", small.make_inputs(2), 2, 2, device="cpu")
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module, not 3"):
        take_plain(3)


def test_a_sharded_model_is_refused(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = small.Gpt()
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(SplitError, match=r"module 'blocks\.0' is sharded by fully_shard: .*zero=1"):
        take_plain(model)


def test_a_model_that_was_compiled_in_place_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small.Gpt()
    model.blocks[0].compile()
    with caplog.at_level(logging.WARNING):
        assert take_plain(model) is model
    assert "module 'blocks.0' was compiled in place, but its copy in a stage is not" in caplog.text
