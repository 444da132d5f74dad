"""Turn prose and code into the tokens that train.py reads, in SmolLM2's own vocabulary.

    python studies/pretrained/tokens.py MODEL PACKAGES OUT --prose BOOKS --held-out OTHER_BOOKS

PACKAGES is the folder of texts that studies/fresh-text/collect.py writes, a text for each package; books are parted by
lines `<|endoftext|>`, and may be compressed by xz. OUT then has train.npy, prose and code half and half, and prose.npy
and code.npy of other books and other packages.
"""

import argparse
import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

END = "<|endoftext|>"
TRAINED = 15_500_000  # tokens of prose, and as many of code
HELD_OUT = 500_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--trained", type=int, default=TRAINED)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    # Packages in an order that has nothing to do with what they are; the first ones are held out.
    paths = sorted(options.packages.glob("*.txt"), key=lambda path: order(path.name))
    code = (path.read_text() for path in paths)
    held_out = {
        "code": encode(tokenizer, code, HELD_OUT),
        "prose": encode(tokenizer, books(options.held_out), HELD_OUT),
    }
    for name, tokens in held_out.items():
        np.save(options.out / f"{name}.npy", tokens)
    halves = [
        encode(tokenizer, books(options.prose), options.trained),
        encode(tokenizer, code, options.trained),
    ]
    np.save(options.out / "train.npy", np.concatenate(halves))
    for name, tokens in {**held_out, "train": np.concatenate(halves)}.items():
        print(f"{name}: {len(tokens):,} tokens")


def order(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def books(path: Path) -> list[str]:
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    return data.decode().split(f"\n{END}\n")


def encode(tokenizer: Any, texts: Iterable[str], limit: int) -> np.ndarray:
    """The first `limit` tokens of the texts; a text that has begun is not read again."""
    end = tokenizer.convert_tokens_to_ids(END)
    parts = []
    size = 0
    for text in texts:
        ids = tokenizer.backend_tokenizer.encode(text).ids
        parts.append(np.array([*ids, end], dtype=np.uint16))
        size += len(parts[-1])
        if size >= limit:
            break
    return np.concatenate(parts)[:limit]


if __name__ == "__main__":
    main()
