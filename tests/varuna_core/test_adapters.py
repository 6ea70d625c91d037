"""Adapters of peft's own, trained in stages and replicas as the plain model is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.adapter_rank import LAYOUTS
from tests.ranks.results import collect_results

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and peft warn of
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return collect_results("tests.ranks.adapter_rank", 2, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_trained_as_by_one_process(told: list[dict[str, Any]], layout: str) -> None:
    for found in told:
        assert found[layout] == pytest.approx(found["plain"], rel=1e-5)
    assert told[0][f"{layout} same names"]
    assert told[0][f"{layout} apart"] < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_adapters_alone_goes_on_in_another_layout(
    told: list[dict[str, Any]], layout: str
) -> None:
    for found in told:
        assert found[f"{layout} on"] == pytest.approx(found["plain on"], rel=1e-5)
    assert told[0]["files"] == ["adapter_model.safetensors"]
