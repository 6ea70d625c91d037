"""Map the built-in programs' tensors to the names and shapes of Hugging Face's models.

    ours                                theirs (GPT2LMHeadModel)             in their file
    tokens.weight, head.weight          transformer.wte.weight               once
    blocks.0.attention.qkv.weight       transformer.h.0.attn.c_attn.weight   transposed
    ours                                theirs (BertForPreTraining)
    blocks.0.attention.qkv.weight       bert.encoder.layer.0.attention.self.query, key, value
    ours                                theirs (Llama, Mistral, Qwen2, Qwen3 ForCausalLM)
    blocks.0.attention.query.weight     model.layers.0.self_attn.q_proj.weight

A Hugging Face config for which our model would compute other results is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from varuna_core.records.training import Llama, parse_llama

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
LLAMA = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_BLOCK = {
    "norm_1": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.inner": "mlp.up_proj",
    "mlp.output": "mlp.down_proj",
}
TIES: Mapping[Program, tuple[str, str]] = {
    "pretrain_gpt": ("tokens.weight", "head.weight"),
    "pretrain_bert": ("tokens.weight", "token_head.decoder.weight"),
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The names and form of one of our tensors in Hugging Face's model."""

    parts: tuple[str, ...]
    """Hugging Face's names of the tensor; with several names, each is an equal part of our tensor
    along the first dimension."""

    transposed: bool = False
    """True if Hugging Face's layer stores the transposed weight."""

    also: tuple[str, ...] = ()
    """Other names that Hugging Face's files use for the same tensor."""


def find_place(program: Program, name: str, llama: Llama | None = None) -> Place:
    """Return the place of a program's tensor in Hugging Face's model; KeyError if unknown."""
    match = _BLOCK.fullmatch(name)
    owner, _, kind = name.rpartition(".")
    if llama is not None:
        if match is None:
            return Place(parts=(f"{LLAMA[owner]}.{kind}",))
        number, part, kind = match.groups()
        return Place(parts=(f"model.layers.{number}.{LLAMA_BLOCK[part]}.{kind}",))
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
    """Sizes of a built-in model."""

    layers: int
    hidden: int
    sequence: int
    vocab: int
    llama: Llama | None = None


def find_tie(program: Program, sizes: Sizes) -> tuple[str, str] | None:
    """Return the names of the tensor that is both embedding and head; None if it is not tied."""
    return TIES[program] if sizes.llama is None or sizes.llama.tied else None


def _list_llama(sizes: Sizes, heads: int, llama: Llama) -> dict[str, tuple[int, ...]]:
    hidden, size = sizes.hidden, llama.head_size
    found: dict[str, tuple[int, ...]] = {"tokens.weight": (sizes.vocab, hidden)}
    for block in (f"blocks.{number}" for number in range(sizes.layers)):
        found[f"{block}.norm_1.weight"] = (hidden,)
        widths = {"query": heads * size, "key": llama.kv_heads * size}
        for part, width in {**widths, "value": widths["key"]}.items():
            found[f"{block}.attention.{part}.weight"] = (width, hidden)
            if llama.qkv_bias:
                found[f"{block}.attention.{part}.bias"] = (width,)
        if llama.qk_norm:
            found[f"{block}.attention.query_norm.weight"] = (size,)
            found[f"{block}.attention.key_norm.weight"] = (size,)
        found[f"{block}.attention.output.weight"] = (hidden, widths["query"])
        found[f"{block}.norm_2.weight"] = (hidden,)
        found[f"{block}.mlp.gate.weight"] = (llama.inner, hidden)
        found[f"{block}.mlp.inner.weight"] = (llama.inner, hidden)
        found[f"{block}.mlp.output.weight"] = (hidden, llama.inner)
    return found | {"norm.weight": (hidden,), "head.weight": (sizes.vocab, hidden)}


def list_shapes(program: Program, sizes: Sizes, heads: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a program's model, in order; only Llama needs `heads`."""
    if sizes.llama is not None:
        return _list_llama(sizes, heads, sizes.llama)
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


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that a checkpoint stores besides the tensors."""

    heads: int | None = None
    sequence: int = 0
    llama: Llama | None = None


def read_known(user: Any) -> ModelFacts:
    """Read the model's facts (heads, sequence, Llama) from the user's state in a checkpoint, where
    a built-in program saves them; none is known for other programs."""
    model = user.get("model") if isinstance(user, dict) else None
    if not isinstance(model, dict):
        return ModelFacts()
    heads, sequence, llama = (model.get(word) for word in ("heads", "sequence", "llama"))
    return ModelFacts(
        heads=heads if isinstance(heads, int) else None,
        sequence=sequence if isinstance(sequence, int) else 0,
        llama=parse_llama(llama) if isinstance(llama, dict) else None,
    )


def find_program(
    shapes: Mapping[str, tuple[int, ...]], known: ModelFacts | None = None
) -> tuple[Program, Sizes] | None:
    """Return the built-in program whose model has exactly these tensors, and its sizes, or None."""
    known = known or ModelFacts()
    llama = known.llama
    if "tokens.weight" not in shapes or (llama is None and "positions.weight" not in shapes):
        return None
    program: Program = "pretrain_bert" if "token_head.decoder.bias" in shapes else "pretrain_gpt"
    numbers = [int(match[1]) for name in shapes if (match := _BLOCK.fullmatch(name))]
    vocab, *width = shapes["tokens.weight"]
    sequence = known.sequence if llama is not None else shapes["positions.weight"][0]
    sizes = Sizes(
        layers=max(numbers, default=-1) + 1,
        hidden=sum(width),
        sequence=sequence,
        vocab=vocab,
        llama=llama,
    )
    plain = {name: tuple(shape) for name, shape in shapes.items()}
    wanted = list_shapes(program, sizes, known.heads or 0)
    return (program, sizes) if plain == wanted else None


# Their config.json.

GPT2_WANTED: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
"""Hugging Face's default of each key, and the values for which our model computes the same."""

BERT_WANTED: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("gelu", ("gelu",)),
    "layer_norm_eps": (1e-12, (1e-12,)),
    "position_embedding_type": ("absolute", ("absolute",)),
    "type_vocab_size": (2, (2,)),
    "is_decoder": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "tie_word_embeddings": (True, (True,)),
}
LLAMA_WANTED: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "hidden_act": ("silu", ("silu",)),
    "mlp_bias": (False, (False,)),
}
LLAMA_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MODEL_TYPES: Mapping[str, Program] = {
    "gpt2": "pretrain_gpt",
    "bert": "pretrain_bert",
    **dict.fromkeys(LLAMA_CLASSES, "pretrain_gpt"),
}


