"""Models that know nothing of us, with random weights: cut between their blocks by hooks."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.split.cut import CutPoint, cut_before

Inputs = dict[str, Any]
VOCAB, LENGTH, WIDTH, NUM_LAYERS = 64, 16, 32, 4
T5_CARRIES = ("position_bias", "encoder_hidden_states", "encoder_decoder_position_bias")


def load_transformers() -> Any:
    """The library, without what it warns of at import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        return transformers


def build_gpt2() -> nn.Module:
    """Tied embedding."""
    library = load_transformers()
    config = library.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=2,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = library.GPT2LMHeadModel(config)
    body: Any = model.transformer
    cut_before(body.h, body.ln_f)
    return model


def build_llama() -> nn.Module:
    """Rotary positions, grouped attention, a head of its own."""
    library = load_transformers()
    config = library.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = library.LlamaForCausalLM(config)
    body: Any = model.model
    cut_before(*body.layers, body.norm)
    return model


def build_bert() -> nn.Module:
    """Tied weight and tied bias."""
    library = load_transformers()
    config = library.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = library.BertForMaskedLM(config)
    body: Any = model
    cut_before(*body.bert.encoder.layer, body.cls)
    return model


def build_t5() -> nn.Module:
    """The encoder's result, and biases by position, are handed to all blocks. The model returns the
    former, so there is no cut behind the blocks that would not carry it."""
    library = load_transformers()
    config = library.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = library.T5ForConditionalGeneration(config)
    cut_before(model, "*.block.*", carry=T5_CARRIES)
    return model


class Megatron(nn.Module):
    """Megatron-core's GPT without tensor parallelism; needs a process group.

    Two things of it want CUDA: a global buffer for attention scores (it would also keep what the
    dry run makes), and its random streams (no dropout draws from them here).
    """

    def __init__(self) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        buffer = type(parallel_state.get_global_memory_buffer())
        buffer.get_tensor = lambda self, shape, dtype, name: torch.empty(shape, dtype=dtype)
        type(tensor_parallel.get_cuda_rng_tracker()).fork = lambda self, *name: nullcontext()
        config = TransformerConfig(
            num_layers=NUM_LAYERS, hidden_size=WIDTH, num_attention_heads=2,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
            bias_dropout_fusion=False, masked_softmax_fusion=False,
        )  # fmt: skip
        self.inner = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=True,
        )  # fmt: skip
        for layer in self.inner.decoder.layers:
            layer.cut = CutPoint()
            layer.register_forward_pre_hook(enter_by_name, with_kwargs=True)
        cut_before(self.inner.decoder.final_layernorm)

    def forward(self, input_ids: Tensor, labels: Tensor, **ignored: Any) -> Tensor:
        length = input_ids.shape[1]
        positions = torch.arange(length).expand(input_ids.shape)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        loss: Tensor = self.inner(input_ids, positions, mask, labels=labels).mean()
        return loss


def enter_by_name(layer: Any, args: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    return args, {**inputs, "hidden_states": layer.cut(inputs["hidden_states"])}


def make_text(size: int, seed: int = 1, length: int = LENGTH) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (size, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, length - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


BUILD: dict[str, Callable[[], nn.Module]] = {
    "gpt2": build_gpt2,
    "llama": build_llama,
    "bert": build_bert,
    "t5": build_t5,
    "megatron": Megatron,
}
LIBRARY = dict.fromkeys(BUILD, "transformers") | {"megatron": "megatron.core"}


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(LIBRARY[name]) is not None
    except ModuleNotFoundError:  # of the package above
        return False
