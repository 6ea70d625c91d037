"""Every rank reports itself to rank 0 over TCP; rank 0 prints all, each with its address as seen.

Prints one JSON line a rank: {rank, local_rank, world, host, peer, gpus, args, note}.
"""

import json
import os
import socket
import sys
import time

TIMEOUT_S = 60


def facts():
    return {
        "rank": int(os.environ.get("RANK", 0)),
        "local_rank": int(os.environ.get("LOCAL_RANK", 0)),
        "local_world": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "world": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "args": sys.argv[1:],
        "note": os.environ.get("NOTE"),
        "leak": os.environ.get("LEAK_OF_THE_SHELL"),
        "stage": int(os.environ["VJOB_STAGE"]),
        "attempt": int(os.environ["VJOB_ATTEMPT"]),
    }


def serve(address, world):
    with socket.create_server(address) as server:
        server.settimeout(TIMEOUT_S)
        for _ in range(world - 1):
            guest, peer = server.accept()
            with guest, guest.makefile("r") as lines:
                print(json.dumps(dict(json.loads(lines.readline()), peer=peer[0])), flush=True)


def visit(address, mine):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with socket.create_connection(address, timeout=TIMEOUT_S) as line:
                line.sendall(json.dumps(mine).encode() + b"\n")
                return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


mine = facts()
# One rank alone is started as plain Python is: it has no place among others.
address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0)))
if mine["world"] == 1:
    print(json.dumps(dict(mine, peer=address[0])), flush=True)
elif mine["rank"] == 0:
    print(json.dumps(dict(mine, peer=address[0])), flush=True)
    serve(address, mine["world"])
else:
    visit(address, mine)
