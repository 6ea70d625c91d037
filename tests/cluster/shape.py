"""The shape of the lab: groups of nodes, their names, addresses and fake GPUs.

It exists so that the renderers, the network and the tests speak of the same nodes. It holds
data alone and refuses to touch the machine. The names are chosen on purpose: `a*` sorts before
`b*`, so a het job with component 0 on `b` shows that Slurm sorts the node list but not the ranks.
"""

import ipaddress
from dataclasses import dataclass

NUM_CPUS = 8
CONTROLLER_HOST_NUMBER = 254
MAX_NODES = 100


class LabError(Exception):
    """The lab cannot do what was asked; the message says why and what to do next."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes of one kind, reached through a queue of their own."""

    letter: str
    """First letter of the node names: `a` makes a1, a2, ..."""
    num_nodes: int
    queue: str
    """The Slurm partition over this group alone."""
    gpu_type: str
    num_gpus: int
    memory_mb: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"{self.letter}{number}" for number in range(1, self.num_nodes + 1))

    @property
    def gres(self) -> str:
        return f"gpu:{self.gpu_type}:{self.num_gpus}"


def build_groups(num_a: int = 2, num_b: int = 4) -> tuple[Group, Group]:
    """The two node kinds: few strong nodes and more weak ones."""
    if min(num_a, num_b) < 1 or num_a + num_b > MAX_NODES:
        raise LabError(
            f"{num_a},{num_b} nodes: each group needs at least 1, both together at most {MAX_NODES}"
        )
    return (
        Group(
            letter="a",
            num_nodes=num_a,
            queue="gpu1",
            gpu_type="a100",
            num_gpus=4,
            memory_mb=64000,
        ),
        Group(
            letter="b", num_nodes=num_b, queue="gpu2", gpu_type="a10", num_gpus=4, memory_mb=32000
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The whole cluster: its groups and the subnet that they share."""

    groups: tuple[Group, ...]
    subnet: ipaddress.IPv4Network

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for group in self.groups for node in group.nodes)

    @property
    def node_addresses(self) -> dict[str, str]:
        return {node: str(self.subnet[number]) for number, node in enumerate(self.nodes, start=1)}

    @property
    def controller_address(self) -> str:
        return str(self.subnet[CONTROLLER_HOST_NUMBER])
