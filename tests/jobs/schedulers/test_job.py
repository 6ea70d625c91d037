"""Jobs and lists of nodes in the terms that all schedulers share."""

from __future__ import annotations

import pytest

from vjob.jobs.schedulers.node_names import expand_nodes, fold_names


@pytest.mark.parametrize(
    "text",
    [
        "a[1-2,4],login",
        "n[008-011]",
        "a9",
        "local[0-3]",
        "rack1n[1-2],rack2n[1-2]",
        "",
        "hosts.txt",
    ],
)
def test_a_list_of_nodes_folds_as_it_was(text: str) -> None:
    assert fold_names(expand_nodes(text)) == text
