"""Text to token ids and back: raw bytes, or byte-level BPE trained on the corpus.

Both save themselves as one `tokenizer.json`; the BPE file is the `tokenizers` package's own format. Nothing is pickled.
`token_bytes` holds how many bytes of text each token stands for, so that a loss per token becomes bits per byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headwater.errors import UserError, spell
from headwater.folders import at_home, find_model, replace_file
from headwater.runs.settings import TOKENIZERS, DataSettings
from headwater.train.files import from_here

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# What a tokenizer of ours gives back as it was, and others may not.
SAMPLE = f"A naïve cafe\u0301, ﬁve — 深さ 🌊\r\n\ttabs  and {END_OF_TEXT} "


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    @property
    def token_bytes(self) -> np.ndarray: ...

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_json(self) -> str: ...

    def save(self, folder: str | Path) -> Path:
        path = Path(folder) / FILE
        replace_file(path, self.to_json().encode())
        return path


class ByteTokenizer(Tokenizer):
    """Token i is byte i; token 256 ends a document."""

    vocab_size = 257
    end_of_text = 256

    @property
    def token_bytes(self) -> np.ndarray:
        return np.array([1] * 256 + [0], dtype=np.int64)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8, and ids that a padded vocabulary adds, become U+FFFD; end-of-text is dropped."""
        numbers = (int(i) for i in ids if int(i) != self.end_of_text)
        return bytes(i if i < 256 else 0xFF for i in numbers).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps(
            {"type": "bytes", "vocab_size": self.vocab_size, "end_of_text": self.end_of_text}
        )


class BPETokenizer(Tokenizer):
    """Byte-level BPE, so that every text can be encoded and decodes to itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # `<|endoftext|>` inside a document is text somebody wrote, not the end of the document.
        self.inner.encode_special_tokens = True
        # transformers writes into the file how it last cut and filled up prompts.
        self.inner.no_truncation()
        self.inner.no_padding()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        import tokenizers

        byte_level = tokenizers.pre_tokenizers.ByteLevel
        # All 256 bytes are in the vocabulary from the beginning, so that nothing is unknown.
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = byte_level(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_level.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        return self.inner.token_to_id(END_OF_TEXT)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        # The byte-level alphabet writes each byte as one character, so a token's length is its number of bytes.
        words = [self.inner.id_to_token(i) for i in range(self.vocab_size)]
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        lengths[self.end_of_text] = 0
        return lengths

    def encode(self, text: str) -> np.ndarray:
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def to_json(self) -> str:
        return self.inner.to_str()


def hash_of(tokenizer: Tokenizer) -> str:
    """sha256 of what is saved of a tokenizer, which runs and token caches know it by."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    return _read(Path(folder) / FILE)


def find_tokenizer(place: str) -> Tokenizer:
    """Read the tokenizer of a run, a checkpoint, an exported model or a file, for another text."""
    path = find_model(place)
    # A checkpoint has none of its own, its run has.
    if path.is_dir() and path.resolve().parent.name == "checkpoints":
        path = path.resolve().parent.parent
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no tokenizer at {from_here(path)}: {spell('data.tokenizer')} takes {' or '.join(TOKENIZERS)}, or a run, "
            f"one of its checkpoints, what headwater export wrote, or a {FILE}"
        )
    tokenizer = _read(file)
    if not _is_exact(tokenizer):
        raise UserError(
            f"{file} is a tokenizer that changes text, or has no {END_OF_TEXT}: {spell('data.tokenizer')} takes one "
            "that headwater made"
        )
    return tokenizer


def kept_tokenizer(settings: DataSettings, folder: Path) -> DataSettings:
    """A run or a comparison keeps the tokenizer that it took: in its folder, where the other place may be gone."""
    is_gone = settings.tokenizer not in TOKENIZERS and not at_home(settings.tokenizer).exists()
    if is_gone and (folder / FILE).is_file():
        return replace(settings, tokenizer=str(folder))
    return settings


def expected_vocabulary(settings: DataSettings) -> int:
    """The number of tokens these settings lead to, as far as it is known before their text is read."""
    sizes = {"bytes": ByteTokenizer.vocab_size, "bpe": settings.bpe_vocab}
    return sizes.get(settings.tokenizer) or find_tokenizer(settings.tokenizer).vocab_size


def _is_exact(tokenizer: Tokenizer) -> bool:
    if tokenizer.end_of_text is None:  # one that another program has made
        return False
    # Its tokens must give back the text, and account for every byte of it.
    ids = tokenizer.encode(SAMPLE)
    num_bytes = tokenizer.token_bytes[ids].sum()
    return tokenizer.decode(ids) == SAMPLE and num_bytes == len(SAMPLE.encode())


def _read(path: Path) -> Tokenizer:
    # A missing, a torn and a foreign file are all named in the same way.
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text).get("type") == "bytes":
            return ByteTokenizer()
        from tokenizers import Tokenizer as Inner

        return BPETokenizer(Inner.from_str(text))
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"cannot read the tokenizer {path}: {error}") from None
