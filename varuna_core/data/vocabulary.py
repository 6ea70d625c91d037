"""Encode text as token bytes, with the tokenizers of GPT-2, BERT and the whitespace vocabulary.

A byte-level BPE or WordPiece tokenizer encodes the text between two spaces independently of its
surroundings. So an encoder caches the bytes of each such unit, calls the tokenizer only for new
units, and joins bytes. The ends of units are chosen so that this is exact (see the patterns); a
property test compares it with the tokenizer's own encoding of the whole text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from varuna_core.data.errors import DataError
from varuna_core.data.indexed import choose_dtype

Kind = Literal["bpe", "wordpiece-lower", "wordpiece-cased", "whitespace"]
KINDS: tuple[Kind, ...] = ("bpe", "wordpiece-lower", "wordpiece-cased", "whitespace")
END = "<|endoftext|>"
UNKNOWN = "<unk>"
CACHE_CHARACTERS = 64_000_000

# Unicode's White_Space, which is what `\s` means in GPT-2's pattern. Python's own `\s` also takes
# U+001C to U+001F.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# A run of spaces and the word after it: GPT-2's pattern never joins a word's end to a space, and
# which space goes with the word is decided within the run.
_BPE_UNITS = re.compile(f"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
# BERT drops some control characters without parting the words around them, NEL among them; these
# four always part.
_WORDPIECE_UNITS = re.compile("[^ \t\n\r]+")


class Encoder(Protocol):
    """The part of a tokenizer that encoding workers need."""

    dtype: np.dtype[Any]
    size: int
    """The largest token id plus one."""
    end: int | None
    """The token that ends a document."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the token bytes of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return approximately the text, for people to look at."""


@dataclass(frozen=True, kw_only=True)
class VocabularyFiles:
    """A kind of tokenizer and its files."""

    kind: Kind
    vocab: Path
    merges: Path | None = None

    def digest(self) -> str:
        """Return a checksum of the files' contents."""
        found = hashlib.sha256(self.kind.encode())
        for path in (self.vocab, self.merges):
            if path is not None:
                found.update(hashlib.sha256(_read_bytes(path)).digest())
        return found.hexdigest()


