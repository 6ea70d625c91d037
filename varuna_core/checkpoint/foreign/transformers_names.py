"""Convert our weights, in memory, to the names and shapes of Hugging Face's transformers.

    state = torch.load("model.pt")      # python -m varuna_core.checkpoint export ckpt model.pt
    GPT2LMHeadModel(config).load_state_dict(rename_gpt(state), strict=False)
    BertForPreTraining(config).load_state_dict(rename_bert(state), strict=False)

`strict=False` is needed because some versions list tables that they compute themselves; nothing
else is missing. For large models use `python -m varuna_core.checkpoint export ckpt folder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from varuna_core.checkpoint.foreign.names import Program, find_place


def rename_gpt(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename for GPT2LMHeadModel, whose linear layers store their weights transposed."""
    return _rename("pretrain_gpt", state)


def rename_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename for BertForPreTraining, which has separate query, key and value."""
    return _rename("pretrain_bert", state)


def _rename(program: Program, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = find_place(program, name)
        held = tensor.t() if place.transposed else tensor
        for theirs, part in zip(place.parts, held.chunk(len(place.parts)), strict=True):
            found[theirs] = part.contiguous()
        found |= {other: found[place.parts[0]] for other in place.also}
    return found
