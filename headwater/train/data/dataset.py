"""Tokens on disk, and which of them a step sees.

A corpus is tokenised once into memory-mapped shards beside a manifest, in a cache folder named by what went in. The
batch is a pure function of (seed, step): a keyed permutation of the windows, one per epoch, that is evaluated only at
the positions asked for. Resuming therefore costs nothing, and ranks and micro-batches are slices of one global batch,
whatever their number.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import UserError, spell
from headwater.folders import at_home, sync, write_file
from headwater.runs.settings import TOKENIZERS, DataSettings
from headwater.train.data.corpus import Document, TextFile, documents, find_files, left_out
from headwater.train.data.tokenizer import FILE as TOKENIZER
from headwater.train.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    find_tokenizer,
    hash_of,
    load_tokenizer,
)
from headwater.train.differences import CORPUS
from headwater.train.files import lock_if_free, seal, taking_turns, unseal, write_json

FORMAT = 6  # raised when the same files would be read as other text, or be kept in another way
MANIFEST = "manifest.json"  # what was written, and the sha256 of every file and of itself
CHECKED = "checked.json"  # size and times of the files when all hashes were last checked
BLOCK = 1 << 24  # bytes under one hash
SAMPLE = 4  # blocks that every start looks at: bits may turn on a disk without a trace
SPLITS = ("train", "validation")
SHARD_TOKENS = 1 << 27
PORTION = 1 << 20  # tokens that are brought into their type at once
LARGE = 16e6  # bytes of files; BPE takes a second for each megabyte
Divide = Callable[[Document], Iterable[tuple[str, str]]]
COPIES = 0.01  # share of held-out text which, trained on too, is worth a word: modules of one line are often alike
BPE_DOCUMENTS = 100_000  # enough to learn merges from; a longer corpus only costs time


def prepare(settings: DataSettings) -> Dataset:
    """The corpus as tokens: from the cache when the same files were tokenised before, else built now.

    All of the cache is checked against its hashes when it is opened first, and again when a file has changed since; a
    few blocks of it, drawn at random, whenever it is opened.
    A source that is itself a folder of such tokens, brought from another machine, is opened as it is.
    """
    if len(settings.source) == 1:
        folder = at_home(settings.source[0])
        if (folder / MANIFEST).is_file():
            return _tokens_of(settings, folder)
    # The cache of a text is known by what its files look like, without reading them.
    files = find_files(settings.source, settings.text_field)
    folder = cache_folder(settings) / _cache_key(settings, files)
    if not _is_checked(folder) or damage(folder, SAMPLE):
        with taking_turns(folder.with_name(f".lock-{folder.name}")):
            # Another process may have done this while this one waited.
            if not _is_checked(folder) or damage(folder, SAMPLE):
                _repair(settings, files, folder)
    return Dataset(folder)


def _tokens_of(settings: DataSettings, folder: Path) -> Dataset:
    """Tokens that were made before; what made them is in their manifest, and the other settings have no say."""
    # Tokens from elsewhere are checked whole when they are new here, else in samples.
    checked = _is_checked(folder)
    if problem := damage(folder, SAMPLE if checked else None):
        raise UserError(f"the tokens in {folder} are damaged ({problem}): bring them again")
    if not checked:
        with suppress(OSError):  # a folder that may only be read is checked each time
            write_json(folder / CHECKED, _stats(folder))
    data = Dataset(folder)
    # Whoever names a tokenizer must get it.
    if settings.tokenizer == "bytes":  # the default, which says nothing
        fits = True
    elif settings.tokenizer == "bpe":
        fits = not isinstance(data.tokenizer, ByteTokenizer)
    else:
        fits = hash_of(find_tokenizer(settings.tokenizer)) == data.manifest["tokenizer_hash"]
    if not fits:
        raise UserError(
            f"the tokens in {folder} were not made with the tokenizer {settings.tokenizer}: give "
            f"{spell('data.source')} the text itself, or leave out {spell('data.tokenizer')}"
        )
    return data


def cache_folder(settings: DataSettings) -> Path:
    return at_home(settings.cache or os.environ.get("HEADWATER_CACHE") or "~/.cache/headwater")


class Dataset:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    @property
    def identity(self) -> dict[str, str]:
        """The hashes that are equal for two runs which have seen the same tokens."""
        return {key: self.manifest[key] for key in CORPUS}

    def windows(self, split: str, context: int) -> Windows:
        return Windows(self.folder, self.manifest, split, context)

    def check_length(self, context: int) -> None:
        """Raise UserError unless each split has a window."""
        for split in SPLITS:
            self.windows(split, context)


class Windows:
    """The windows of one split: context + 1 tokens each, so that inputs and targets are one slice shifted by one.

    A window never crosses a shard, which loses at most one window for every 2^27 tokens.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str, context: int) -> None:
        self.context = context
        self.shards = []
        for shard in manifest[split]["shards"]:
            path = folder / shard["file"]
            self.shards.append(np.memmap(path, dtype=manifest["dtype"], mode="r"))
        # The number of windows up to the end of each shard.
        counts = [(len(shard) - 1) // context for shard in self.shards]
        self.ends = np.cumsum(counts)
        if len(self) == 0:
            change = "raise" if split == "validation" else "lower"
            raise UserError(
                f"the corpus is shorter than the context: its {split} split has {manifest[split]['tokens']} tokens, "
                f"and one window takes {context + 1}. Add text, lower {spell('model.context')}, "
                f"or {change} {spell('data.validation')}, the share that is held out"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Windows by number, as int64."""
        out = np.empty((len(indices), self.context + 1), dtype=np.int64)  # (B, T + 1)
        # The shard of each window, and its place there.
        which = np.searchsorted(self.ends, indices, side="right")
        for row, (index, shard) in enumerate(zip(indices, which)):
            windows_before = self.ends[shard - 1] if shard else 0
            start = (index - windows_before) * self.context
            out[row] = self.shards[shard][start : start + self.context + 1]
        return out

    def spread(self, count: int) -> np.ndarray:
        """The numbers of `count` windows at equal distances, or of all if there are fewer: a fixed set."""
        count = min(count, len(self))
        return np.arange(count) * len(self) // count

    def batch(
        self,
        *,
        seed: int,
        step: int,
        size: int,
        micro: int = 0,
        micros: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> np.ndarray:
        """This rank's share of micro-batch `micro` of the global batch that (seed, step) stands for.

        `size` must be a multiple of `micros` times `world`.
        """
        share = size // (micros * world)
        first = step * size + (micro * world + rank) * share
        places = np.arange(first, first + share)
        # A batch may end one epoch and begin the next, and each epoch has an order of its own.
        epochs = places // len(self)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            in_order = places[inside] % len(self)
            indices[inside] = permute(in_order, len(self), key=(seed, int(epoch)))
        return self.take(indices)


def permute(places: np.ndarray, total: int, *, key: tuple[int, int]) -> np.ndarray:
    """The images of `places` under a permutation of range(total) drawn by `key`, without listing the others.

    A Feistel network permutes the next even power of two; images outside the range are sent through again until they
    fall inside.
    """
    # Numbers are cut into two halves of so many bits.
    bits = ((total - 1).bit_length() + 1) // 2
    half = np.uint64(max(1, bits))
    mask = np.uint64((1 << int(half)) - 1)
    # Each round mixes one half into the other, with a constant that the key gives.
    digest = hashlib.sha256(f"{key[0]}/{key[1]}".encode()).digest()
    rounds = np.frombuffer(digest, dtype="<u8")
    out = places.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for constant in (*rounds, *rounds[::-1]):
            left, right = right, left ^ (_scramble(right ^ constant) & mask)
        out[outside] = (left << half) | right
        outside = out >= total
    return out.astype(np.int64)


def _scramble(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cache_key(settings: DataSettings, files: list[TextFile]) -> str:
    """Name the result without reading the corpus: paths, sizes and times stand in for contents.

    An edit that keeps size and time of modification still changes the time of change, which nobody can set.
    """
    parts = asdict(settings)
    del parts["cache"], parts["source"]
    parts["files"] = []
    for file in files:
        stat = file.path.stat()
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        parts["files"].append((file.name, str(file.path), stat.st_size, *times))
    # A tokenizer from elsewhere counts by its contents, not by its place.
    if settings.tokenizer not in TOKENIZERS:
        parts |= {"tokenizer": hash_of(find_tokenizer(settings.tokenizer)), "bpe_vocab": None}
    text = json.dumps([FORMAT, parts])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _repair(settings: DataSettings, files: list[TextFile], folder: Path) -> None:
    """Build a cache that is not there or not what was written, and remember that it has been checked."""
    problem = damage(folder)
    if problem:
        if folder.exists():
            print(
                f"headwater: the token cache {folder} is damaged ({problem}): it is made anew",
                file=sys.stderr,
            )
        _build(settings, files, folder)
    write_json(folder / CHECKED, _stats(folder))


def damage(folder: Path, sample: int | None = None) -> str | None:
    """Say what is wrong with a cache, or None. Every byte is looked at, or so many blocks drawn at random."""
    try:
        manifest = unseal((folder / MANIFEST).read_bytes())
    except OSError:
        return f"{MANIFEST} is missing"
    if manifest is None or not isinstance(manifest.get("sha256"), dict):
        return f"{MANIFEST} is not what was written"
    # Files that are gone or have another size need no hash.
    blocks = []
    for name, hashes in manifest["sha256"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if len(hashes) != -(-path.stat().st_size // BLOCK):
            return f"{name} is not what was written"
        blocks += [(path, number, expected) for number, expected in enumerate(hashes)]
    # Then the contents, block by block.
    if sample is not None and sample < len(blocks):
        blocks = random.sample(blocks, sample)
    for path, number, expected in blocks:
        with path.open("rb") as file:
            file.seek(number * BLOCK)
            if hashlib.sha256(file.read(BLOCK)).hexdigest() != expected:
                return f"{path.name} is not what was written"
    return None


def _is_checked(folder: Path) -> bool:
    """Tell whether all of the cache was checked, and no file of it has changed since."""
    try:
        return json.loads((folder / CHECKED).read_text(encoding="utf-8")) == _stats(folder)
    except (OSError, ValueError):
        return False


def _stats(folder: Path) -> dict[str, list[int]]:
    """Size and times of everything in a cache."""
    stats = {}
    for path in sorted(folder.iterdir()):
        if path.name != CHECKED and not path.name.startswith("."):
            stat = path.stat()
            stats[path.name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return stats


def _build(settings: DataSettings, files: list[TextFile], folder: Path) -> None:
    """Tokenise into a temporary folder and put it in place by one rename, so that a cache is whole or absent."""
    scratch = folder.with_name(f".tmp-{folder.name}")
    remove_unfinished(folder.parent)
    for stale in (scratch, folder):  # a build that was killed, a cache that lost a file
        shutil.rmtree(stale, ignore_errors=True)
    scratch.mkdir(parents=True)
    if warning := left_out(settings.source):
        print(warning, file=sys.stderr)
    size = sum(file.path.stat().st_size for file in files)
    if size > LARGE:
        print(
            f"tokenising files of {size / 1e6:.0f} MB, whose tokens are kept in {folder} for later",
            file=sys.stderr,
        )
    # Nothing half done is left, whatever happens.
    try:
        manifest = _tokenise(settings, files, scratch)
        write_file(scratch / MANIFEST, [seal(manifest)])
        sync(scratch)
        scratch.rename(folder)
        sync(folder.parent)
        print(_summary(settings, files, manifest), file=sys.stderr)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_unfinished(cache: Path) -> None:
    """Remove what killed processes left half written. Whoever still writes holds the lock of that name."""
    for scratch in cache.glob(".tmp-*"):
        with lock_if_free(cache / scratch.name.replace(".tmp-", ".lock-", 1)) as is_free:
            if is_free:
                shutil.rmtree(scratch, ignore_errors=True)


def _summary(settings: DataSettings, files: list[TextFile], manifest: dict[str, Any]) -> str:
    """Say what was found, so that what was not is noticed."""
    train, held_out = (manifest[name] for name in SPLITS)
    documents = held_out["documents"]
    if manifest["split"] == "by_document":  # where documents are cut, each has a part held out
        documents += train["documents"]
    summary = (
        f"text: files {len(files):,}, documents {documents:,}, "
        f"tokens {train['tokens']:,} to train on and {held_out['tokens']:,} held out"
    )
    if settings.tokenizer not in TOKENIZERS:
        summary += f", of the {manifest['vocab_size']:,} of {settings.tokenizer}"
    return summary


def _tokenise(settings: DataSettings, files: list[TextFile], scratch: Path) -> dict[str, Any]:
    # The text is read up to three times: for the split, for BPE, for the tokens.
    split, divide = _choose_split(files, settings.validation)

    def pieces() -> Iterator[tuple[str, str]]:
        """Every text with its split."""
        for document in documents(files):
            yield from divide(document)

    if settings.tokenizer == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif settings.tokenizer == "bpe":
        texts = (text for name, text in pieces() if name == "train")
        tokenizer = BPETokenizer.train(islice(texts, BPE_DOCUMENTS), settings.bpe_vocab)
    else:
        tokenizer = find_tokenizer(settings.tokenizer)
    manifest = _write_shards(pieces(), tokenizer, scratch)
    if not all(manifest[name]["documents"] for name in SPLITS):
        raise UserError(
            f"the corpus {', '.join(settings.source)} is empty or too short to hold out a validation split; it has "
            f"{len(files)} files"
        )
    origin = {"source": list(settings.source), "tokenizer": settings.tokenizer}
    return {**manifest, **origin, "split": split}


def _choose_split(files: list[TextFile], share: float) -> tuple[str, Divide]:
    """Hold out the documents whose names hash below a cut-off, whole, if that gives about the asked share of bytes.

    The share itself is tried first: under a cut-off that the other documents have no part in, one that joins the
    corpus later moves none of them. Few or unequal documents get the cut-off that comes nearest by bytes instead, and
    where none comes near, every document is cut in two.
    """
    weighed = ((_place(document), len(document.text.encode())) for document in documents(files))
    columns = np.fromiter(weighed, dtype=[("place", "f8"), ("bytes", "f8")])
    places, sizes = columns["place"], columns["bytes"]

    # Bytes that are held out, by the number of documents below the cut-off.
    order = np.argsort(places, kind="stable")
    bytes_below = np.append(0, np.cumsum(sizes[order]))
    nearest = np.argmin(np.abs(bytes_below - share * sizes.sum()))
    for cutoff in (share, np.append(places[order], 1.0)[nearest]):
        part = sizes[places < cutoff].sum() / max(1, sizes.sum())
        if share / 2 <= part <= min(2 * share, (1 + share) / 2):
            return "by_document", partial(_by_document, cutoff=float(cutoff))
    return "by_cutting", partial(_by_cutting, share=share)


def _place(document: Document) -> float:
    """A number from 0 to 1 that a document's name draws."""
    digest = hashlib.sha256(document.key.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _by_document(document: Document, cutoff: float) -> Iterator[tuple[str, str]]:
    yield ("validation" if _place(document) < cutoff else "train"), document.text


def _by_cutting(document: Document, share: float) -> Iterator[tuple[str, str]]:
    cut = int(len(document.text) * (1 - share))
    parts = {"train": document.text[:cut], "validation": document.text[cut:]}
    for name, text in parts.items():
        if text:
            yield name, text


def _write_shards(
    pieces: Iterable[tuple[str, str]], tokenizer: Tokenizer, scratch: Path
) -> dict[str, Any]:
    """Write the tokens of all texts; returns the manifest."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    writers = {name: _ShardWriter(scratch, name, dtype) for name in SPLITS}
    # The hash of the text counts where one text ends and which split it is in.
    content = hashlib.sha256()
    for name, text in pieces:
        raw = text.encode()
        content.update(f"{name}/{len(raw)}/".encode())
        content.update(raw)
        writers[name].add(tokenizer.encode(text), tokenizer.end_of_text, raw)
    _tell_copies(writers["train"], writers["validation"])
    tokenizer.save(scratch)
    # Shards are hashed as they are closed.
    splits = {name: writer.close() for name, writer in writers.items()}
    hashes = {TOKENIZER: hash_blocks(scratch / TOKENIZER)}
    for writer in writers.values():
        hashes |= writer.hashes
    return {
        "format": FORMAT,
        "source_hash": content.hexdigest(),
        "tokenizer_hash": hash_of(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype.str,
        **splits,
        "sha256": hashes,
    }


def _tell_copies(train: _ShardWriter, held_out: _ShardWriter) -> None:
    """Warn if much of the held-out text is trained on too: copies have two names, and the split goes by name."""
    both = np.isin(held_out.keys, train.keys)
    copied = np.asarray(held_out.sizes)[both].sum()
    share = copied / max(1, held_out.bytes)
    if share >= COPIES:
        print(
            f"headwater: copies of {both.sum()} of the {held_out.documents} held-out documents, {100 * share:.0f} % of "
            "that text, are trained on, so that losses on it look better than they are: leave copies out of the source",
            file=sys.stderr,
        )


def hash_blocks(path: Path) -> list[str]:
    """The sha256 of each block of a file."""
    hashes = []
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hashes.append(hashlib.sha256(block).hexdigest())
    return hashes


class _ShardWriter:
    """Appends documents to the shards of a split, and counts and hashes what it wrote."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shards: list[dict[str, Any]] = []
        self.hashes: dict[str, list[str]] = {}
        self.bytes = self.documents = 0
        self.keys, self.sizes = array("q"), array("q")  # of each document, eight bytes each

    def add(self, ids: np.ndarray, end_of_text: int, text: bytes) -> None:
        """Append a document. Its tokens are written as they are: copies of a long one fill the memory."""
        # A document is never divided between shards.
        if not self.shards or self.shards[-1]["tokens"] >= SHARD_TOKENS:
            self._end_shard()
            name = f"{self.split}-{len(self.shards):05d}.bin"
            self.shards.append({"file": name, "tokens": 0})
            self.file = (self.folder / name).open("wb")
        for start in range(0, len(ids), PORTION):
            self.file.write(ids[start : start + PORTION].astype(self.dtype).data)
        self.file.write(np.array([end_of_text], dtype=self.dtype).data)
        self.shards[-1]["tokens"] += len(ids) + 1
        # Equal documents have equal keys, by which copies are found.
        self.keys.append(hash(text))
        self.sizes.append(len(text))
        self.bytes += len(text)
        self.documents += 1

    def _end_shard(self) -> None:
        if self.shards:
            self.file.close()
            path = self.folder / self.shards[-1]["file"]
            sync(path)
            self.hashes[path.name] = hash_blocks(path)

    def close(self) -> dict[str, Any]:
        self._end_shard()
        return {
            "tokens": sum(shard["tokens"] for shard in self.shards),
            "bytes": self.bytes,
            "documents": self.documents,
            "shards": self.shards,
        }
