from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.varuna_core.equality.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with Worlds(hang_s=120.0) as made:
        yield made
