"""Node states as the controller reports them, and waits for states.

It refuses to wait without a deadline, and a failed wait says what the states were.
"""

import datetime
import re
from collections.abc import Callable, Iterable

from tests.cluster.processes import run, wait_for
from tests.cluster.record import LabPaths
from tests.cluster.shape import LabError

IDLE = frozenset({"idle"})
USABLE = frozenset({"idle", "mixed", "allocated"})
"""Slurm's words for a node that answers; a star behind the word means that it does not."""


def build_env(paths: LabPaths) -> dict[str, str]:
    return {"SLURM_CONF": str(paths.slurm_conf)}


def read_node_states(paths: LabPaths) -> dict[str, str]:
    """Slurm's word for each node; empty while no controller answers."""
    command = ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %T"]
    result = run(command, env=build_env(paths), check=False)
    return dict(parse_node_state(line) for line in result.stdout.splitlines())


def parse_node_state(line: str) -> tuple[str, str]:
    node, state = line.split()
    return node, state


def wait_node_states(
    paths: LabPaths, nodes: Iterable[str], wanted: Iterable[str], timeout_s: float
) -> None:
    _wait(paths, nodes, lambda node, state: state in wanted, timeout_s, " or ".join(sorted(wanted)))


def wait_known(paths: LabPaths, nodes: Iterable[str], timeout_s: float) -> None:
    """Wait out the seconds after a controller's start in which all nodes are `unknown`."""
    _wait(paths, nodes, lambda node, state: not state.startswith("unk"), timeout_s, "known")


def wait_registered(paths: LabPaths, node: str, since: float, timeout_s: float) -> None:
    """Wait until a slurmd started at or after `since` has registered and the node is usable."""

    def fresh(node: str, state: str) -> bool:
        return state in USABLE and read_slurmd_start(paths, node) >= int(since)

    _wait(paths, [node], fresh, timeout_s, "registered again")


def read_slurmd_start(paths: LabPaths, node: str) -> float:
    """When the node's slurmd started, as the controller knows it; 0 when it does not."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    return parse_slurmd_start(run(command, env=build_env(paths), check=False).stdout)


def parse_slurmd_start(text: str) -> float:
    match = re.search(r"SlurmdStartTime=(\d{4}-\S+)", text)
    return datetime.datetime.fromisoformat(match[1]).timestamp() if match else 0.0


def _wait(
    paths: LabPaths,
    nodes: Iterable[str],
    good: Callable[[str, str], bool],
    timeout_s: float,
    what: str,
) -> None:
    states: dict[str, str] = {}

    def reached() -> bool:
        states.update(read_node_states(paths))
        return all(node in states and good(node, states[node]) for node in nodes)

    try:
        wait_for(reached, timeout_s, f"nodes {', '.join(nodes)} {what}")
    except LabError as error:
        raise LabError(f"{error}; they are {states}; logs: {paths.folder}/log") from error
