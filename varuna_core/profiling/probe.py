"""Measure the speed of a conf's nodes: the program of `vjob doctor --nodes`.

It needs only Python; if torch is installed, it measures the GPUs too. All ranks connect to rank 0,
which sends each answer to all ranks, so that all nodes begin each measurement at the same moment.
The best of several tries counts, since other jobs on a node can only make a try slower.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

MIB = 1 << 20
TRIES = 5
CPU_BYTES, MEMORY_BYTES, DISK_BYTES = 16 * MIB, 128 * MIB, 64 * MIB
LINK_BYTES, LINK_S, NUM_PINGS = 256 * MIB, 1.5, 100
MATRIX, NUM_PRODUCTS, COPY_BYTES = 8192, 10, 1024 * MIB
MEET_S = 120.0


def main() -> None:
    """Measure this node with all others; rank 0 writes all results to the attempt's folder."""
    folder_of_run = f"{os.environ['VJOB_RUN']}/attempt-{os.environ['VJOB_ATTEMPT']}"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node, leads = int(os.environ.get("GROUP_RANK", "0")), os.environ.get("LOCAL_RANK", "0") == "0"
    meeting = Meeting(rank, world)
    own: dict[str, Any] = {
        "rank": rank,
        "node": node,
        "host": os.environ.get("VJOB_NODE") or socket.gethostname(),
        "group": os.environ.get("VJOB_GROUP", ""),
    }
    meeting.share("gpu")
    own.update(measure_gpu(int(os.environ.get("LOCAL_RANK", "0"))))
    for name, measure in (("cpu", measure_cpu), ("memory", measure_memory)):
        meeting.share(name)
        if leads:
            own[f"{name}_mb_s"] = measure()
    for name, folder in (("run_disk", folder_of_run), ("node_disk", tempfile.gettempdir())):
        meeting.share(name)
        if leads:
            own[f"{name}_mb_s"] = measure_disk(folder)
            own[f"{name}"] = folder
    leaders = sorted(
        (
            one
            for one in meeting.share({"node": node, "rank": rank, "leads": leads})
            if one["leads"]
        ),
        key=lambda one: one["node"],
    )
    own["links"] = measure_links(meeting, [one["node"] for one in leaders], node if leads else None)
    everybody = meeting.share(own)
    if rank == 0:
        with open(f"{folder_of_run}/probe.json", "w", encoding="utf-8") as file:
            json.dump(everybody, file)
    print(json.dumps(own))


