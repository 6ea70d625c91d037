"""Where a rank stands, and what it refuses to do there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from varuna_core.programs.place import (  # noqa: E402 # behind the skip
    ProgramError,
    compute_place,
    refuse_missing_gpus,
)


@pytest.mark.parametrize(
    ("built_for", "says"),
    [(None, "built without CUDA and ROCm"), ("13.0", "built for CUDA 13.0")],
)
def test_gpus_that_torch_does_not_find_end_the_run(built_for: str | None, says: str) -> None:
    with pytest.raises(ProgramError, match=says) as caught:
        refuse_missing_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, built_for)
    assert "CUDA_VISIBLE_DEVICES=0,1" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_who_was_given_none_trains_on_the_cpu(visible: str) -> None:
    refuse_missing_gpus({"CUDA_VISIBLE_DEVICES": visible}, None)


def test_a_choice_of_a_backend_is_no_gpu() -> None:
    refuse_missing_gpus({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, None)


def test_gpus_of_another_vendor_are_gpus_too() -> None:
    with pytest.raises(ProgramError, match="ROCR_VISIBLE_DEVICES=2, but torch"):
        refuse_missing_gpus({"ROCR_VISIBLE_DEVICES": "2"}, "13.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_only_jobs_of_vjob_are_refused() -> None:
    alone = {"CUDA_VISIBLE_DEVICES": "0"}
    assert compute_place(1, environ=alone).device.type == "cpu"
    with pytest.raises(ProgramError, match="finds no GPU"):
        compute_place(1, environ={**alone, "VJOB_RUN": "/run"})
