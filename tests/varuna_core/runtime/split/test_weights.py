"""Ties, and weights that do not depend on the layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import small as models
from tests.models.small import Gpt, chain, chain_backward, make_inputs, sum_gradients
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.random_streams import derive_seed
from varuna_core.runtime.split.split import TiedWeight, split_model
from varuna_core.runtime.split.weights import parameters_on_meta

INPUTS = make_inputs()


def test_ties_are_found_with_the_stages_that_hold_them() -> None:
    split = split_model(models.TiedGpt(), INPUTS, 3)
    assert split.ties == (TiedWeight(names=("wte.weight", "head.weight"), stages=(0, 2)),)
    split = split_model(models.ThreeWayGpt(), INPUTS, 3, "0-4-0")
    (tie,) = split.ties
    assert set(tie.names) == {"wte.weight", "head.weight", "middle"} and tie.stages == (0, 1, 2)


def test_a_module_in_two_stages_is_a_tie_of_its_parameters() -> None:
    split = split_model(models.SharedBlockGpt(), INPUTS, 2, "2-2")
    names = {name for tie in split.ties for name in tie.names}
    assert names == {name for name in split.groups if name.startswith("blocks.0.")}
    assert {tie.stages for tie in split.ties} == {(0, 1)}


def test_a_named_pair_becomes_one_parameter_equal_at_the_start() -> None:
    model = models.NamedPairGpt()
    with torch.no_grad():
        model.lm_head_weight.add_(1)
    pair = [("wte.weight", "lm_head_weight")]
    oracle = models.NamedPairGpt()
    oracle.load_state_dict(model.state_dict())
    oracle.lm_head_weight = oracle.wte.weight = model.lm_head_weight
    loss = oracle(**INPUTS)
    loss.backward()
    for num_stages in (1, 3):
        split = split_model(model, INPUTS, num_stages, shared_weights=pair)
        assert split.ties == (
            TiedWeight(
                names=("lm_head_weight", "wte.weight"), stages=(0, num_stages - 1)[:num_stages]
            ),
        )
        stages = [split.make_stage(i) for i in range(num_stages)]
        out, log = chain(stages, INPUTS)
        chain_backward(log, out)
        assert torch.equal(out, loss)
        summed = sum_gradients(split, stages)["lm_head_weight"]
        torch.testing.assert_close(summed, oracle.wte.weight.grad)


def test_parameters_that_nothing_uses_lie_somewhere() -> None:
    class Idle(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].idle = torch.nn.Parameter(torch.ones(3))
            self.spare = torch.nn.Linear(2, 2)

    split = split_model(Idle(), INPUTS, 3, "0-4-0")
    assert split.owners("blocks.2.idle") == (1,)
    assert len(split.owners("spare.weight")) == 1
    held = [set(split.make_stage(i).parameters()) for i in range(3)]
    assert set().union(*held) == set(dict(Idle().named_parameters()))


def test_looking_at_a_parameters_shape_is_no_use_of_it() -> None:
    class Looking(Gpt):
        def run_block(self, number: int, x: Tensor) -> Tensor:
            return super().run_block(number, x.to(self.wte.weight.dtype)) * self.head.weight.dim()

    split = split_model(Looking(), INPUTS, 3, "0-4-0")
    assert split.owners("wte.weight") == (0,) and split.owners("head.weight") == (2,)


@pytest.mark.parametrize("partition", ["4", "2-2", "0-4-0"])
def test_seeded_weights_are_the_same_in_any_layout(partition: str) -> None:
    with parameters_on_meta():
        model = models.TiedGpt()
    assert all(parameter.is_meta for parameter in model.parameters())
    num_stages = partition.count("-") + 1
    split = split_model(model, INPUTS, num_stages, partition)
    stages = [split.make_stage(i, seed=7) for i in range(num_stages)]
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters().items():
            assert torch.equal(found.setdefault(name, parameter), parameter)
    whole = split_model(models.TiedGpt(), INPUTS, 1).make_stage(0, seed=7).parameters()
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    torch.manual_seed(derive_seed(7, "blocks.1.up.weight"))
    assert torch.equal(found["blocks.1.up.weight"], torch.nn.Linear(16, 32).weight)
    chain(stages, INPUTS)


def test_a_meta_model_takes_its_stage_from_a_state_dict() -> None:
    plain = models.RootGpt()
    state = plain.state_dict()
    with torch.device("meta"):
        model = models.RootGpt()
    split = split_model(model, INPUTS, 3)
    stages = [split.make_stage(i, state_dict=state) for i in range(3)]
    assert torch.equal(chain(stages, INPUTS)[0], plain(**INPUTS))


def test_a_meta_model_that_looks_at_values_is_run_dry_on_zeros() -> None:
    with parameters_on_meta():
        model = models.BranchGpt()
    split = split_model(model, INPUTS, 2)
    assert split.record.real
    chain([split.make_stage(i, seed=1) for i in range(2)], INPUTS)


def test_weights_without_a_source_are_refused() -> None:
    with parameters_on_meta():
        model = models.RootGpt()
    split = split_model(model, INPUTS, 1)
    with pytest.raises(SplitError, match="'shift' is on the meta device"):
        split.make_stage(0)
    with pytest.raises(SplitError, match="no rule of the model initializes 'shift': give its"):
        split.make_stage(0, seed=1)
    with pytest.raises(SplitError, match=r"'shift' has shape \[1\] in the state dict"):
        split.make_stage(0, state_dict={"shift": torch.ones(1)})


def test_the_seed_of_a_name_is_what_the_documentation_says() -> None:
    """Stored runs rely on it: it never changes."""
    assert derive_seed(1234, "wte.weight") == 5145194877943245236


class Ruled(Gpt):
    """Rules as models have them: a container's own, and one for `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(16))
        self.mixer = nn.MultiheadAttention(16, 2)
        self.reset_parameters()
        self.apply(self._init_weights)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.shift, 2)
        nn.init.constant_(self.wte.weight, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
        if isinstance(module, models.Block):
            nn.init.constant_(module.down.weight, 7)


def test_a_models_own_rules_initialise_it_in_the_order_of_its_constructor() -> None:
    with parameters_on_meta():
        model = Ruled()
    found = split_model(model, INPUTS, 1).make_stage(0, seed=7).parameters()
    assert set(found) == set(dict(Ruled().named_parameters()))
    assert (found["shift"] == 2).all() and (found["wte.weight"] == 3).all()
    assert (found["blocks.3.down.weight"] == 7).all() and 0.4 < found["head.weight"].std() < 0.6
    assert (found["norm.weight"] == 1).all() and (found["mixer.in_proj_bias"] == 0).all()
    torch.manual_seed(derive_seed(7, "mixer.in_proj_weight"))
    xavier = nn.init.xavier_uniform_(torch.empty(48, 16))
    assert torch.equal(found["mixer.in_proj_weight"], xavier)


def test_a_rule_that_needs_other_tensors_is_told() -> None:
    class Needy(Gpt):
        def reset_parameters(self) -> None:
            self.wte.weight[0] = float(self.norm.weight.sum())

    with parameters_on_meta():
        model = Needy()
    with pytest.raises(SplitError, match=r"of 'the model' that initializes 'wte\.weight' fails"):
        split_model(model, INPUTS, 1).make_stage(0, seed=7)


def test_whole_numbers_that_no_rule_fills_are_refused() -> None:
    class Placed(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.arange(16))

    with torch.device("meta"):
        model = Placed()
    with pytest.raises(SplitError, match="no rule of the model initializes 'positions'"):
        split_model(model, INPUTS, 1).make_stage(0, seed=7)


def test_a_name_that_the_state_dict_lacks_is_refused() -> None:
    """Not drawn in silence: that would leave the whole model untrained."""
    state = {f"other.{name}x": value for name, value in Gpt().state_dict().items()}
    with pytest.raises(
        SplitError, match=r"has none of 'wte.weight', .*; it has 'other.wte.weightx'"
    ):
        split_model(Gpt(), INPUTS, 1).make_stage(0, state_dict=state, seed=1)
    state = Gpt().state_dict()
    del state["wte.weight"]
    for stage in range(2):  # on the rank that would not read it, too
        with pytest.raises(SplitError, match=r"has no 'wte.weight'; it has 'wpe"):
            split_model(Gpt(), INPUTS, 2).make_stage(stage, state_dict=state, seed=1)
    tied = models.TiedGpt()
    state = tied.state_dict()
    del state["wte.weight"]
    split_model(models.TiedGpt(), INPUTS, 1).make_stage(0, state_dict=state)
