"""The server of live pages, and the hub of agents, under storms of connections that prove nothing.

    python -m benchmarks.commands.storm [--connections 10000] [--asks 40] [--write]

A process of its own opens the connections as fast as it can, again wherever one ends, and trickles
a header on each. The owner asks for the page on a new connection each time, as a browser that lost
its own does, and once more where the connection was dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import socket
import threading
import time
from collections.abc import Sequence
from random import Random
from statistics import median

from benchmarks import RESULTS
from benchmarks.commands import hub_storm
from vjob.shelf.web.feed import Feed, JobReading
from vjob.shelf.web.server import LivePage, Server, Site

PAGE = RESULTS / "storm.md"
TOKEN = "of-the-owner"
GIVE_UP_S = 20.0


def storm(port: int, number: int, began: object) -> None:
    """Hold as many connections open as the machine lets us, until killed."""
    for opened, (link, held) in enumerate(hub_storm.open_links(number), start=1):
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.connect_ex(("127.0.0.1", port))
        for one in held[-64:]:
            with contextlib.suppress(OSError):
                one.send(b"GET / HTTP/1.1\r\nX-A: b\r\n")
        began.value = opened  # type: ignore[attr-defined]


def ask(port: int) -> float:
    """Seconds until the owner has the page; more than GIVE_UP_S without."""
    start = time.monotonic()
    while time.monotonic() - start < GIVE_UP_S:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        with contextlib.suppress(OSError, http.client.HTTPException):
            link.request("GET", f"/{TOKEN}/")
            if link.getresponse().status == 200:
                return time.monotonic() - start
        link.close()
    return time.monotonic() - start


def ask_by_names(port: int, asks: int) -> list[str]:
    """Return rows: whose names, requests with the token, and how many were served."""
    random, own = Random(1), ("127.0.0.1", "localhost", "[::1]", f"localhost:{port}", "LOCALHOST")
    tails = ("evil.example", "localhost.evil.example", "127.0.0.1.nip.example", "xn--e1afmkfd.test")
    foreign = [f"{random.choice('abc')}{n}.{random.choice(tails)}" for n in range(asks)]
    foreign += [f"{name}:{port}" for name in foreign]
    foreign += ["", "localhost@evil.example", "localhost, evil.example", "0.0.0.0", "[::]",
                "127.1", "2130706433", "localhost:99999999", "localhost.", "\xb2"]  # fmt: skip
    rows: Sequence[tuple[str, list[list[str]]]] = (
        ("own", [[name] for name in own]),
        ("foreign", [[name] for name in foreign]),
        ("none", [[]]),
        ("own and foreign", [["localhost", foreign[0]]]),
    )
    return [
        f"| {whose} | {len(cases)} | {sum(_is_served(port, case) for case in cases)} |"
        for whose, cases in rows
    ]


def _is_served(port: int, names: Sequence[str]) -> bool:
    hosts = "".join(f"Host: {name}\r\n" for name in names)
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as link:
        link.sendall(f"GET /{TOKEN}/ HTTP/1.1\r\n{hosts}\r\n".encode("latin-1"))
        return link.recv(64).startswith(b"HTTP/1.1 200")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Live pages under a storm of connections.")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--asks", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(words)
    feed = Feed(lambda: JobReading(parts={"page": b"x"}, note="live"), every_s=1000)
    feed.renew()
    site = Site(LivePage(document=lambda: b"x" * 4000, feed=feed), token=TOKEN)
    with Server(site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        calm = [ask(server.port) for _ in range(given.asks)]
        began = multiprocessing.Value("q", 0)
        other = multiprocessing.Process(
            target=storm, args=(server.port, given.connections, began), daemon=True
        )
        other.start()
        while began.value < given.connections:
            time.sleep(0.05)
        first = began.value
        start = time.monotonic()
        stormy = []
        for _ in range(given.asks):
            stormy.append(ask(server.port))
            time.sleep(0.1)
        rate = (began.value - first) / (time.monotonic() - start)
        other.kill()
        other.join()
        names = ask_by_names(server.port, given.asks)
        server.shutdown()
    lines = [
        "# Live pages and agents under a storm",
        "",
        f"{given.connections} connections without the token from another process, each with a "
        f"header that never ends; {rate:.0f} new ones a second meanwhile. The owner asked "
        f"{given.asks} times.",
        "",
        "| seconds until the owner has the page | median | largest | bound |",
        "|---|---|---|---|",
        f"| alone | {median(calm):.3f} | {max(calm):.3f} | 2 |",
        f"| in the storm | {median(stormy):.3f} | {max(stormy):.3f} | 2 |",
        "",
        "Names in the Host header, each with the token, as a page of somebody else's site would "
        "send them whose name resolves to 127.0.0.1 (DNS rebinding):",
        "",
        "| names | asked | served |",
        "|---|---|---|",
        *names,
        "",
        *hub_storm.measure(given.connections, given.asks),
    ]
    print("\n".join(lines))
    if given.write:
        PAGE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
