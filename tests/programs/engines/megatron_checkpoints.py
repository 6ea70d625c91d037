"""megatron-core's GPT on CPUs: `megatron_checkpoints.py save FOLDER [LAYOUT]`, or `load FOLDER`.

`save` fills two tensor-parallel halves of each stage (of LAYOUT, else one) and writes them as
Megatron-LM's legacy files (legacy/), by megatron-core's own distributed checkpoints (dist/), and
the whole model's logits (logits.pt). `load` reads those of these folders that are there in one
process, writes logits and weights of each, and saves what it read of dist/ again, each layer
under names of its own (numbered/). As in megatron_core.py, its calls for CUDA mean the CPU.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its fused functions, compiled, find no GPU either

import torch
import torch.distributed as dist


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


for maker in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, maker, on_cpu(getattr(torch, maker)))
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402  # after its CUDA is the CPU
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random as drawing  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 4, 32, 4, 16, 64
TOKENS = torch.randint(VOCAB, (3, SEQUENCE), generator=torch.Generator().manual_seed(4))


@contextlib.contextmanager
def fork(self: Any, name: str = "") -> Iterator[None]:
    yield


drawing.CudaRNGStatesTracker.fork = fork


def build(tensor: int, pipeline: int, layout: str | None) -> GPTModel:
    parallel_state.initialize_model_parallel(tensor, pipeline)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        perform_initialization=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_model_parallel_layout=layout,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    )


def fill(model: GPTModel) -> None:
    """Parts that ranks share are drawn by each of them; the others by all alike."""
    half = parallel_state.get_tensor_model_parallel_rank()
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            place = int(parts[parts.index("layers") + 1])
            parts[parts.index("layers") + 1] = str(model.decoder.layers[place].layer_number)
        if name == "output_layer.weight":
            parts = ["embedding", "word_embeddings", "weight"]
        is_shared = getattr(weight, "tensor_model_parallel", False)
        seed = 7 * sum(place * ord(char) for place, char in enumerate("".join(parts), 1))
        generator = torch.Generator().manual_seed(2 * seed + half * is_shared)
        with torch.no_grad():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                weight.add_(1)


def predict(model: GPTModel) -> torch.Tensor | None:
    """Logits of all words, on the last stage."""
    positions = torch.arange(SEQUENCE)[None].expand(len(TOKENS), -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE), 1).bool()[None, None]
    if not model.pre_process:
        hidden = torch.empty(SEQUENCE, len(TOKENS), HIDDEN)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad():
        output: torch.Tensor = model(TOKENS, positions, mask)
    if model.post_process:
        return output
    dist.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def save(folder: Path, layout: str | None) -> None:
    pipeline = 1 if layout is None else layout.count("|") + 1
    model = build(2, pipeline, layout)
    fill(model)
    logits = predict(model)
    if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        torch.save(logits, folder / "logits.pt")
    args = argparse.Namespace(
        **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
        **{"ffn_hidden_size": 4 * HIDDEN, "max_position_embeddings": SEQUENCE},
        **{"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
        **{"norm_epsilon": 1e-5, "bias_gelu_fusion": True, "swiglu": False},
        **{"untie_embeddings_and_output_weights": False, "add_bias_linear": True},
        **{"padded_vocab_size": VOCAB, "params_dtype": torch.float32, "iteration": 7},
        attention_backend=model.config.attention_backend,
    )
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    name = "mp_rank_{:02d}_{:03d}" if pipeline > 1 else "mp_rank_{:02d}"
    part = folder / "legacy/iter_0000007" / name.format(*ranks)
    part.mkdir(parents=True)
    held = {**common, "model": model.state_dict_for_save_checkpoint(), "optimizer": {"step": 3}}
    torch.save(held, part / "model_optim_rng.pt")
    (folder / "legacy/latest_checkpointed_iteration.txt").write_text("7")
    place = folder / "dist/iter_0000007"
    place.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict(), **common}, str(place))
    (folder / "dist/latest_checkpointed_iteration.txt").write_text("7")


def load(folder: Path) -> None:
    model = build(1, 1, None)
    number = (folder / "dist/latest_checkpointed_iteration.txt").read_text()
    place = folder / f"dist/iter_{int(number):07d}"
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(state, str(place))["model"], strict=True)
    weights = dict(model.named_parameters())
    torch.save({"logits": predict(model), "weights": weights}, folder / "dist.pt")
    place = folder / "numbered/iter_0000009"
    place.mkdir(parents=True)
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    dist_checkpointing.save({"model": state, "iteration": 9}, str(place))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        load(Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
