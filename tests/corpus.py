"""A small corpus without a download: `python -m tests.corpus > corpus.jsonl`.

Sentences of a toy language whose next word depends on the one before, so that a model that trains
on it has something to learn and its loss falls. The same numbers give the same bytes anywhere.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator

SYLLABLES = "ba de ki lo mu na pe ri so tu va we zi cha sho ple tra gro sti kle".split()  # noqa: SIM905
NUM_WORDS = 600
NUM_FOLLOWERS = 8
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_words(random_: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < NUM_WORDS:
        found["".join(random_.choices(SYLLABLES, k=random_.randint(1, 4)))] = None
    return list(found)


def make_documents(num_documents: int, seed: int = 1234) -> Iterator[str]:
    """Yield texts of one to twelve sentences."""
    random_ = random.Random(seed)
    words = make_words(random_)
    followers = {word: random_.sample(words, NUM_FOLLOWERS) for word in words}
    for _ in range(num_documents):
        sentences = []
        word = random_.choice(words)
        for _ in range(random_.randint(1, 12)):
            line = [word]
            for _ in range(random_.randint(3, 14)):
                word = followers[word][min(int(random_.expovariate(0.6)), NUM_FOLLOWERS - 1)]
                line.append(word)
            sentences.append(" ".join(line).capitalize() + random_.choice("...!?"))
        yield " ".join(sentences)


def make_wordpiece_vocabulary(seed: int = 1234) -> list[str]:
    """Return tokens for a BERT on this corpus: its words, and letters for anything else."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    marks = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    pieces = [f"##{letter}" for letter in letters]
    listed = [*SPECIAL, *marks, *pieces, *make_words(random.Random(seed))]
    return list(dict.fromkeys(listed))


if __name__ == "__main__":
    for text in make_documents(2000):
        sys.stdout.write(json.dumps({"text": text}) + "\n")
