"""Two network namespaces with one slow link between them, made for a measurement and removed after.

    namespace left, 10.254.77.1 ── eth0 ═══ tbf both ways ═══ eth0 ── namespace right, 10.254.77.2

The namespaces belong to processes that sleep, so nothing is left behind where they end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BURST_BYTES = 64 * 1024
"""No less than one packet of a network card that sends large ones."""


def find_obstacle() -> str | None:
    """Why there can be no slow link here, if so."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with slow_link(1000.0):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"no namespaces with a tbf here: {said.strip().splitlines()[-1]}"


@contextmanager
def slow_link(rate_mbit: float) -> Iterator[list[list[str]]]:
    """For each side, the command that starts another inside it."""
    sleepers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(2):
            command = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 3600"]
            sleepers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            output = sleepers[-1].stdout
            assert output is not None
            output.readline()
        left, right = (str(sleeper.pid) for sleeper in sleepers)
        enter = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in (left, right)]
        link = f"ip link add eth0 type veth peer name eth0 netns {right}"
        _run([*enter[0], *link.split()])
        for number, prefix in enumerate(enter, start=1):
            for line in (
                "ip link set lo up",
                f"ip address add 10.254.77.{number}/24 dev eth0",
                "ip link set eth0 up",
            ):
                _run([*prefix, *line.split()])
            _run([*prefix, *_limit(rate_mbit)])
        yield enter
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
            if sleeper.stdout is not None:
                sleeper.stdout.close()


def set_rate(rate_mbit: float | None) -> None:
    """Called inside: what this side sends is as slow as that; None: as fast as it can be."""
    if rate_mbit is None:
        _run(["tc", "qdisc", "delete", "dev", "eth0", "root"])
    else:
        _run(_limit(rate_mbit))


def _limit(rate_mbit: float) -> list[str]:
    rate = f"rate {rate_mbit}mbit burst {BURST_BYTES} latency 1000ms"
    return f"tc qdisc replace dev eth0 root tbf {rate}".split()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
