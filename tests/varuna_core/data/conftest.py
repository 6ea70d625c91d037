"""megatron-core, the independent reader and writer of token files and maker of index maps.

From the package registry, in the dev extra where it has a wheel; elsewhere these tests skip.
"""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def megatron() -> Any:
    """Its modules, by short names. It warns on import of what it would rather have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import (
                blended_megatron_dataset_config,
                gpt_dataset,
                helpers,
                indexed_dataset,
                utils,
            )
        except ImportError as error:
            pytest.skip(f"megatron-core cannot be imported: {error}")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return SimpleNamespace(
        config=blended_megatron_dataset_config,
        gpt=gpt_dataset,
        helpers=helpers,
        indexed=indexed_dataset,
        utils=utils,
    )
