"""One rank waits in another function than the rest: `stray_rank.py RANK`; each prints `ready`."""

import os
import sys
import threading
import time


def wait_for_the_others():
    time.sleep(120)


def load_data():
    time.sleep(120)


def train(rank):
    beside = threading.Thread(target=time.sleep, args=(120,), name="beside", daemon=True)
    beside.start()
    print(f"rank {rank} ready", flush=True)
    if rank == int(sys.argv[1]):
        load_data()
    else:
        wait_for_the_others()


train(int(os.environ["RANK"]))