class Meeting:
    """Exchanges values between all ranks, over connections to rank 0."""

    def __init__(self, rank: int, world: int) -> None:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            server = socket.create_server(("", place[1]), backlog=world)
            threading.Thread(target=_serve, args=(server, world), daemon=True).start()
        until = time.monotonic() + MEET_S
        while True:
            try:
                self._socket = socket.create_connection(place, timeout=MEET_S)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        self._socket.settimeout(None)  # a rank may still measure
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        self.address = self._socket.getsockname()[0]
        """This node's address, as used for its connection to rank 0."""

    def share(self, value: object) -> list[Any]:
        """Return the values of all ranks, once all ranks have given theirs."""
        self._lines.write(json.dumps(value) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise SystemExit("rank 0, or another rank that it waited for, is gone")
        values: list[Any] = json.loads(line)
        return values


def _serve(server: socket.socket, world: int) -> None:
    files = [server.accept()[0].makefile("rw", encoding="utf-8") for _ in range(world)]
    while True:
        lines = [file.readline() for file in files]
        if not all(lines):
            for file in files:
                file.close()
            return
        for file in files:
            file.write(f"[{','.join(line.strip() for line in lines)}]\n")
            file.flush()


def measure_cpu() -> float:
    """Return the speed of SHA-256 on one processor, in MB/s."""
    data = bytes(CPU_BYTES)
    return _rate(CPU_BYTES, lambda: hashlib.sha256(data).digest())


def measure_memory() -> float:
    """Return the speed of copying memory on one processor, in MB/s."""
    data = bytearray(MEMORY_BYTES)
    return _rate(MEMORY_BYTES, lambda: bytes(data))


def measure_disk(folder: str) -> float | None:
    """Return the speed of writing a new file and syncing it, in MB/s; None if the folder is not
    writable."""
    data = os.urandom(MIB)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:

            def write() -> None:
                file.seek(0)
                for _ in range(DISK_BYTES // MIB):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return _rate(DISK_BYTES, write, 2)
    except OSError:
        return None


def measure_gpu(local_rank: int) -> dict[str, Any]:
    """Measure matrix products and copies on this rank's GPU; without a GPU, return the reason."""
    try:
        import torch
    except ImportError:
        return {"no_gpu": "no torch here"}
    if not torch.cuda.is_available():
        return {"no_gpu": f"torch {torch.__version__} finds no GPU"}
    try:
        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
        b = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)

        def multiply() -> None:
            for _ in range(NUM_PRODUCTS):
                torch.mm(a, a)
            torch.cuda.synchronize()

        def copy() -> None:
            b.clone()
            torch.cuda.synchronize()

        multiply()
        copy()
        flops = NUM_PRODUCTS * 2 * MATRIX**3
        return {
            "gpu": torch.cuda.get_device_name(index),
            "index": index,
            "tflop_s": _rate(flops, multiply) / 1e6,
            "gpu_gb_s": _rate(2 * COPY_BYTES, copy) / 1e3,
        }
    except Exception as error:  # a sick GPU fails in any way, and that is the answer
        return {"gpu_error": f"{type(error).__name__}: {error}"[:300]}


def measure_links(meeting: Meeting, nodes: Sequence[int], node: int | None) -> list[dict[str, Any]]:
    """Measure the link from each node to the next, each node in one measurement at a time."""
    found = []
    pairs = [(a, b) for a, b in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True) if a != b]
    if len(nodes) == 2:
        pairs = pairs[:1]
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for number, pair in enumerate(pairs):
        is_odd_one = len(pairs) % 2 and number == len(pairs) - 1 and number > 0
        rounds[2 if is_odd_one else number % 2].append(pair)
    for pairs_now in rounds:
        mine = next((pair for pair in pairs_now if node in pair), None) if pairs_now else None
        server = None
        if mine is not None and node == mine[0]:
            server = socket.create_server((meeting.address, 0))
        place = None if server is None else [node, *server.getsockname()[:2]]
        places = {one[0]: one[1:] for one in meeting.share(place) if one is not None}
        if mine is not None:
            try:
                if server is not None:
                    server.settimeout(30)
                    _answer(server.accept()[0])
                else:
                    found.append({"a": mine[0], "b": mine[1], **_ask(tuple(places[mine[0]]))})
            except OSError as error:
                found.append({"a": mine[0], "b": mine[1], "error": str(error)[:200]})
        if server is not None:
            server.close()
        meeting.share("round")
    return found


def _ask(place: tuple[Any, ...]) -> dict[str, Any]:
    """Connect to the other node at the address `place`; return the round-trip time of one byte in
    microseconds, and the MB/s sent to that node."""
    with socket.create_connection(place, timeout=30) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(NUM_PINGS):
            begun = time.perf_counter()
            link.sendall(b"p")
            if not link.recv(1):
                raise OSError("the other node closed the connection")
            times.append(time.perf_counter() - begun)
        data, sent = bytes(MIB), 0
        begun = time.perf_counter()
        while sent < LINK_BYTES and time.perf_counter() - begun < LINK_S:
            link.sendall(data)
            sent += MIB
        link.shutdown(socket.SHUT_WR)
        while link.recv(1):  # it closes once it has all
            pass
        took_s = time.perf_counter() - begun
    return {"us": sorted(times)[NUM_PINGS // 2] * 1e6, "link_mb_s": sent / MIB / took_s}


def _answer(link: socket.socket) -> None:
    with link:
        link.settimeout(30)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_PINGS):
            if link.recv(1):
                link.sendall(b"p")
        while link.recv(MIB):
            pass


def _rate(amount: float, work: Callable[[], object], tries: int = TRIES) -> float:
    """Return the best rate of several tries of `work`, in millions of units per second."""
    times = []
    for _ in range(tries):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return amount / min(times) / 1e6


if __name__ == "__main__":
    main()
