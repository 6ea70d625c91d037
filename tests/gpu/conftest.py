"""The device of the tests here, and why they are left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    """`cuda`, or `cpu` where TESTS_DEVICE says so; told to the ranks that the module starts."""
    pytest.importorskip("torch")
    from tests.ranks.device import VARIABLE, find_kind  # imports torch

    found = find_kind()
    if found is None:
        pytest.skip("there is no GPU here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, found)
        yield found


@pytest.fixture
def only_gpu(device: str) -> None:
    """For tests of what no processor has."""
    if device == "cpu":
        pytest.skip("only a GPU shows it")
