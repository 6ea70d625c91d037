"""The shape of a model with the defaults that depend on its other numbers."""

from __future__ import annotations

from dataclasses import asdict

from varuna_core.records.training import Llama
from vjob.jobs.conf.schema import Model


def build_llama(model: Model) -> Llama | None:
    """The parts of Llama with every default filled in."""
    if model.llama is None:
        return None
    own = asdict(model.llama)
    own["kv_heads"] = own["kv_heads"] or model.heads
    own["head_size"] = own["head_size"] or model.hidden // model.heads
    return Llama(**own)
