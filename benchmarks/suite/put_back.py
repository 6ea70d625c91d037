"""A defect of benchmarks.suite.defects within one process: put back, or the places where it acts.

The last line of the changed `varuna_core/varuna.py` calls `enter`. A test can find a defect only
where the patched code acts otherwise than the code that is there; the probes note the file of each
test that comes to such a place, so that the others need not be run with it.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONTROL = "none"
"""No defect, but the probes: a test that fails then is left out."""
PROBED = "probed.jsonl"
"""What they note, in the copy of the checkout."""
_kept: list[Any] = []
"""Probes, for as long as the process lives."""


def find_file(test: str) -> str:
    return test.partition("::")[0]


def enter(name: str, folder: str) -> object:
    """Put a defect back until this process ends, or note where each of them would act."""
    from tests.varuna_core.equality.defects import put_back

    if name == CONTROL:
        install_probes(Path(folder) / PROBED)
        return None
    defect = put_back(name)
    defect.__enter__()
    return defect


def install_probes(path: Path) -> None:
    """After the modules that they replace were imported, which is why they are imported here."""
    from tests.varuna_core.equality.defects import change
    from varuna_core import varuna
    from varuna_core.runtime.comm.links import Links
    from varuna_core.runtime.engine import weight_grads
    from varuna_core.runtime.engine.graph_offload import SavedGraph
    from varuna_core.runtime.engine.loss_seed import LossSeed
    from varuna_core.runtime.optim.hooks import ParameterHooks
    from varuna_core.runtime.optim.updates import Updates
    from varuna_core.runtime.split import random_streams, rehearsal, split
    from varuna_core.runtime.split.attributes import KeptAttributes
    from varuna_core.runtime.split.inputs import FreshInputs
    from varuna_core.runtime.tensor_parallel.draws import ShardedDraws

    noted: set[tuple[str, str]] = set()

    def note(name: str) -> None:
        file = find_file(os.environ.get("PYTEST_CURRENT_TEST", ""))
        if (name, file) not in noted:
            noted.add((name, file))
            with path.open("a") as written:
                print(json.dumps([name, file]), file=written)

    def probe(name: str, place: Any, attribute: str, differs: Callable[..., bool]) -> None:
        real = getattr(place, attribute)

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling() and differs(real, *args, **options):
                note(name)
            return real(*args, **options)

        _kept.append(change(place, attribute, call))
        _kept[-1].__enter__()

    def raises(real: Any, *args: Any) -> bool:
        try:
            real(*args)
        except Exception:
            return True
        return False

    def is_computed(real: Any, module: Any) -> bool:
        weight = module._parameters.get("weight")
        linear = type(module).forward is nn.Linear.forward
        return linear and (weight is None or hasattr(weight, "placements"))

    def would_move(real: Any, grad: Any, input: Any, weight: Any) -> bool:
        flat = input.reshape(-1, input.shape[-1])
        return bool(flat.stride() == (1, len(flat)))

    def would_silence(real: Any, hooks: Any) -> bool:
        same = all(place is parameter for parameter, place in hooks.masters.list_places())
        return bool(hooks._hooked) and not same

    def was_drawn() -> bool:
        """Python's or numpy's stream is not as it was after it was seeded last."""
        return bool(left) and left[0] != pickle.dumps(random_streams.read_foreign_streams())

    def draws_until_seed(real: Any, derived: int) -> bool:
        drawn = was_drawn()
        real(derived)
        left[:] = [pickle.dumps(random_streams.read_foreign_streams())]
        return drawn

    def draws_until_end(real: Any, state: Any) -> bool:
        drawn = was_drawn()
        left.clear()
        return drawn

    left: list[bytes] = []

    linear = weight_grads._LinearForward
    probe("attributes", KeptAttributes, "restore", lambda _, self: bool(self.list_changed()))
    probe("complex_linear", linear, "_may_split", lambda r, *a: r(*a) != torch.is_grad_enabled())
    probe("computed_attributes", rehearsal, "list_results", lambda real, model: bool(real(model)))
    probe("computed_weights", weight_grads, "_is_linear", is_computed)
    probe("foreign_streams", random_streams, "seed_foreign_streams", draws_until_seed)
    probe("foreign_streams", random_streams, "set_foreign_streams", draws_until_end)
    probe("forked_child", Links, "_is_ours", lambda real, self: not real(self))
    probe("hooked_graphs", rehearsal, "may_hook_saved", lambda real: not real())
    probe("hooks_in_half", ParameterHooks, "run_before", would_silence)
    probe("inputs_in_place", FreshInputs, "make", lambda _, self, inputs: self.is_needed)
    probe("inputs_in_place", varuna, "refuse_unforeseen", raises)
    probe("inputs_in_place", split, "refuse_unseen_changes", raises)
    probe("offloaded_nested", SavedGraph, "_take", lambda _, self, tensor: tensor.is_nested)
    probe("one_optimizer", Updates, "attach", lambda _, self, given, scale: len(given) > 1)
    probe("repeated_masks", ShardedDraws, "running", lambda *_: True)
    probe("rounded_weights", LossSeed, "__init__", lambda *_, split=None, **__: split is not None)
    probe("row_gradients", weight_grads, "_make_input_grad", would_move)
    probe("selective_flex", rehearsal.Rehearsal, "_note_composed", lambda *_: True)


def remove_probes() -> None:
    while _kept:
        _kept.pop().__exit__(None, None, None)
