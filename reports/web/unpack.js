// What reports/page/html.py packed, taken apart again.
"use strict";

async function unpackBytes(id) {
  const letters = atob(document.getElementById(id).textContent.trim());
  const packed = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) packed[at] = letters.charCodeAt(at);
  return inflate(new Blob([packed]).stream());
}

async function inflate(stream) {
  return new Uint8Array(await new Response(stream.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

async function unpackText(id) {
  return new TextDecoder().decode(await unpackBytes(id));
}

// Columns of 32-bit numbers, a byte of all rows at a time; `next` moves along.
class PlaneReader {
  constructor(bytes) {
    this.bytes = bytes;
    this.next = 0;
  }

  read(count) {
    const { bytes, next } = this;
    const column = new Int32Array(count);
    for (let row = 0; row < count; row++) {
      const at = next + row;
      column[row] =
        bytes[at] |
        (bytes[at + count] << 8) |
        (bytes[at + 2 * count] << 16) |
        (bytes[at + 3 * count] << 24);
    }
    this.next += 4 * count;
    return column;
  }
}
