"""Models of other libraries and of torch.nn, tiny and with random weights, and patterns that cut
them.

`SKIPPED` are those of a library that is not installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.foreign import T5_CARRIES, load_transformers
from varuna_core.runtime.split.wrappers import with_loss

VOCAB, LENGTH, WIDTH, LAYERS = 64, 12, 32, 2
Inputs = dict[str, Any]

SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
GPT_ENDS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {**SIZES, **HEADS, "num_key_value_heads": 2, **ENDS}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SIZES, **HEADS, **STILL, "max_position_embeddings": 32}
QUIET = {"dropout": 0.0, "attention_dropout": 0.0}
T5 = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS,
    "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "dropout": 0.0, "pad_token_id": 1, "eos_token_id": 1,
    "decoder_start_token_id": 1,
}  # fmt: skip
BART = {**SEQ2SEQ, "max_position_embeddings": 32}
WHISPER = {
    **SEQ2SEQ, "max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8,
    "bos_token_id": 1,
}  # fmt: skip
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
IMAGES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, **HEADS, **STILL, "num_labels": 10}
PATCHES = {**IMAGES, "image_size": 16, "patch_size": 4}


def make_text(size: int, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (size, LENGTH), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def make_speech(size: int, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 8, 32, generator=draw)
    return {"input_features": features, "labels": make_text(size, seed)["labels"]}


def make_images(size: int, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (size,), generator=draw)
    return {"pixel_values": torch.randn(size, 3, 16, 16, generator=draw), "labels": labels}


def make_classified(size: int, seed: int = 1) -> Inputs:
    """The input of a plain classifier, and `with_loss`'s."""
    images = make_images(size, seed)
    return {"x": images["pixel_values"], "target": images["labels"]}


def make_vectors(size: int, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=draw)
    return {"input": x, "target": x.sin()}


def make_sequences(size: int, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, LENGTH, WIDTH, generator=draw)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return {"src": x, "mask": mask, "target": x.sin()}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    title: str
    build: Callable[[], nn.Module]
    patterns: tuple[str, ...]
    carry: tuple[str, ...] = ()
    """Arguments of these modules that pass the cuts besides the first."""
    inputs: Callable[[int, int], Inputs] = make_text
    library: str = "transformers"
    refusal: str = ""
    """Of one that cannot be cut so: what the message says."""
    remedy: str = ""
    """What to do then, for the documents."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        return self.library == "torch" or importlib.util.find_spec(self.library) is not None


def hugging(
    title: str, name: str, sizes: dict[str, Any], *patterns: str, **more: Any
) -> Architecture:
    """`name` is the class; that of its conf begins alike."""

    def build() -> nn.Module:
        library = load_transformers()
        kind = getattr(library, name)
        model: nn.Module = kind(kind.config_class(**sizes))
        return model

    return Architecture(title=title, build=build, patterns=patterns, **more)


def build_timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10, **sizes)
        return with_loss(model, nn.CrossEntropyLoss())

    return build


class Residual(nn.Module):
    def __init__(self, planes: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(planes, out, 3, stride, 1), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(planes, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += self.short(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """As torchvision's: layers are Sequentials of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.conv(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def build_sequential() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return with_loss(nn.Sequential(*layers), nn.MSELoss())


def build_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
    return with_loss(nn.TransformerEncoder(layer, LAYERS), nn.MSELoss())


