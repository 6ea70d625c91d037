"""Makes docs/pictures/status.png: a sample job, drawn by Textual, as a picture by Chromium.

python -m tests.jobs.monitor.screen.picture [FILE.png [COLUMNS LINES [KEY...]]]
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from tests import ROOT
from tests.jobs.monitor.screen.sample_job import (
    Player,
    RecordedActions,
    SampleLines,
    make_merged_log,
    make_slow,
)
from tests.jobs.monitor.screen.screen_driver import DrivenScreen, drive

TARGET = ROOT / "docs/pictures/status.png"


def draw(size: tuple[int, int], keys: list[str]) -> str:
    """The screen as SVG."""
    snapshot, verdict = make_slow()
    logs = SampleLines({None: make_merged_log(snapshot, verdict.evidence[0])})
    drawn = []

    async def script(screen: DrivenScreen) -> None:
        await screen.until(lambda: screen.live.view)
        await screen.press("a")
        await screen.until(lambda: screen.live.log_pane.num_rows)
        await screen.press(*keys)
        drawn.append(screen.app.export_screenshot(title="vjob status last"))

    drive(Player((snapshot, verdict)), script, actions=RecordedActions(lines=logs), size=size)
    return drawn[0]


def take_picture(svg: str, target: Path) -> None:
    """By Chromium, then with a palette: a third of the size."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    width, height = (int(float(text)) for text in found.groups())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page.svg").write_text(svg)
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-lcd-text",
            "--hide-scrollbars", f"--user-data-dir={folder}/browser",
            f"--window-size={width},{height}", f"--screenshot={folder}/page.png",
            (folder / "page.svg").as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        target.write_bytes(reduce_colours((folder / "page.png").read_bytes()))


def reduce_colours(png: bytes) -> bytes:
    """The same picture with at most 256 colours: the most frequent, and for others the nearest."""
    pixels = read_png(png)
    height, width, _ = pixels.shape
    coarse = pixels.astype(np.int64) & 0xF8
    codes = coarse[..., 0] << 16 | coarse[..., 1] << 8 | coarse[..., 2]
    found, where, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16 & 255, found >> 8 & 255, found & 255], axis=1)
    kept = colours[np.argsort(-counts)[:256]]
    nearest = ((colours[:, None] - kept[None]) ** 2).sum(axis=2).argmin(axis=1)
    rows = nearest[where].reshape(height, width).astype(np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = (kept + (kept >> 5)).astype(np.uint8).tobytes()
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(raw, 9)),
        (b"IEND", b""),
    ]
    return png[:8] + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def read_png(png: bytes) -> np.ndarray:
    """Rows, columns, red-green-blue; of the one kind that Chromium writes: 8 bits, no interlace."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and kind in (2, 6)
    data, place = b"", 8
    while place < len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += size + 12
    deep = 3 if kind == 2 else 4
    raw = zlib.decompress(data)
    line = width * deep
    before = bytearray(line)
    rows = []
    for number in range(height):
        start = number * (line + 1)
        before = _undo_filter(
            raw[start], bytearray(raw[start + 1 : start + 1 + line]), before, deep
        )
        rows.append(np.frombuffer(bytes(before), np.uint8).reshape(width, deep)[:, :3])
    return np.stack(rows)


def _undo_filter(kind: int, row: bytearray, above: bytearray, deep: int) -> bytearray:
    """RFC 2083, section 6."""
    for i in range(len(row)):
        left = row[i - deep] if i >= deep else 0
        corner = above[i - deep] if i >= deep else 0
        up = above[i]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            far = (abs(up - corner), abs(left - corner), abs(left + up - 2 * corner))
            guess = (left, up, corner)[far.index(min(far))]
        else:
            guess = 0
        row[i] = (row[i] + guess) & 255
    return row


if __name__ == "__main__":
    words = sys.argv[1:]
    columns, lines = map(int, words[1:3] or (120, 36))
    take_picture(draw((columns, lines), words[3:]), Path(words[0]) if words else TARGET)
