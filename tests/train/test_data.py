"""The corpus becomes the same tokens everywhere, and a batch depends on (seed, step) alone."""

import bz2
import gzip
import json
import lzma
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard
from processes import python

from headwater.errors import UserError
from headwater.runs.settings import DataSettings
from headwater.train.data import dataset
from headwater.train.data.corpus import documents, find_files
from headwater.train.data.dataset import Dataset, cache_folder, damage, permute, prepare
from headwater.train.files import taking_turns

BPE = {"tokenizer": "bpe", "bpe_vocab": 300}


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    add_documents(folder, 60)
    return folder


@pytest.fixture
def tokenise(tmp_path):
    """Prepares sources in a cache of this test."""

    def tokenise_sources(*sources, **settings) -> Dataset:
        cache = str(tmp_path / "cache")
        return prepare(
            DataSettings(**{"source": list(map(str, sources)), "cache": cache} | settings)
        )

    return tokenise_sources


def add_documents(folder: Path, count: int) -> None:
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " * 20)


def tokens(data: Dataset, split: str) -> np.ndarray:
    return np.concatenate(data.windows(split, 8).shards)


def texts(data: Dataset, split: str) -> list[str]:
    ids = tokens(data, split)
    ends = np.flatnonzero(ids == data.tokenizer.end_of_text) + 1
    return [data.tokenizer.decode(part) for part in np.split(ids, ends)[:-1]]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 64, 1000, 1025])
def test_permute_is_a_permutation_and_depends_on_its_key(total):
    places = np.arange(total)
    images = permute(places, total, key=(0, 0))
    assert sorted(images) == list(range(total))
    if total > 10:
        for key in ((0, 1), (1, 0)):
            assert (images != permute(places, total, key=key)).any()
        assert abs(np.corrcoef(places, images)[0, 1]) < 0.35


def test_the_order_does_not_depend_on_ranks_or_micro_batches(corpus, tokenise):
    windows = tokenise(corpus).windows("train", 16)
    for step in (0, 5, 1000):
        batch = {"seed": 3, "step": step, "size": 24}
        whole = windows.batch(**batch)
        for micros, world in ((1, 2), (2, 1), (3, 4), (2, 6)):
            parts = []
            for micro in range(micros):
                for rank in range(world):
                    share = {"micro": micro, "micros": micros, "rank": rank, "world": world}
                    parts.append(windows.batch(**batch, **share))
            assert np.array_equal(np.concatenate(parts), whole)


