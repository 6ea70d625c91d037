"""The cross-entropy in blocks is torch's, and holds no more than a block beside its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_core import cross_entropy
from varuna_core.runtime import cross_entropy as module

IGNORED = -100


def make(rows: int, words: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(rows, words, generator=made)).to(dtype).requires_grad_()
    labels = torch.randint(words, (rows,), generator=made)
    return logits, torch.where(torch.rand(rows, generator=made) < 0.2, IGNORED, labels)


def run(loss: Tensor, logits: Tensor, factor: float = 3.0) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(factor * loss, logits)
    return loss.detach(), gradient


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 50), st.integers(1, 300), st.sampled_from(["mean", "sum"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(0, 99),
)  # fmt: skip
def test_it_is_torchs(
    rows: int, words: int, block: int, reduction: str, dtype: torch.dtype, seed: int
) -> None:
    logits, labels = make(rows, words, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", {"cpu": block})
        ours = run(cross_entropy(logits, labels, reduction=reduction), logits)
    wide = logits if dtype == torch.float64 else logits.float()
    torchs = run(F.cross_entropy(wide, labels, reduction=reduction), logits)
    assert ours[0].dtype == torchs[0].dtype and ours[1].dtype == dtype
    for mine, its in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True)


def test_logits_of_any_shape_and_where_nothing_counts() -> None:
    logits, labels = make(12, 7, torch.float32)
    shaped = cross_entropy(logits.view(3, 4, 7), labels.view(3, 4), ignore_index=IGNORED)
    assert torch.equal(shaped, cross_entropy(logits, labels))
    nothing = torch.full_like(labels, IGNORED)
    total, gradient = run(cross_entropy(logits, nothing, reduction="sum"), logits)
    assert total == 0 and not gradient.count_nonzero()
    assert cross_entropy(logits, nothing).isnan(), "as torch's"
    with pytest.raises(ValueError, match="expected 'mean' or 'sum'"):
        cross_entropy(logits, labels, reduction="none")


def test_a_label_that_is_no_word_is_an_error() -> None:
    logits, labels = make(4, 7, torch.float32)
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy(logits, labels.fill_(7))


class Made(TorchDispatchMode):
    """The elements of all memory that is made, by its address."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            memory = out.untyped_storage()
            self.kept.append(memory)  # no address is used twice
            self.sizes[memory.data_ptr()] = memory.nbytes() // out.itemsize
        return out


def test_beside_the_gradient_no_more_than_a_block_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "BLOCK", {"cpu": 500})
    logits, labels = make(64, 100, torch.bfloat16)
    with Made() as seen:
        loss = cross_entropy(logits, labels)
    seen.sizes.pop(logits.untyped_storage().data_ptr(), None)
    assert max(seen.sizes.values()) <= 500
    with Made() as seen:
        loss.backward()
    seen.sizes.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(size > 500 for size in seen.sizes.values()) == 1, "the gradient itself"


def test_a_dry_run_of_tensors_without_values() -> None:
    with FakeTensorMode():
        logits = torch.empty(6, 5, requires_grad=True)
        loss = cross_entropy(logits, torch.zeros(6, dtype=torch.long))
        loss.backward()
        assert loss.shape == () and logits.grad is not None and logits.grad.shape == (6, 5)
