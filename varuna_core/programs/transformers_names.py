"""Our weights under the names of Hugging Face's transformers, and in its shapes.

    state = torch.load("model.pt")      # python -m varuna_core.checkpoint export ckpt model.pt
    GPT2LMHeadModel(config).load_state_dict(rename_gpt(state), strict=False)
    BertForPreTraining(config).load_state_dict(rename_bert(state), strict=False)

`strict=False`, for some versions list tables that they make themselves; nothing else is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

GPT = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "head.weight": "lm_head.weight",
}
GPT_BLOCK = {
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp.inner": "mlp.c_fc",
    "mlp.output": "mlp.c_proj",
}
BERT = {
    "tokens": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "types": "bert.embeddings.token_type_embeddings",
    "norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "token_head.dense": "cls.predictions.transform.dense",
    "token_head.norm": "cls.predictions.transform.LayerNorm",
    "token_head.decoder": "cls.predictions.decoder",
    "order_head": "cls.seq_relationship",
}
BERT_BLOCK = {
    "attention.output": "attention.output.dense",
    "norm_1": "attention.output.LayerNorm",
    "mlp.inner": "intermediate.dense",
    "mlp.output": "output.dense",
    "norm_2": "output.LayerNorm",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)\.(weight|bias)")


def rename_gpt(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For GPT2LMHeadModel, whose linear layers hold their weights transposed."""
    found = {}
    for name, tensor in state.items():
        match = _BLOCK.fullmatch(name)
        if match is None:
            found[_rename(name, GPT)] = tensor
            continue
        number, part, kind = match.groups()
        is_linear = kind == "weight" and not part.startswith("norm")
        found[f"transformer.h.{number}.{GPT_BLOCK[part]}.{kind}"] = (
            tensor.t().contiguous() if is_linear else tensor
        )
    return found


def rename_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For BertForPreTraining, which has query, key and value apart."""
    found = {}
    for name, tensor in state.items():
        match = _BLOCK.fullmatch(name)
        if match is None:
            found[_rename(name, BERT)] = tensor
            if name == "token_head.decoder.bias":
                found["cls.predictions.bias"] = tensor
            continue
        number, part, kind = match.groups()
        head = f"bert.encoder.layer.{number}"
        if part == "attention.qkv":
            for word, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{head}.attention.self.{word}.{kind}"] = piece.contiguous()
        else:
            found[f"{head}.{BERT_BLOCK[part]}.{kind}"] = tensor
    return found


def _rename(name: str, table: Mapping[str, str]) -> str:
    if name in table:
        return table[name]
    owner, _, kind = name.rpartition(".")
    return f"{table[owner]}.{kind}"
