"""The built-in programs' tensors under the names, and in the shapes, of Hugging Face's models.

    ours                                theirs (GPT2LMHeadModel)             in their file
    tokens.weight, head.weight          transformer.wte.weight               once
    blocks.0.attention.qkv.weight       transformer.h.0.attn.c_attn.weight   transposed
    ours                                theirs (BertForPreTraining)
    blocks.0.attention.qkv.weight       bert.encoder.layer.0.attention.self.query, key, value

A config of theirs whose mathematics is not ours is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Program = Literal["pretrain_gpt", "pretrain_bert"]

GPT = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
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
TIES: Mapping[Program, tuple[str, str]] = {
    "pretrain_gpt": ("tokens.weight", "head.weight"),
    "pretrain_bert": ("tokens.weight", "token_head.decoder.weight"),
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our tensors lies in their model."""

    parts: tuple[str, ...]
    """Their names; of several each is an equal part along the first dimension."""

    transposed: bool = False
    """Their linear layers hold the weight the other way round."""

    also: tuple[str, ...] = ()
    """Other names of theirs for the same tensor."""


def find_place(program: Program, name: str) -> Place:
    """Where our tensor of this name lies in theirs; KeyError for a name that is not ours."""
    match = _BLOCK.fullmatch(name)
    owner, _, kind = name.rpartition(".")
    if program == "pretrain_gpt":
        if match is None:
            return Place(parts=(f"{GPT[owner]}.{kind}",))
        number, part, kind = match.groups()
        turned = kind == "weight" and not part.startswith("norm")
        return Place(parts=(f"transformer.h.{number}.{GPT_BLOCK[part]}.{kind}",), transposed=turned)
    if match is None:
        also = ("cls.predictions.bias",) if name == "token_head.decoder.bias" else ()
        return Place(parts=(f"{BERT[owner]}.{kind}",), also=also)
    number, part, kind = match.groups()
    head = f"bert.encoder.layer.{number}"
    if part == "attention.qkv":
        words = ("query", "key", "value")
        return Place(parts=tuple(f"{head}.attention.self.{word}.{kind}" for word in words))
    return Place(parts=(f"{head}.{BERT_BLOCK[part]}.{kind}",))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a built-in model."""

    layers: int
    hidden: int
    sequence: int
    vocab: int


def list_shapes(program: Program, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Every tensor of the program's model, in its order."""
    hidden, inner = sizes.hidden, 4 * sizes.hidden
    found: dict[str, tuple[int, ...]] = {
        "tokens.weight": (sizes.vocab, hidden),
        "positions.weight": (sizes.sequence, hidden),
    }

    def add(owner: str, *weight: int) -> None:
        found[f"{owner}.weight"] = weight
        found[f"{owner}.bias"] = weight[:1]

    if program == "pretrain_bert":
        found["types.weight"] = (2, hidden)
        add("norm", hidden)
    for number in range(sizes.layers):
        block = f"blocks.{number}"
        add(f"{block}.norm_1", hidden)
        add(f"{block}.attention.qkv", 3 * hidden, hidden)
        add(f"{block}.attention.output", hidden, hidden)
        add(f"{block}.norm_2", hidden)
        add(f"{block}.mlp.inner", inner, hidden)
        add(f"{block}.mlp.output", hidden, inner)
    if program == "pretrain_gpt":
        add("norm", hidden)
        found["head.weight"] = (sizes.vocab, hidden)
        return found
    add("token_head.dense", hidden, hidden)
    add("token_head.norm", hidden)
    add("token_head.decoder", sizes.vocab, hidden)
    add("pooler", hidden, hidden)
    add("order_head", 2, hidden)
    return found


def find_program(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Program, Sizes] | None:
    """The built-in program, and its sizes, whose model has exactly these tensors; None if none."""
    if "tokens.weight" not in shapes or "positions.weight" not in shapes:
        return None
    program: Program = "pretrain_bert" if "token_head.decoder.bias" in shapes else "pretrain_gpt"
    numbers = [int(match[1]) for name in shapes if (match := _BLOCK.fullmatch(name))]
    (vocab, *width), (sequence, *_) = shapes["tokens.weight"], shapes["positions.weight"]
    sizes = Sizes(
        layers=max(numbers, default=-1) + 1, hidden=sum(width), sequence=sequence, vocab=vocab
    )
    plain = {name: tuple(shape) for name, shape in shapes.items()}
    return (program, sizes) if plain == list_shapes(program, sizes) else None


# Their config.json.

GPT2_WANTED: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
"""Their default, and what ours computes."""

BERT_WANTED: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("gelu", ("gelu",)),
    "layer_norm_eps": (1e-12, (1e-12,)),
    "position_embedding_type": ("absolute", ("absolute",)),
    "type_vocab_size": (2, (2,)),
    "is_decoder": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
MODEL_TYPES: Mapping[str, Program] = {"gpt2": "pretrain_gpt", "bert": "pretrain_bert"}


def list_differences(program: Program, config: Mapping[str, Any]) -> list[str]:
    """What of their model is computed otherwise by ours; empty if they are equal."""
    kind = config.get("model_type")
    if MODEL_TYPES.get(str(kind)) != program:
        return [f"model_type {kind!r} is not what {program} trains"]
    gpt = program == "pretrain_gpt"
    found = []
    for key, (default, wanted) in (GPT2_WANTED if gpt else BERT_WANTED).items():
        value = config.get(key, default)
        if value not in wanted:
            found.append(f"{key} {value!r}, ours is {wanted[0]!r}")
    hidden = config.get("n_embd" if gpt else "hidden_size", 768)
    inner = config.get("n_inner") if gpt else config.get("intermediate_size", 3072)
    if inner not in (None, 4 * hidden):
        found.append(f"{'n_inner' if gpt else 'intermediate_size'} {inner}, ours is {4 * hidden}")
    return found


def read_sizes(program: Program, config: Mapping[str, Any]) -> tuple[Sizes, int]:
    """Sizes and heads of their config."""
    gpt = program == "pretrain_gpt"
    words = (
        {"layers": "n_layer", "hidden": "n_embd", "sequence": "n_positions"}
        if gpt
        else {
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "sequence": "max_position_embeddings",
        }
    )
    usual = {"layers": 12, "hidden": 768, "sequence": 1024 if gpt else 512}
    held = {ours: int(config.get(theirs, usual[ours])) for ours, theirs in words.items()}
    vocab = int(config.get("vocab_size", 50257 if gpt else 30522))
    return Sizes(**held, vocab=vocab), int(
        config.get("n_head" if gpt else "num_attention_heads", 12)
    )


def render_config(program: Program, sizes: Sizes, heads: int, dtype: str) -> dict[str, Any]:
    """Their config of one of our models."""
    if program == "pretrain_gpt":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": sizes.vocab,
            "n_positions": sizes.sequence,
            "n_embd": sizes.hidden,
            "n_layer": sizes.layers,
            "n_head": heads,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": dtype,
        }
    return {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.sequence,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * sizes.hidden,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
