"""Prints a rank's view from inside its container, as one JSON line."""

import json
import os
import socket
import sys


def can_write(folder):
    path = os.path.join(folder, f"written-{os.environ['RANK']}")
    try:
        with open(path, "w"):
            pass
        os.unlink(path)
    except OSError:
        return False
    return True


def read(path):
    try:
        with open(path) as handle:
            return handle.read()
    except OSError:
        return None


print(
    json.dumps(
        {
            "rank": int(os.environ["RANK"]),
            "args": sys.argv[1:],
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "uid": os.getuid(),
            "host": socket.gethostname(),
            "home": os.environ["HOME"],
            "shm": os.path.isdir("/dev/shm"),
            "data": read("/data/x y/file"),
            "writes_root": can_write("/var"),
            "writes_tmp": can_write("/tmp"),
        }
    )
)
