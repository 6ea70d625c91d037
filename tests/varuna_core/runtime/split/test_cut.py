"""CutPoints alone: the identity, and who watches them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.small import chain
from tests.segments import announce_segments
from varuna_core.runtime.split.cut import CutPoint, SplitError, cut_before
from varuna_core.runtime.split.split import split_model


def test_an_unwatched_cut_returns_what_it_got() -> None:
    cut, x = CutPoint(), torch.ones(2)
    assert cut(x) is x
    assert cut(x, None) == (x, None)
    assert cut({"x": x}) == {"x": x}


def test_a_hook_on_a_cut_is_called() -> None:
    cut = CutPoint()
    cut.register_forward_hook(lambda module, args, out: out * 3)
    assert cut(torch.ones(1)) == 3


def test_segments_are_announced_in_order_and_the_watch_ends() -> None:
    cuts, seen = [CutPoint() for _ in range(2)], []
    with announce_segments(seen.append):
        for cut in cuts:
            cut(torch.ones(1))
    cuts[0](torch.ones(1))
    assert seen == [0, 1, 2]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(input=x)
        return self.head(x)


def test_cuts_are_put_before_modules_whose_code_is_left_alone() -> None:
    model, seen = Named(), []
    x = torch.ones(1, 2)
    plain, names = model(x), model.state_dict().keys()
    cut_before(model.blocks, model.head)
    with announce_segments(seen.append):
        assert torch.equal(model(x), plain)
    assert seen == [0, 1, 2, 3, 4]
    assert model.state_dict().keys() == names
    with pytest.raises(SplitError, match="a cut already exists before this Linear"):
        cut_before(model.head)
    with pytest.raises(TypeError, match="takes modules of the model"):
        cut_before([model.head])  # type: ignore[arg-type]


def test_a_hook_of_the_users_own_may_pass_a_cut() -> None:
    """It is called before each block that stands before a stage, too: cuts are counted."""

    def enter(block: Any, args: tuple[torch.Tensor, ...], by_name: dict[str, Any]) -> Any:
        return args, {**by_name, "input": block.mark(by_name["input"])}

    model, x = Named(), torch.ones(1, 2)
    for block in model.blocks:
        block.mark = CutPoint()
        block.register_forward_pre_hook(enter, with_kwargs=True)
    split = split_model(model, {"x": x}, 3, "2-1-1")
    out, _ = chain([split.make_stage(i) for i in range(3)], {"x": x})
    assert torch.equal(out, model(x))


def test_the_package_gives_cutpoint_and_imports_no_torch_for_itself() -> None:
    code = (
        "import sys, varuna_core\n"
        "assert 'torch' not in sys.modules\n"
        "from varuna_core import CutPoint\n"
        "assert CutPoint.__module__ == 'varuna_core.runtime.split.cut'\n"
        "assert not hasattr(varuna_core, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_cut_in_a_users_own_hook_is_counted_where_the_block_is_a_stand_in() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    points = [CutPoint() for _ in model]

    def enter(point: CutPoint) -> Any:
        return lambda module, args: (point(args[0]),)

    for block, point in zip(model, points, strict=True):
        block.register_forward_pre_hook(enter(point))
    inputs = {"input": torch.rand(2, 4)}
    split = split_model(model, inputs, 3, "1-1-3")
    out, _ = chain([split.make_stage(index) for index in range(3)], inputs)
    torch.testing.assert_close(out, model(**inputs))
