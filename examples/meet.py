"""The ranks of a run meet over TCP and say who they are; the standard library is enough.

Rank 0 listens on MASTER_ADDR:MASTER_PORT, as torch.distributed would, and each round waits until
every rank has come.
"""

import argparse
import os
import socket
import time


def serve(address: tuple[str, int], world: int, rounds: int) -> None:
    """Rank 0: each round, wait for all others and then let them go."""
    with socket.create_server(address) as server:
        server.settimeout(60)
        for number in range(rounds):
            guests = [server.accept()[0] for _ in range(world - 1)]
            seen = sorted(guest.recv(64).decode() for guest in guests)
            print(f"round {number + 1} of {rounds}: met ranks {', '.join(seen) or 'none'}")
            for guest in guests:
                guest.sendall(b"go")
                guest.close()


def visit(address: tuple[str, int], rank: int, rounds: int) -> None:
    """Any other rank: come, and wait to be let go."""
    for _ in range(rounds):
        deadline = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(address, timeout=60) as line:
                    line.sendall(str(rank).encode())
                    if line.recv(2):
                        break
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)


def main() -> None:
    """Say who I am, then meet the others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    print(
        f"rank {rank} of {world} on {os.environ['VJOB_NODE']}: stage {os.environ['VJOB_STAGE']}, "
        f"replica {os.environ['VJOB_REPLICA']}, {os.environ.get('GREETING', '')}"
    )
    if rank == 0:
        serve(address, world, rounds)
    else:
        visit(address, rank, rounds)
    print(f"rank {rank} done")


if __name__ == "__main__":
    main()