def list_differences(program: Program, config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a Hugging Face config that the built-in model does not support."""
    kind = config.get("model_type")
    if MODEL_TYPES.get(str(kind)) != program:
        return [f"model_type {kind!r} is not what {program} trains"]
    gpt = program == "pretrain_gpt"
    found = []
    table = LLAMA_WANTED if kind in LLAMA_CLASSES else GPT2_WANTED if gpt else BERT_WANTED
    for key, (default, wanted) in table.items():
        value = config.get(key, default)
        if value not in wanted:
            found.append(f"{key} {value!r}, ours is {wanted[0]!r}")
    if kind in LLAMA_CLASSES:
        return found + list(_list_llama_differences(str(kind), config))
    hidden = config.get("n_embd" if gpt else "hidden_size", 768)
    inner = config.get("n_inner") if gpt else config.get("intermediate_size", 3072)
    if inner not in (None, 4 * hidden):
        found.append(f"{'n_inner' if gpt else 'intermediate_size'} {inner}, ours is {4 * hidden}")
    return found


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions as transformers 5 or earlier versions write them."""
    held = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    return {**base, **held}


def _list_llama_differences(kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    rope = _read_rope(config)
    way = rope.get("rope_type", rope.get("type", "default"))
    if way not in ("default", "llama3"):
        yield f"rope_type {way!r}, but only 'default' and 'llama3' are supported"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']}, but only 1 is supported"
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        if not isinstance(config.get(key), int):
            yield f"{key} {config.get(key)!r}, but a number is required"
    if "rope_theta" not in rope:
        yield "rope_theta is not given"
    if kind == "llama" and config.get("attention_bias"):
        yield "attention_bias True, but a bias in attention's output is not supported"
    if kind == "qwen3" and config.get("attention_bias"):
        yield "attention_bias True, but a bias beside query-key norms is not supported"
    slides = config.get("use_sliding_window", kind == "mistral")
    window, length = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    if slides and window is not None and window < length:
        yield f"sliding_window {window}, but only attention to the whole sequence is supported"


def _read_llama(config: Mapping[str, Any]) -> Llama:
    kind, heads, rope = config["model_type"], config["num_attention_heads"], _read_rope(config)
    scaling = None
    if rope.get("rope_type", rope.get("type")) == "llama3":
        words = ("factor", "low_freq_factor", "high_freq_factor")
        first, low, high = (float(rope[word]) for word in words)
        scaling = (first, low, high, float(rope["original_max_position_embeddings"]))
    return Llama(
        inner=config["intermediate_size"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_base=float(rope["rope_theta"]),
        rope_scaling=scaling,
    )


def _render_llama(sizes: Sizes, heads: int, llama: Llama, dtype: str) -> dict[str, Any]:
    kind = "qwen3" if llama.qk_norm else "qwen2" if llama.qkv_bias else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": llama.rope_base}
    made = {
        "model_type": kind,
        "architectures": [LLAMA_CLASSES[kind]],
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.sequence,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": llama.kv_heads,
        "head_dim": llama.head_size,
        "intermediate_size": llama.inner,
        "hidden_act": "silu",
        "rms_norm_eps": llama.norm_eps,
        "tie_word_embeddings": llama.tied,
        "attention_bias": False,
        "rope_theta": llama.rope_base,  # for transformers 4
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
    if llama.rope_scaling is not None:
        words = ("factor", "low_freq_factor", "high_freq_factor")
        rope |= {"rope_type": "llama3", **dict(zip(words, llama.rope_scaling[:3], strict=True))}
        rope["original_max_position_embeddings"] = int(llama.rope_scaling[3])
        made["rope_scaling"] = rope
    return made | {"rope_parameters": rope}


def read_sizes(program: Program, config: Mapping[str, Any]) -> tuple[Sizes, int]:
    """Read sizes and number of heads from a Hugging Face config."""
    gpt = program == "pretrain_gpt"
    if config.get("model_type") in LLAMA_CLASSES:
        held = Sizes(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            sequence=config.get("max_position_embeddings", 0),
            vocab=config["vocab_size"],
            llama=_read_llama(config),
        )
        return held, config["num_attention_heads"]
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
    own: dict[str, Any] = {
        ours: int(config.get(theirs, usual[ours])) for ours, theirs in words.items()
    }
    vocab = int(config.get("vocab_size", 50257 if gpt else 30522))
    return Sizes(**own, vocab=vocab), int(
        config.get("n_head" if gpt else "num_attention_heads", 12)
    )


def render_config(program: Program, sizes: Sizes, heads: int, dtype: str) -> dict[str, Any]:
    """Render Hugging Face's config for one of our models."""
    if sizes.llama is not None:
        return _render_llama(sizes, heads, sizes.llama, dtype)
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