def open_encoder(files: VocabularyFiles) -> Encoder:
    if files.kind == "whitespace":
        words = read_vocab_json(files.vocab)
        return WhitespaceEncoder(words, files.vocab)
    if files.kind == "bpe":
        words = read_vocab_json(files.vocab)
        tokenizer = _build_bpe(files, words)
        units = _BPE_UNITS
    else:
        words = read_vocab_lines(files.vocab)
        tokenizer = _build_wordpiece(files, words)
        units = _WORDPIECE_UNITS
    end = words.get(END, words.get("[SEP]"))
    return UnitEncoder(tokenizer, units.findall, end, words)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def read_vocab_json(path: Path) -> dict[str, int]:
    """Read a JSON object of tokens and their ids."""
    try:
        words = json.loads(_read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(words, dict) or not words:
        raise DataError(f"{path} must be a JSON object of tokens and ids, and not empty")
    for word, number in words.items():
        if type(number) is not int or not 0 <= number < 2**31:
            raise DataError(f"{path}: the id of {word!r} is {number!r}; it must be 0 to 2147483647")
    if len(set(words.values())) < len(words):
        raise DataError(f"{path} gives one id to two tokens")
    return words


def read_vocab_lines(path: Path) -> dict[str, int]:
    """Read a file with one token a line, such as BERT's vocab.txt."""
    try:
        lines = _read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from None
    if lines[-1] == "":
        lines.pop()
    return {line.rstrip("\r"): number for number, line in enumerate(lines)}


def import_tokenizers() -> Any:
    """Return the `tokenizers` package, or raise an error that says how to install it."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(f"{error}: pip install '.[data]' in vjob's checkout") from None
    return tokenizers


def _build_bpe(files: VocabularyFiles, words: dict[str, int]) -> Any:
    library = import_tokenizers()
    if files.merges is None:
        raise DataError("bpe needs --merges in addition to --vocab (merges.txt and vocab.json)")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    missing = [letter for letter in alphabet if letter not in words]
    if missing:
        raise DataError(
            f"{files.vocab} lacks {len(missing)} of the 256 symbols of byte-level BPE, such as "
            f"{missing[0]!r}: text would be lost. `whitespace` is for a vocabulary of whole words"
        )
    try:
        model = library.models.BPE.from_file(str(files.vocab), str(files.merges))
    except Exception as error:  # the library has no narrower type
        raise DataError(f"{files.vocab} and {files.merges} do not match: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _build_wordpiece(files: VocabularyFiles, words: dict[str, int]) -> Any:
    library = import_tokenizers()
    if "[UNK]" not in words:
        raise DataError(f"{files.vocab} has no [UNK]: it is not a WordPiece vocabulary")
    tokenizer = library.Tokenizer(library.models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(
        lowercase=files.kind == "wordpiece-lower"
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


class UnitEncoder:
    """Wrapper of a Hugging Face tokenizer that encodes each distinct unit of text once."""

    def __init__(
        self,
        tokenizer: Any,
        find_units: Callable[[str], list[str]],
        end: int | None,
        words: dict[str, int],
    ) -> None:
        self.tokenizer = tokenizer
        self.find_units = find_units
        self.end = end
        self.size = max(words.values()) + 1
        self.dtype = choose_dtype(self.size)
        self._known: dict[str, bytes] = {}
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        units = [self.find_units(text) for text in texts]
        self._learn(set().union(*units))
        get = self._known.__getitem__
        return [b"".join(map(get, words)) for words in units]

    def _learn(self, units: set[str]) -> None:
        if self._num_characters > CACHE_CHARACTERS:
            self._known.clear()
            self._num_characters = 0
        new = list(units - self._known.keys())
        found = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
        for unit, encoding in zip(new, found, strict=True):
            self._known[unit] = np.array(encoding.ids, self.dtype).tobytes()
        self._num_characters += sum(map(len, new))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class WhitespaceEncoder:
    """Encoder with one token for each word between spaces; unknown words are `<unk>`."""

    def __init__(self, words: dict[str, int], path: Path) -> None:
        if UNKNOWN not in words:
            raise DataError(f"{path} has no {UNKNOWN}, which stands for words that it lacks")
        self.size = max(words.values()) + 1
        self.dtype = dtype = choose_dtype(self.size)
        self.end = words.get(END)
        whole, item = np.array(list(words.values()), dtype).tobytes(), dtype.itemsize
        places = range(0, len(whole), item)
        self._known = {word: whole[i : i + item] for word, i in zip(words, places, strict=True)}
        for special in (UNKNOWN, END):  # in a text they are words like any other that is not known
            self._known.pop(special, None)
        self._unknown = np.array(words[UNKNOWN], dtype).tobytes()
        self._words = {number: word for word, number in words.items()}

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        get, unknown = self._known.get, repeat(self._unknown)
        return [b"".join(map(get, text.split(), unknown)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words.get(int(number), f"?{number}") for number in ids)


def train_bpe(texts: Iterable[str], size: int, folder: Path) -> VocabularyFiles:
    """Train a byte-level BPE of `size` tokens; write vocab.json and merges.txt to `folder`."""
    library = import_tokenizers()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    if size <= len(alphabet):
        raise DataError(
            f"--train {size}: a byte-level BPE needs at least {len(alphabet) + 1} tokens"
        )
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=sorted(alphabet),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    vocab, merges = tokenizer.model.save(str(folder))
    return VocabularyFiles(kind="bpe", vocab=Path(vocab), merges=Path(merges))


def train_whitespace(texts: Iterable[str], size: int, folder: Path) -> VocabularyFiles:
    """Write the `size` most frequent words, with `<unk>` and `<|endoftext|>`, to vocab.json."""
    counts: dict[str, int] = {}
    for text in texts:
        for word in text.split():
            counts[word] = counts.get(word, 0) + 1
    special = [UNKNOWN, END]
    if size < len(special):
        raise DataError(f"--train {size}: a whitespace vocabulary needs at least {len(special)}")
    frequent = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
    words = special + frequent[: size - len(special)]
    path = folder / "vocab.json"
    numbered = {word: number for number, word in enumerate(words)}
    path.write_text(json.dumps(numbered, ensure_ascii=False, indent=0), encoding="utf-8")
    return VocabularyFiles(kind="whitespace", vocab=path)
