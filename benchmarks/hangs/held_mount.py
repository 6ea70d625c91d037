"""A file system of one file that can be held: reads wait, as on a file server that is gone.

    python held_mount.py FOLDER FILE HOLD     FOLDER/data shows FILE; while HOLD exists, nothing is
                                              answered

A stand-in for NFS by the kernel's FUSE, without a library; root mounts it. A reader waits in the
kernel, as with a hard mount of NFS, but SIGKILL ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, INTERRUPT, BATCH_FORGET = (
    1, 2, 3, 14, 15, 17, 18, 25, 26, 36, 42,
)  # fmt: skip
ROOT, FILE = 1, 2
DIRECT_IO = 1
"""Each read comes to us, none is answered by the page cache."""
NO_ENTRY, NO_CALL = -2, -38
HEAD = struct.Struct("<IIQQIII4x")


class Mount:
    """One mount, served by this process until it is ended."""

    def __init__(self, folder: str, data: bytes, hold: Path) -> None:
        self.data, self.hold = data, hold
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"held", folder.encode(), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "cannot mount")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.fd, 1 << 20)
            except OSError:  # unmounted
                return
            _, code, unique, node, *_ = HEAD.unpack_from(request)
            if code in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            if code == READ and self.hold.exists():
                threading.Thread(target=self.answer_later, args=(unique, request)).start()
                continue
            self.send(unique, *self.answer(code, node, request[HEAD.size :]))

    def answer_later(self, unique: int, request: bytes) -> None:
        while self.hold.exists():
            time.sleep(0.2)
        self.send(unique, *self.answer(READ, FILE, request[HEAD.size :]))

    def send(self, unique: int, error: int, body: bytes = b"") -> None:
        with contextlib.suppress(FileNotFoundError):  # its reader was killed meanwhile
            os.write(self.fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    def answer(self, code: int, node: int, body: bytes) -> tuple[int, bytes]:
        if code == INIT:
            major, minor, ahead, _ = struct.unpack_from("<IIII", body)
            return 0, struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), ahead, 0, 12, 9,
                                  1 << 16, 1, 16, 0, 0)  # fmt: skip
        if code == LOOKUP:
            if body.rstrip(b"\0") != b"data":
                return NO_ENTRY, b""
            return 0, struct.pack("<QQQQII", FILE, 0, 3600, 3600, 0, 0) + self.describe(FILE)
        if code == GETATTR:
            return 0, struct.pack("<QII", 3600, 0, 0) + self.describe(node)
        if code == OPEN:
            return 0, struct.pack("<QII", 1, DIRECT_IO, 0)
        if code == READ:
            _, at, size = struct.unpack_from("<QQI", body)
            return 0, self.data[at : at + size]
        if code in (RELEASE, FLUSH):
            return 0, b""
        return NO_CALL, b""

    def describe(self, node: int) -> bytes:
        """The kernel's attributes of a node."""
        size = len(self.data) if node == FILE else 0
        mode = stat.S_IFREG | 0o444 if node == FILE else stat.S_IFDIR | 0o755
        times = (0,) * 6
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, 1, *times[:3], *times[:3], mode, 1, 0,
                           0, 0, 4096, 0)  # fmt: skip


def mount_held(
    folder: Path, env: dict[str, str], enter: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Serve the samples by a file system that can be held; `enter` begins a command that runs
    where it is to be mounted."""
    hold = folder.with_suffix(".hold")
    folder.mkdir(exist_ok=True)
    words = [*enter, sys.executable, __file__, str(folder), os.__file__, str(hold)]
    mount = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    if mount.stdout is None or mount.stdout.readline() != "mounted\n":
        raise RuntimeError("a FUSE mount needs root and /dev/fuse")
    env |= {"DATA": str(folder / "data"), "HOLD": str(hold)}
    return mount


def end_held(mount: subprocess.Popen[str], env: dict[str, str], enter: Sequence[str] = ()) -> None:
    """Answer whoever waits still, and unmount."""
    Path(env["HOLD"]).unlink(missing_ok=True)
    subprocess.run([*enter, "umount", "-l", env["DATA"].removesuffix("/data")], check=False)
    mount.terminate()
    mount.wait(20)


if __name__ == "__main__":
    folder, file, hold = sys.argv[1:]
    mount = Mount(folder, Path(file).read_bytes(), Path(hold))
    print("mounted", flush=True)
    mount.serve()