def test_an_epoch_takes_every_window_once_and_seeds_differ(corpus, tokenise):
    windows = tokenise(corpus).windows("train", 16)
    count, size = len(windows), 7
    steps = range(2 * count // size + 1)
    rows = np.concatenate([windows.batch(seed=0, step=step, size=size) for step in steps])
    first, second = rows[:count], rows[count : 2 * count]
    everything = np.sort(windows.take(np.arange(count)), axis=0)
    for epoch in (first, second):
        assert np.array_equal(np.sort(epoch, axis=0), everything)
    assert not np.array_equal(first, second)
    assert not np.array_equal(windows.batch(seed=1, step=0, size=size), first[:size])


def test_evaluation_windows_are_spread_over_the_text(corpus, tokenise):
    windows = tokenise(corpus).windows("train", 8)
    assert len(windows) > 100
    chosen = windows.spread(5)
    assert chosen[0] == 0
    assert np.diff(chosen) == pytest.approx([len(windows) / 5] * 4, abs=1)
    assert windows.spread(10**6).tolist() == list(range(len(windows)))


def test_shards_split_and_windows_stay_inside(corpus, tokenise, monkeypatch):
    whole = tokenise(corpus)
    monkeypatch.setattr(dataset, "SHARD_TOKENS", 1000)
    # Another cache key, the same split
    data = tokenise(corpus, validation=0.0500001)
    shards = data.manifest["train"]["shards"]
    assert len(shards) > 3
    assert np.array_equal(tokens(data, "train"), tokens(whole, "train"))
    windows = data.windows("train", 16)
    lengths = [(shard["tokens"] - 1) // 16 for shard in shards]
    assert len(windows) == sum(lengths)
    assert damage(data.folder) is None
    first_of_second = windows.take(np.array([lengths[0]]))[0]
    assert np.array_equal(first_of_second, windows.shards[1][:17])


def test_a_text_that_is_shorter_than_the_context_is_refused(corpus, tokenise):
    data = tokenise(corpus)
    for split, change in (("train", "lower"), ("validation", "raise")):
        with pytest.raises(UserError, match=f"its {split} split .*{change} data.validation"):
            data.windows(split, 100_000)


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(
    corpus, tokenise, capsys, monkeypatch
):
    """Messages on files and tokens come once: when the text is tokenised."""
    monkeypatch.setattr(dataset, "LARGE", 1000)
    for name in ("page.html", "other.HTML.gz", "table.csv", "README", ".hidden.txt"):
        (corpus / name).write_text("not read")
    for folder in ("inner", ".cache"):
        (corpus / folder).mkdir()
        (corpus / folder / "b.txt").write_text("read " * 20)
    (corpus / "link.txt").symlink_to(corpus / "000.txt")
    names = [file.name for file in find_files((str(corpus),))]
    assert names == [*(f"{i:03d}.txt" for i in range(60)), "inner/b.txt", "link.txt"]
    data = tokenise(corpus)
    first, large, last = capsys.readouterr().err.splitlines()
    assert first.startswith("4 files are left out: from a folder only .txt")
    assert large == f"tokenising files of 0 MB, whose tokens are kept in {data.folder} for later"
    train, held_out = (f"{data.manifest[split]['tokens']:,}" for split in ("train", "validation"))
    counts = f"tokens {train} to train on and {held_out} held out"
    assert last == f"text: files 62, documents 62, {counts}"
    tokenise(corpus)
    assert capsys.readouterr().err == ""


MEMORY = """
import resource, sys
from headwater.runs.settings import DataSettings
from headwater.train.data.dataset import prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataSettings(source=(sys.argv[1],), cache=sys.argv[1] + "-cache"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_long_document_takes_a_few_times_its_size(tmp_path):
    """The memory counts all that is made of it on the way to the disk."""
    line, size = b"a line of a long document, as there are many\n", 30_000_000
    source = tmp_path / "long.txt.zst"
    source.write_bytes(zstandard.ZstdCompressor().compress(line * (size // len(line))))
    (tmp_path / "measure.py").write_text(MEMORY)
    used = python(tmp_path / "measure.py", source)
    assert int(used.splitlines()[-1]) < 6 * size


def test_the_standard_library_is_the_default_and_is_split_by_file(tmp_path):
    data = prepare(DataSettings(cache=str(tmp_path)))
    train, held_out = data.manifest["train"], data.manifest["validation"]
    assert train["bytes"] > 2_000_000
    assert 0.01 < held_out["documents"] / (train["documents"] + held_out["documents"]) < 0.1
    assert data.manifest["split"] == "by_document"
    assert train["tokens"] == train["bytes"] + train["documents"]
    assert "import" in data.tokenizer.decode(tokens(data, "validation"))


def test_one_long_document_is_cut_in_two(tmp_path, tokenise):
    text = "".join(f"line {i}\n" for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    data = tokenise(tmp_path / "book.txt", validation=0.1)
    train, held_out = (data.tokenizer.decode(tokens(data, s)) for s in ("train", "validation"))
    assert train + held_out == text
    assert data.manifest["split"] == "by_cutting"
    assert len(held_out) == pytest.approx(0.1 * len(text), rel=0.01)


SIZES = [[400] * 3, [400] * 8, [400] * 15, [40] * 100 + [9000], [5000] + [200] * 9]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_held_out_share_is_met_however_few_the_documents(tmp_path, tokenise, sizes, share):
    """Corpora of each shape that differ in their files' names, and so in the hashes of these."""
    for number in range(6):
        folder = tmp_path / f"corpus{number}"
        folder.mkdir()
        for i, size in enumerate(sizes):
            (folder / f"{number}-{i}.txt").write_text("x" * size)
        manifest = tokenise(folder, validation=share).manifest
        held_out = manifest["validation"]["bytes"] / sum(sizes)
        assert share / 2 <= held_out <= min(2 * share, (1 + share) / 2)
        assert manifest["split"] in ("by_document", "by_cutting")
        if max(sizes) < share * sum(sizes):
            assert manifest["split"] == "by_document"


def test_a_document_that_joins_moves_no_other_between_the_splits(corpus, tokenise):
    add_documents(corpus, 200)
    before = tokenise(corpus)
    add_documents(corpus, 230)
    after = tokenise(corpus)
    assert before.manifest["split"] == after.manifest["split"] == "by_document"
    assert set(texts(before, "validation")) < set(texts(after, "validation"))


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".XZ": lzma.compress,
    ".bz2": bz2.compress,
    ".Zst": zstandard.ZstdCompressor().compress,
}


def read(source, field="text") -> list[str]:
    return [document.text for document in documents(find_files((str(source),), field))]


@pytest.mark.parametrize("ending", COMPRESS)
def test_documents_of_every_kind_of_file(tmp_path, tokenise, ending):
    compress, folder = COMPRESS[ending], tmp_path / "mixed"
    long = os.urandom(200_000).hex()
    text = b"one\r\nline\n<|endoftext|>\ntwo <|endoftext|> inside\n<|endoftext|>\n\n"
    (folder / "deep").mkdir(parents=True)
    for name, *parts in (
        ("a.TXT", text),
        ("b.jsonl", '\ufeff{"text": "sechs ß"}\n'.encode()),
        ("deep/c.jsonl", b'{"text": "three"}\n\n{"text": "four", "id": 4}\n'),
        # Files may be compressed in several parts, one after the other.
        ("deep/d.md", long[:9].encode(), long[9:].encode()),
    ):
        (folder / f"{name}{ending}").write_bytes(b"".join(map(compress, parts)))
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    expected = ["one\r\nline\n", "two <|endoftext|> inside\n", "sechs ß", "three", "four", long]
    assert read(folder) == expected
    manifest = tokenise(folder, validation=0.5).manifest
    num_bytes = manifest["train"]["bytes"] + manifest["validation"]["bytes"]
    assert num_bytes == len("".join(expected).encode())


def test_a_json_file_is_an_array_of_documents_or_json_lines(tmp_path):
    rows = [{"body": "one\n", "text": "no"}, "two", {"body": "drei ß"}]
    lines = "\n".join(map(json.dumps, rows))
    for name, text in {
        "indented.json": json.dumps(rows, indent=2),
        "marked.json": "\ufeff\n" + json.dumps(rows),
        "lines.json": lines,
        "lines.jsonl": lines,
    }.items():
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name, field="body") == ["one\n", "two", "drei ß"], name


