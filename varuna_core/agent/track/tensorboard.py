"""TensorBoard's event files, written without TensorBoard or torch.

A file is a list of records, each an `Event` of tensorflow/core/util/event.proto:

    length (8)  masked crc32c of it (4)  data  masked crc32c of it (4)
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Dict, List

from varuna_core.records.files import PRIVATE_FILE, PRIVATE_FOLDER

VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _make_table() -> List[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def compute_masked_crc(data: bytes) -> int:
    """Compute the masked CRC-32C of TensorFlow's record files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def render_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", compute_masked_crc(length)),
            data,
            struct.pack("<I", compute_masked_crc(data)),
        )
    )


def _varint(number: int) -> bytes:
    found = bytearray()
    number &= 0xFFFFFFFFFFFFFFFF
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def render_version(time: float) -> bytes:
    """Render the first event of a file."""
    return b"\x09" + struct.pack("<d", time) + _bytes_field(3, VERSION)


def render_scalars(time: float, step: int, values: Dict[str, float]) -> bytes:
    """Render an event with a scalar for each tag."""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + _pack_float(value))
        for tag, value in values.items()
    )
    return b"\x09" + struct.pack("<d", time) + _int_field(2, step) + _bytes_field(5, summary)


def _pack_float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # more than 32 bits hold
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def render_text(time: float, step: int, tag: str, text: str) -> bytes:
    """Render an event with a text in the form of the text plug-in: a tensor of one string."""
    shape = _bytes_field(2, _bytes_field(2, _int_field(1, 1)))
    tensor = _int_field(1, 7) + shape + _bytes_field(8, text.encode("utf-8", "replace"))
    plugin = _bytes_field(1, _bytes_field(1, b"text"))
    value = _bytes_field(1, tag.encode()) + _bytes_field(8, tensor) + _bytes_field(9, plugin)
    summary = _bytes_field(5, _bytes_field(1, value))
    return b"\x09" + struct.pack("<d", time) + _int_field(2, step) + summary


class EventFile:
    """One event file, to which whole records are appended.

    A record that could not be written whole is cut off again, so that readers do not stop there.
    """

    def __init__(self, path: Path, time: float) -> None:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
        self.write([render_version(time)])

    def write(self, events: List[bytes]) -> None:
        """Append events; on an OSError, such as for a full disk, the file is left as it was."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        data = memoryview(b"".join(map(render_record, events)))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        os.close(self._fd)
