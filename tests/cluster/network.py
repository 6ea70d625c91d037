"""The lab's network: a bridge, and for each node a namespace with one link to it.

          the machine                          node a1 (own network, host name, /etc/hosts)
    bridge vjl-br 10.77.N.254 -- link vjl-a1 ====== eth0 10.77.N.1

It refuses names that exist already and removes only links that the record names and that carry
its alias. It touches no other interface, no route, no firewall rule and no sysctl.
"""

import ipaddress
import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.processes import run
from tests.cluster.record import LabPaths
from tests.cluster.shape import LabError, Shape

BRIDGE = "vjl-br"
ALIAS = "vjob test lab"


def link_name(node: str) -> str:
    return f"vjl-{node}"


def build_link_names(shape_nodes: Iterable[str]) -> list[str]:
    return [BRIDGE, *(link_name(node) for node in shape_nodes)]


def pick_subnet() -> ipaddress.IPv4Network:
    """The first 10.77.N.0/24 that overlaps no address and no route of this machine."""
    taken = [ipaddress.IPv4Network(text, strict=False) for text in _list_networks()]
    for number in range(256):
        subnet = ipaddress.IPv4Network(f"10.77.{number}.0/24")
        if not any(subnet.overlaps(network) for network in taken):
            return subnet
    raise LabError("every 10.77.N.0/24 overlaps a network of this machine")


def _list_networks() -> Iterable[str]:
    for interface in json.loads(run(["ip", "-json", "-4", "address"]).stdout):
        for address in interface.get("addr_info", []):
            yield f"{address['local']}/{address['prefixlen']}"
    for route in json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout):
        if route["dst"] != "default":
            yield route["dst"]


def refuse_foreign_links(names: Iterable[str]) -> None:
    existing = [name for name in names if Path("/sys/class/net", name).exists()]
    if existing:
        raise LabError(
            f"network interface {', '.join(existing)} exists and no lab is recorded: not touched; "
            f"if it is yours to remove: ip link delete {existing[0]}"
        )


def refuse_ports_in_use(ports: Iterable[int]) -> None:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise LabError(
                    f"TCP port {port}, which the lab needs, is taken ({error.strerror}); "
                    f"see who listens: ss -ltnp 'sport = :{port}'"
                ) from error


def create_network(shape: Shape, paths: LabPaths) -> None:
    lines = [
        f"link add name {BRIDGE} type bridge",
        f"link set dev {BRIDGE} alias '{ALIAS}'",
        f"address add {shape.controller_address}/{shape.subnet.prefixlen} dev {BRIDGE}",
        f"link set dev {BRIDGE} up",
    ]
    for node in shape.nodes:
        namespace, link = paths.namespace(node), link_name(node)
        namespace.touch()
        run(["unshare", f"--net={namespace}", "true"])
        lines += [
            f"link add name {link} type veth peer name eth0 netns {namespace}",
            f"link set dev {link} alias '{ALIAS}'",
            f"link set dev {link} master {BRIDGE} up",
        ]
    run(["ip", "-batch", "-"], text_in="\n".join(lines) + "\n")
    for node in shape.nodes:
        address = f"{shape.node_addresses[node]}/{shape.subnet.prefixlen}"
        inside = f"link set lo up\naddress add {address} dev eth0\nlink set eth0 up\n"
        run(enter(paths.namespace(node), "ip", "-batch", "-"), text_in=inside)


def enter(namespace: Path, *command: str) -> list[str]:
    """A command inside a node's network; not `ip netns exec`, which hides /sys/fs/cgroup."""
    return ["nsenter", f"--net={namespace}", *command]


def remove_network(names: Iterable[str], paths: LabPaths) -> None:
    """Remove the recorded links and the namespaces mounted in the lab's folder."""
    for name in names:
        try:
            alias = Path("/sys/class/net", name, "ifalias").read_text().strip()
        except FileNotFoundError:
            continue
        # No alias: `up` was cut off between making the link and naming it.
        if alias not in (ALIAS, ""):
            raise LabError(f"interface {name} has the alias {alias!r}, not {ALIAS!r}: not touched")
        run(["ip", "link", "delete", name])
    for mount in list_mounts(paths.folder):
        run(["umount", mount])


def list_mounts(folder: Path) -> list[str]:
    """Mount points below a folder, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return sorted((p for p in points if p.startswith(f"{folder}{os.sep}")), key=len, reverse=True)


def cut_link(node: str) -> None:
    run(["ip", "link", "set", link_name(node), "down"])


def mend_link(node: str, paths: LabPaths) -> None:
    """Up again, as after a boot: what the kernel asked in vain while the link was cut is forgotten,
    or its answer "no such host" would hit whoever connects in the next second."""
    run(["ip", "link", "set", link_name(node), "up"])
    run(enter(paths.namespace(node), "ip", "neigh", "flush", "dev", "eth0"))


def slow_link(node: str, paths: LabPaths, *, rate_mbit: float, latency_ms: float) -> None:
    """Limit a node's link both ways; `latency_ms` bounds the queue, it is no wire delay."""
    # A bucket of 5 ms of traffic, and never less than what one GSO packet may hold.
    burst_bytes = max(64 * 1024, int(rate_mbit * 1e6 / 8 * 0.005))
    rule = f"root tbf rate {rate_mbit}mbit burst {burst_bytes} latency {latency_ms}ms".split()
    run(["tc", "qdisc", "replace", "dev", link_name(node), *rule])
    run(enter(paths.namespace(node), "tc", "qdisc", "replace", "dev", "eth0", *rule))


def clear_link(node: str, paths: LabPaths) -> None:
    """Back to full speed; fine when the link was not slowed."""
    run(["tc", "qdisc", "delete", "dev", link_name(node), "root"], check=False)
    run(enter(paths.namespace(node), "tc", "qdisc", "delete", "dev", "eth0", "root"), check=False)
