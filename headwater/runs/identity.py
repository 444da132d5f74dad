"""Identity of a run: a hash of its text and the settings that count, and the folder named by it.

A run of a comparison or a study lies in a folder called `slug-hash`, such as
`standard-seed0-1f0c9a3e`. So the question "is this that run?" is "is that folder there?", whatever
the recipe's lists look like now and wherever the text lies.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DIGITS = 8
LONGEST = 120  # letters of a slug: file systems take names of 255 bytes
HASHES = ("source_hash", "tokenizer_hash")  # equal where two runs have seen the same tokens


def identity(settings: Mapping[str, Any], corpus: Mapping[str, Any]) -> str:
    """Hash of a run, as eight hexadecimal digits.

    Arguments: `settings`, those that count, by dotted name; `corpus`, the hashes of its text and
    tokenizer.
    """
    text = {name: corpus.get(name) for name in HASHES}
    # As JSON, so that a tuple of Python and a list of a file are the same.
    encoded = json.dumps([settings, text], sort_keys=True)
    return hashlib.sha256(encoded.encode()).hexdigest()[:DIGITS]


def slug(words: str) -> str:
    """Turn words into a part of a folder's name that every file system takes."""
    return re.sub(r"[^\w.,=+-]+", "_", words)[:LONGEST].lstrip(".-")


def folder_of(runs: Path, name: str, digits: str) -> Path:
    """Return the folder of a run: the folder with its hash, whatever its slug, or a new one."""
    # The hash names the run; its words may have changed since it began.
    present = sorted(runs.glob(f"*-{digits}"))
    return present[0] if present else runs / f"{slug(name)}-{digits}"


def label_of(name: str) -> str:
    """The name of a run's folder without its hash."""
    return re.sub(rf"-[0-9a-f]{{{DIGITS}}}$", "", name)


def digits_of(folder: Path) -> str:
    """The hash in the name of a run's folder."""
    return folder.name.rpartition("-")[2]