FIELDS = b'{"text": "fine"}\n{"a": "x", "long": "longer"}'
BAD = {
    "latin.txt": ("é".encode("latin-1") * 50, "cannot read .*utf-8"),
    "torn.txt.gz": (gzip.compress(b"text " * 1000)[:-20], "cannot read"),
    "torn.txt.zst": (COMPRESS[".Zst"](os.urandom(1000))[:-20], "cannot read"),
    "no.txt.zst": (b"no zstd at all", "cannot read"),
    "half.jsonl": (b'{"text": "half \\ud83c only"}', "cannot read"),
    "nested.jsonl": (b'{"text": "fine"}\n' + b"[" * 100_000, "line 2: this is not JSON"),
    "fields.jsonl": (FIELDS, "line 2: .*choose one with data.text_field long"),
    "none.jsonl": (b'{"id": 1}', "line 1: .*none of them is a string"),
    "item.json": (b'["fine", 2]', "item 2: expected a JSON object"),
    "blank.txt": (b"\n  \n", "is empty or too short"),
    "nothing/settings.json": (b"[]", "no corpus at .*nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_corpora_are_named(tmp_path, tokenise, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = path if path.parent == tmp_path else path.parent
    with pytest.raises(UserError, match=f"{source.name}.*{message}|{message}"):
        tokenise(source)
    assert not list((tmp_path / "cache").glob(".tmp-*"))


def test_copies_of_held_out_text_that_are_trained_on_are_told(corpus, tokenise, capsys):
    for i in range(40):  # a byte each, which does not matter
        (corpus / f"alike-{i}.py").write_text("#")
    few = tokenise(corpus)
    assert "#" in set(texts(few, "train")) & set(texts(few, "validation"))
    assert "copies" not in capsys.readouterr().err
    for i in range(60):
        shutil.copy(corpus / f"{i:03d}.txt", corpus / f"copy-{i}.txt")
    data = tokenise(corpus)
    train, held_out = set(texts(data, "train")), texts(data, "validation")
    copies = [text for text in held_out if text in train]
    share = 100 * len("".join(copies)) / len("".join(held_out))
    message = f"copies of {len(copies)} of the {len(held_out)} held-out documents, {share:.0f} %"
    assert message in capsys.readouterr().err


def test_a_tokenizer_is_taken_as_it_is(tmp_path, corpus, tokenise, capsys):
    """A run, one of its checkpoints and a file name one tokenizer: its contents count, not its place."""
    tokenizer = tokenise(corpus, **BPE).tokenizer
    run, other = tmp_path / "run", tmp_path / "other.txt"
    checkpoint = run / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    # The file of a tokenizer that has served transformers says how to cut a prompt.
    tokenizer.inner.enable_truncation(8)
    tokenizer.inner.enable_padding(length=8)
    tokenizer.inner.save(str(run / "tokenizer.json"))
    other.write_text("".join(f"neither of these words {i}\n" for i in range(2000)))
    folders = set()
    for place, size in ((run, 300), (checkpoint, 300), (run / "tokenizer.json", 999)):
        data = tokenise(other, tokenizer=str(place), bpe_vocab=size)
        folders.add(data.folder)
    assert len(folders) == 1
    assert data.manifest["vocab_size"] == tokenizer.vocab_size
    assert data.manifest["train"]["tokens"] > 1000
    assert texts(data, "train")[0].startswith("neither of these words 0\n")
    assert f", of the {tokenizer.vocab_size} of {run}\n" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_taken_says_why(tmp_path, corpus, tokenise):
    place = tmp_path / "tokenizer.json"
    inner = json.loads(tokenise(corpus, **BPE).tokenizer.to_json())
    space = {**inner["pre_tokenizer"], "add_prefix_space": True}
    words = {word: i for word, i in inner["model"]["vocab"].items() if i}
    endless = {**inner, "added_tokens": [], "model": {**inner["model"], "vocab": words}}
    for content, message in (
        ({**inner, "normalizer": {"type": "NFC"}}, "changes text"),
        ({**inner, "pre_tokenizer": space}, "changes text"),
        (endless, r"has no <\|endoftext\|>"),
        ([], "cannot read the tokenizer"),
        ({"model": {"type": "BPE"}}, "cannot read the tokenizer"),
    ):
        place.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            tokenise(corpus, tokenizer=str(place))
    place.unlink()
    with pytest.raises(UserError, match=r"no tokenizer at .*takes bytes or bpe, or a run"):
        tokenise(corpus, tokenizer=str(place))


def test_tokens_that_were_made_with_another_tokenizer_are_refused(corpus, tokenise):
    of_bytes, of_bpe = tokenise(corpus).folder, tokenise(corpus, **BPE).folder
    for source, tokenizer in ((of_bytes, of_bpe), (of_bytes, "bpe"), (of_bpe, of_bytes)):
        with pytest.raises(UserError, match="not made with the tokenizer"):
            tokenise(source, tokenizer=str(tokenizer))
    for source, tokenizer in ((of_bytes, of_bytes), (of_bpe, "bpe"), (of_bpe, "bytes")):
        assert tokenise(source, tokenizer=str(tokenizer)).folder == source


def test_bpe_learns_nothing_from_held_out_text(tmp_path, tokenise):
    """Every document repeats a word of its own, which becomes a token where it is trained on, and only there."""
    words = [2 * letter for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "corpus").mkdir()
    for word in words:
        (tmp_path / "corpus" / f"{word}.txt").write_text(f"{word} " * 50)
    data = tokenise(tmp_path / "corpus", tokenizer="bpe", bpe_vocab=400, validation=0.3)
    held_out = set(data.tokenizer.decode(tokens(data, "validation")).split())
    assert 4 <= len(held_out) <= 12
    vocabulary = set(json.loads(data.tokenizer.to_json())["model"]["vocab"])
    assert set(words) - vocabulary == held_out
    train = data.manifest["train"]
    assert train["tokens"] < 0.6 * train["bytes"]
    assert data.tokenizer.token_bytes[tokens(data, "train")].sum() == train["bytes"]


def test_a_cache_is_known_by_its_text_and_lies_where_one_says(
    tmp_path, corpus, tokenise, monkeypatch
):
    first, file = tokenise(corpus), corpus / "000.txt"
    manifest = first.folder / "manifest.json"
    written, before = manifest.stat().st_mtime_ns, file.stat()
    assert tokenise(corpus).folder == first.folder
    assert manifest.stat().st_mtime_ns == written
    copy = shutil.copytree(corpus, tmp_path / "copy")
    assert tokenise(copy).identity == first.identity
    # An edit that keeps size and time is noticed.
    file.write_text(file.read_text().swapcase())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tokenise(corpus).identity != first.identity
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder(DataSettings()) == tmp_path / "elsewhere"


def test_a_cache_is_on_the_disk_before_it_counts(corpus, tokenise, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tokenise(corpus).folder
    files = {path.name for path in folder.iterdir()}
    assert files - {"tokenizer.json", "checked.json"} <= set(synced)
    assert synced.index("manifest.json") > synced.index("train-00000.bin")
    assert f".tmp-{folder.name}" in synced
    assert "cache" in synced


def test_tokens_from_another_machine_are_a_source(tmp_path, corpus, tokenise):
    here, folder = tokenise(corpus), tmp_path / "elsewhere"
    shutil.copytree(here.folder, folder)
    shutil.rmtree(corpus)
    there = tokenise(folder)
    assert (there.folder, there.identity) == (folder, here.identity)
    assert np.array_equal(tokens(there, "train"), tokens(here, "train"))
    (folder / "train-00000.bin").write_bytes(b"other")
    with pytest.raises(UserError, match=r"damaged \(train-00000.bin is not what was written"):
        tokenise(folder)


def prepare_in_rounds(barrier, rounds, failures):
    for settings in rounds:
        barrier.wait(60)
        try:
            data = prepare(settings)
            data.windows("train", 8)
            assert data.tokenizer.vocab_size
        except (OSError, ValueError, AssertionError) as error:
            failures.put(repr(error))


def test_processes_that_need_a_fresh_cache_at_once_share_one(tmp_path, corpus):
    caches = [tmp_path / f"cache{i}" for i in range(40)]
    rounds = [DataSettings(source=(str(corpus),), cache=str(cache)) for cache in caches]
    for broken in rounds[::2]:  # a cache that lost a file, beside what a killed build left
        lost = prepare(broken).folder
        (lost / "train-00000.bin").unlink()
        shutil.copytree(lost, lost.with_name(f".tmp-{lost.name}"))
    context = multiprocessing.get_context("fork")
    failures, barrier = context.Queue(), context.Barrier(4)
    processes = []
    for _ in range(4):
        process = context.Process(target=prepare_in_rounds, args=(barrier, rounds, failures))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert failures.empty(), failures.get()
    assert all(len(list(cache.glob("[!.]*"))) == 1 for cache in caches)


def zero(content: bytes) -> bytes:
    return bytes(len(content))


SPOILED = [
    ("train-00000.bin", zero),
    ("validation-00000.bin", lambda content: content[:-1] + b"x"),
    ("validation-00000.bin", lambda content: content[:-2]),
    ("validation-00000.bin", None),
    ("tokenizer.json", lambda content: content.replace(b"257", b"258")),
    ("manifest.json", lambda content: b'{"dtype": 1}'),
    ("manifest.json", lambda content: content.replace(b"by_", b"buy_")),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILED)
def test_a_cache_that_is_not_what_was_written_is_made_anew(corpus, tokenise, capsys, name, spoil):
    first = tokenise(corpus).folder
    path, before = first / name, contents(first)
    times = path.stat()
    path.unlink()
    if spoil:
        path.write_bytes(spoil(before[name]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert tokenise(corpus).folder == first
    assert f"token cache {first} is damaged ({name} is " in capsys.readouterr().err
    assert contents(first) == before
    tokenise(corpus)
    assert capsys.readouterr().err == ""


def contents(folder) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.name != "checked.json"]
    return {path.name: path.read_bytes() for path in files}


def test_every_start_looks_at_some_blocks(corpus, tokenise, monkeypatch):
    """A bit may turn on a disk without a trace: sizes and times of the files stay."""
    monkeypatch.setattr(dataset, "BLOCK", 4096)
    first = tokenise(corpus)
    expected = tokens(first, "train").copy()
    shard = first.folder / "train-00000.bin"
    assert len(first.manifest["sha256"][shard.name]) > 4
    monkeypatch.setattr(dataset, "_is_checked", lambda folder: True)
    content = bytearray(shard.read_bytes())
    content[9000] ^= 1
    shard.write_bytes(content)
    answers = {damage(first.folder, 4) for _ in range(100)}
    assert answers == {None, "train-00000.bin is not what was written"}
    monkeypatch.setattr(dataset, "SAMPLE", 1000)
    assert np.array_equal(tokens(tokenise(corpus), "train"), expected)


def test_what_killed_processes_left_goes_and_what_others_write_stays(tmp_path, corpus, tokenise):
    cache = tmp_path / "cache"
    for name in (".tmp-killed", ".tmp-at-work"):
        (cache / name).mkdir(parents=True)
        (cache / name / "train-00000.bin").write_bytes(bytes(1000))
    with taking_turns(cache / ".lock-at-work"):
        tokenise(corpus)
    assert [path.name for path in cache.glob(".tmp-*")] == [".tmp-at-work"]