ARCHITECTURES = (
    hugging("GPT-2", "GPT2LMHeadModel", {**GPT, **GPT_ENDS}, "transformer.h.*"),
    hugging(
        "GPT-Neo", "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB, "max_position_embeddings": 32, "hidden_size": WIDTH,
            "num_layers": LAYERS, "num_heads": 4, "window_size": 4, "embed_dropout": 0.0,
            "attention_types": [[["global", "local"], 1]], "attention_dropout": 0.0,
            "resid_dropout": 0.0, **ENDS,
        },
        "transformer.h.*",
    ),
    hugging("GPT-J", "GPTJForCausalLM", {**GPT, **GPT_ENDS, "rotary_dim": 4}, "transformer.h.*"),
    hugging("GPT-NeoX", "GPTNeoXForCausalLM", {**SIZES, **HEADS}, "gpt_neox.layers.*"),
    hugging(
        "OPT", "OPTForCausalLM",
        {
            **SIZES, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 32,
            "word_embed_proj_dim": WIDTH, **QUIET, **ENDS,
        },
        "model.decoder.layers.*",
    ),
    hugging(
        "BLOOM", "BloomForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
        "transformer.h.*",
    ),
    hugging(
        "Falcon", "FalconForCausalLM",
        {**SIZES, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "transformer.h.*",
    ),
    hugging("Llama", "LlamaForCausalLM", LLAMA, "model.layers.*"),
    hugging("Mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 4}, "model.layers.*"),
    hugging("Mixtral", "MixtralForCausalLM", EXPERTS, "model.layers.*"),
    hugging(
        "Mixtral, with a loss of its routers", "MixtralForCausalLM",
        {**EXPERTS, "output_router_logits": True},
        "model.layers.*",
        refusal="something else than the whole model after cut . .*output_router_logits",
        remedy="refused: hooks collect what that loss is made of, in all layers",
    ),
    hugging("Qwen 2", "Qwen2ForCausalLM", LLAMA, "model.layers.*"),
    hugging("Qwen 3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, "model.layers.*"),
    hugging("Gemma 2", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8}, "model.layers.*"),
    hugging("Phi", "PhiForCausalLM", {**SIZES, **HEADS}, "model.layers.*"),
    hugging("Phi 3", "Phi3ForCausalLM", LLAMA, "model.layers.*"),
    hugging(
        "Mamba", "MambaForCausalLM", {**SIZES, "state_size": 4}, "backbone.layers.*"
    ),
    hugging("BERT", "BertForMaskedLM", BERT, "bert.encoder.layer.*"),
    hugging("RoBERTa", "RobertaForMaskedLM", {**BERT, "pad_token_id": 1}, "*.encoder.layer.*"),
    hugging(
        "DistilBERT", "DistilBertForMaskedLM",
        {
            "vocab_size": VOCAB, "dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48,
            **QUIET,
        },
        "distilbert.transformer.layer.*",
    ),
    hugging("ELECTRA", "ElectraForMaskedLM", {**BERT, "embedding_size": 16}, "*.encoder.layer.*"),
    hugging(
        "ALBERT, whose layers are one", "AlbertForMaskedLM", {**BERT, "embedding_size": WIDTH},
        "albert.encoder.albert_layer_groups",
    ),
    hugging("ViT", "ViTForImageClassification", PATCHES, "vit.layers.*", inputs=make_images),
    hugging(
        "ConvNeXt", "ConvNextForImageClassification",
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 10,
         "patch_size": 2},
        "convnext.encoder.stages.*", inputs=make_images,
    ),
    hugging(
        "T5", "T5ForConditionalGeneration", T5, "encoder.block.*", "decoder.block.*",
        carry=T5_CARRIES,
    ),
    hugging(
        "BART", "BartForConditionalGeneration", BART,
        "model.encoder.layers.*", "model.decoder.layers.*", carry=("encoder_hidden_states",),
    ),
    hugging(
        "Whisper", "WhisperForConditionalGeneration", WHISPER,
        "model.encoder.layers.*", "model.decoder.layers.*", carry=("encoder_hidden_states",),
        inputs=make_speech,
    ),
    Architecture(
        title="`nn.Sequential`", build=build_sequential, patterns=("[1-3]",), inputs=make_vectors,
        library="torch",
    ),
    Architecture(
        title="`nn.TransformerEncoder`", build=build_encoder, patterns=("layers.*",),
        inputs=make_sequences, library="torch",
    ),
    Architecture(
        title="ResNet, as torchvision's", patterns=("layer?.*",), inputs=make_classified,
        build=lambda: with_loss(ResNet(), nn.CrossEntropyLoss()), library="torch",
    ),
    Architecture(
        title="timm's ViT", patterns=("blocks.*",), inputs=make_classified, library="timm",
        build=build_timm("vit_tiny_patch16_224", img_size=16, patch_size=4, depth=LAYERS),
    ),
    Architecture(
        title="timm's ResNet", patterns=("layer?.*",), inputs=make_classified, library="timm",
        build=build_timm("resnet10t"),
    ),
)  # fmt: skip
