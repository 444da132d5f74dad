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
from headwater.train.data.corpus import documents, find_files
from headwater.train.data.dataset import cache_folder, damage, permute, prepare
from headwater.train.files import taking_turns


def settings(tmp_path, *source, **others) -> DataSettings:
    return DataSettings(
        source=tuple(str(s) for s in source), cache=str(tmp_path / "cache"), **others
    )


def corpus(tmp_path, documents=60):
    folder = tmp_path / "corpus"
    folder.mkdir(exist_ok=True, parents=True)
    for i in range(documents):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " * 20)
    return folder


def tokens(data, split) -> np.ndarray:
    return np.concatenate([np.asarray(shard) for shard in data.windows(split, 8).shards])


def texts(data, split) -> list[str]:
    ids = tokens(data, split)
    parts = np.split(ids, np.flatnonzero(ids == data.tokenizer.end_of_text) + 1)
    return [data.tokenizer.decode(part) for part in parts if len(part)]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 64, 1000, 1025])
def test_permute_is_a_permutation_and_depends_on_its_key(total):
    images = permute(np.arange(total), total, key=(0, 0))
    assert sorted(images) == list(range(total))
    if total > 10:
        assert list(images) != list(permute(np.arange(total), total, key=(0, 1)))
        assert list(images) != list(permute(np.arange(total), total, key=(1, 0)))
        assert abs(np.corrcoef(np.arange(total), images)[0, 1]) < 0.35


def test_the_order_does_not_depend_on_ranks_or_micro_batches(tmp_path):
    windows = prepare(settings(tmp_path, corpus(tmp_path))).windows("train", 16)
    for step in (0, 5, 1000):
        whole = windows.batch(seed=3, step=step, size=24)
        for micros, world in ((1, 2), (2, 1), (3, 4), (2, 6)):
            parts = [
                windows.batch(
                    seed=3, step=step, size=24, micro=micro, micros=micros, rank=rank, world=world
                )
                for micro in range(micros)
                for rank in range(world)
            ]
            assert np.array_equal(np.concatenate(parts), whole)


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path, capsys):
    """What is left out, and what was found, is said once: when the text is tokenised."""
    folder = corpus(tmp_path)
    for name in ("page.html", "other.HTML.gz", "table.csv", "README", ".hidden.txt"):
        (folder / name).write_text("not read")
    (folder / "inner").mkdir()
    (folder / "inner" / "b.txt").write_text("read " * 20)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.txt").write_text("not read")
    (folder / "link.txt").symlink_to(folder / "000.txt")
    names = [file.name for file in find_files((str(folder),))]
    assert names == [*(f"{i:03d}.txt" for i in range(60)), "inner/b.txt", "link.txt"]
    data = prepare(settings(tmp_path, folder))
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("4 files are left out: from a folder only .txt")
    train, held_out = (f"{data.manifest[split]['tokens']:,}" for split in ("train", "validation"))
    found = f"tokens {train} to train on and {held_out} held out"
    assert last == f"text: files 62, documents 62, {found}"
    prepare(settings(tmp_path, folder))
    assert capsys.readouterr().err == ""


def test_a_long_document_takes_a_few_times_its_size(tmp_path):
    """In memory, with all that is made of it on the way to the disk; compressed or not."""
    size = 60_000_000
    text = b"a line of a long document, as there are many\n" * (size // 46)
    (tmp_path / "long.txt").write_bytes(text)
    (tmp_path / "long.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    del text
    for name in ("long.txt", "long.txt.zst"):
        code = (
            "import resource, sys\n"
            "from headwater.runs.settings import DataSettings\n"
            "from headwater.train.data.dataset import prepare\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            f"prepare(DataSettings(source=({str(tmp_path / name)!r},), cache={str(tmp_path / name)!r} + '-cache'))\n"
            "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)\n"
        )
        used = int(python("-c", code).splitlines()[-1])
        assert used < 6 * size, name


def test_an_epoch_takes_every_window_once_and_seeds_differ(tmp_path):
    windows = prepare(settings(tmp_path, corpus(tmp_path))).windows("train", 16)
    size = 7
    rows = np.concatenate(
        [windows.batch(seed=0, step=s, size=size) for s in range(2 * len(windows) // size + 1)]
    )
    everything = windows.take(np.arange(len(windows)))
    for epoch in (rows[: len(windows)], rows[len(windows) : 2 * len(windows)]):
        assert np.array_equal(np.sort(epoch, axis=0), np.sort(everything, axis=0))
    assert not np.array_equal(rows[: len(windows)], rows[len(windows) : 2 * len(windows)])
    assert not np.array_equal(windows.batch(seed=1, step=0, size=size), rows[:size])


def test_the_standard_library_is_the_default_and_is_split_by_file(tmp_path):
    data = prepare(DataSettings(cache=str(tmp_path)))
    train, held_out = data.manifest["train"], data.manifest["validation"]
    assert train["bytes"] > 2_000_000
    assert 0.01 < held_out["documents"] / (train["documents"] + held_out["documents"]) < 0.1
    assert data.manifest["split"] == "by_document"
    assert train["tokens"] == train["bytes"] + train["documents"]
    assert "import" in data.tokenizer.decode(tokens(data, "validation"))


def test_one_long_document_is_cut_in_two(tmp_path):
    text = "".join(f"line {i}\n" for i in range(2000))
    (tmp_path / "book.txt").write_text(text)
    data = prepare(settings(tmp_path, tmp_path / "book.txt", validation=0.1))
    pieces = [data.tokenizer.decode(tokens(data, split)) for split in ("train", "validation")]
    assert "".join(pieces) == text
    assert data.manifest["split"] == "by_cutting"
    assert len(pieces[1]) == pytest.approx(0.1 * len(text), rel=0.01)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.3, 0.5])
@pytest.mark.parametrize(
    "sizes", [[400] * 3, [400] * 8, [400] * 15, [40] * 100 + [9000], [5000] + [200] * 9]
)
def test_the_held_out_share_is_met_however_few_the_documents(tmp_path, sizes, share):
    """Twelve corpora of each shape that differ in their files' names, and so in the hashes of these."""
    for corpus in range(12):
        folder = tmp_path / f"corpus{corpus}"
        folder.mkdir()
        for i, size in enumerate(sizes):
            (folder / f"{corpus}-{i}.txt").write_text("x" * size)
        manifest = prepare(settings(tmp_path, folder, validation=share)).manifest
        assert manifest["split"] in ("by_document", "by_cutting")
        assert (
            share / 2
            <= manifest["validation"]["bytes"] / sum(sizes)
            <= min(2 * share, (1 + share) / 2)
        )
        if max(sizes) < share * sum(sizes):
            assert manifest["split"] == "by_document"


def test_a_document_that_joins_moves_no_other_between_the_splits(tmp_path):
    folder = corpus(tmp_path, documents=200)

    def held_out() -> set[str]:
        data = prepare(settings(tmp_path, folder))
        assert data.manifest["split"] == "by_document"
        return set(texts(data, "validation"))

    before = held_out()
    corpus(tmp_path, documents=230)
    assert before < held_out()


def test_the_cache_is_reused_renewed_and_repaired(tmp_path, monkeypatch):
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder))
    made = (first.folder / "manifest.json").stat().st_mtime_ns
    assert (prepare(settings(tmp_path, folder)).folder / "manifest.json").stat().st_mtime_ns == made

    shard = first.folder / first.manifest["train"]["shards"][0]["file"]
    shard.write_bytes(shard.read_bytes()[:-2])
    assert np.array_equal(
        tokens(prepare(settings(tmp_path, folder)), "train"), tokens(first, "train")
    )

    (folder / "000.txt").write_text("something else entirely " * 20)
    changed = prepare(settings(tmp_path, folder))
    assert changed.folder != first.folder
    assert changed.manifest["source_hash"] != first.manifest["source_hash"]
    assert not list((tmp_path / "cache").glob(".tmp-*"))

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert prepare(settings(tmp_path, copy)).identity == changed.identity

    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder(DataSettings()) == tmp_path / "elsewhere"


def test_a_cache_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = prepare(settings(tmp_path, corpus(tmp_path))).folder
    files = {path.name for path in folder.iterdir() if path.name != "checked.json"}
    assert files - {"tokenizer.json"} <= set(synced)
    assert synced.index("manifest.json") > synced.index("train-00000.bin")
    assert f".tmp-{folder.name}" in synced
    assert "cache" in synced


def test_tokens_from_another_machine_are_a_source(tmp_path):
    made = prepare(settings(tmp_path, corpus(tmp_path)))
    moved = tmp_path / "elsewhere"
    shutil.copytree(made.folder, moved)
    shutil.rmtree(tmp_path / "corpus")
    found = prepare(DataSettings(source=(str(moved),)))
    assert found.folder == moved
    assert found.identity == made.identity
    windows = found.windows("train", 16).take(np.arange(2))
    assert (windows == made.windows("train", 16).take(np.arange(2))).all()
    (moved / "train-00000.bin").write_bytes(b"other")
    with pytest.raises(UserError, match=r"damaged \(train-00000.bin is not what was written"):
        prepare(DataSettings(source=(str(moved),)))


def prepare_in_rounds(barrier, rounds, failures):
    for settings in rounds:
        barrier.wait(60)
        try:
            data = prepare(settings)
            data.windows("train", 8)
            assert data.tokenizer.vocab_size
        except (OSError, ValueError, AssertionError) as error:
            failures.put(repr(error))


def test_processes_that_need_a_fresh_cache_at_once_share_one(tmp_path):
    folder = corpus(tmp_path)
    rounds = [
        DataSettings(source=(str(folder),), cache=str(tmp_path / f"cache{i}")) for i in range(40)
    ]
    for broken in rounds[::2]:  # a cache that lost a file, beside what a killed build left
        lost = prepare(broken).folder
        (lost / "train-00000.bin").unlink()
        shutil.copytree(lost, lost.with_name(f".tmp-{lost.name}"))
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    barrier = context.Barrier(4)
    processes = [
        context.Process(target=prepare_in_rounds, args=(barrier, rounds, failures))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert failures.empty(), failures.get()
    assert all(len(list((tmp_path / f"cache{i}").glob("[!.]*"))) == 1 for i in range(40))


def test_shards_split_and_windows_stay_inside(tmp_path, monkeypatch):
    whole = prepare(settings(tmp_path, corpus(tmp_path)))
    monkeypatch.setattr("headwater.train.data.dataset.SHARD_TOKENS", 1000)
    # Another cache key, the same split
    data = prepare(settings(tmp_path, corpus(tmp_path), validation=0.0500001))
    assert len(data.manifest["train"]["shards"]) > 3
    assert np.array_equal(tokens(data, "train"), tokens(whole, "train"))
    windows = data.windows("train", 16)
    lengths = [(shard["tokens"] - 1) // 16 for shard in data.manifest["train"]["shards"]]
    assert len(windows) == sum(lengths)
    assert damage(data.folder) is None
    first_of_second = windows.take(np.array([lengths[0]]))[0]
    assert np.array_equal(first_of_second, windows.shards[1][:17])


def test_evaluation_windows_are_spread_over_the_text(tmp_path):
    windows = prepare(settings(tmp_path, corpus(tmp_path))).windows("train", 8)
    assert len(windows) > 100
    chosen = windows.spread(5)
    assert chosen[0] == 0
    assert np.diff(chosen) == pytest.approx([len(windows) / 5] * 4, abs=1)
    assert windows.spread(10**6).tolist() == list(range(len(windows)))


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".XZ": lzma.compress,
    ".bz2": bz2.compress,
    ".Zst": zstandard.ZstdCompressor().compress,
}


def read(*sources, field="text") -> list[str]:
    files = find_files(tuple(map(str, sources)), field)
    return [document.text for document in documents(files)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_documents_of_every_kind_of_file(tmp_path, ending):
    compress, folder = COMPRESS[ending], tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    text = b"one\r\nline\n<|endoftext|>\ntwo <|endoftext|> inside\n<|endoftext|>\n\n"
    (folder / f"a.TXT{ending}").write_bytes(compress(text))
    (folder / f"b.jsonl{ending}").write_bytes(compress('\ufeff{"text": "sechs ß"}\n'.encode()))
    rows = b'{"text": "three"}\n\n{"text": "four", "id": 4}\n'
    (folder / "deep" / f"c.jsonl{ending}").write_bytes(compress(rows))
    long = os.urandom(200_000).hex()
    # Files may be compressed in several parts, one after the other.
    parts = compress(long[:9].encode()) + compress(long[9:].encode())
    (folder / "deep" / f"d.md{ending}").write_bytes(parts)
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    expected = ["one\r\nline\n", "two <|endoftext|> inside\n", "sechs ß", "three", "four", long]
    assert read(folder) == expected

    manifest = prepare(settings(tmp_path, folder, validation=0.5)).manifest
    sizes = [manifest[split]["bytes"] for split in ("train", "validation")]
    assert sum(sizes) == len("".join(expected).encode())


def test_a_json_file_is_an_array_of_documents_or_json_lines(tmp_path):
    rows = [{"body": "one\n", "text": "no"}, "two", {"body": "drei ß"}]
    for name, text in {
        "indented.json": json.dumps(rows, indent=2),
        "marked.json": "\ufeff\n" + json.dumps(rows),
        "lines.json": "\n".join(map(json.dumps, rows)),
        "lines.jsonl": "\n".join(map(json.dumps, rows)),
    }.items():
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name, field="body") == ["one\n", "two", "drei ß"], name


BAD = {
    "latin.txt": ("é".encode("latin-1") * 50, "cannot read .*utf-8"),
    "torn.txt.gz": (gzip.compress(b"text " * 1000)[:-20], "cannot read"),
    "rotten.txt.gz": (b"\x1f\x8b\x08" + b"\xff" * 400, "cannot read"),
    "torn.txt.zst": (COMPRESS[".Zst"](os.urandom(1000))[:-20], "cannot read"),
    "no.txt.zst": (b"no zstd at all", "cannot read"),
    "half.jsonl": (b'{"text": "half \\ud83c only"}', "cannot read"),
    "nested.jsonl": (b'{"text": "fine"}\n' + b"[" * 100_000, "line 2: this is not JSON"),
    "open.json": (b'\n["fine",\n', "line 2: this is not JSON"),
    "fields.jsonl": (
        b'{"text": "fine"}\n{"a": "x", "long": "longer"}',
        "line 2: .*choose one with data.text_field long",
    ),
    "none.jsonl": (b'{"id": 1}', "line 1: .*none of them is a string"),
    "item.json": (b'["fine", 2]', "item 2: expected a JSON object"),
    "blank.txt": (b"\n  \n", "is empty or too short"),
    "nothing/settings.json": (b"[]", "no corpus at .*nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_corpora_are_named(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    source = tmp_path / Path(name).parts[0]
    with pytest.raises(UserError, match=f"{source.name}.*{message}|{message}"):
        prepare(settings(tmp_path, source))
    assert not list((tmp_path / "cache").glob(".tmp-*"))


def test_a_text_that_is_shorter_than_the_context_is_refused(tmp_path):
    data = prepare(settings(tmp_path, corpus(tmp_path)))
    for split, change in (("train", "lower"), ("validation", "raise")):
        with pytest.raises(UserError, match=f"its {split} split .*{change} data.validation"):
            data.windows(split, 100_000)


def test_a_tokenizer_is_taken_as_it_is(tmp_path, capsys):
    """A run, one of its checkpoints and a file name one tokenizer: its contents count, not its place."""
    first = prepare(settings(tmp_path, corpus(tmp_path), tokenizer="bpe", bpe_vocab=300))
    run, other = tmp_path / "run", tmp_path / "other.txt"
    checkpoint = run / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    # The file of a tokenizer that has served transformers says how to cut a prompt.
    first.tokenizer.inner.enable_truncation(8)
    first.tokenizer.inner.enable_padding(length=8)
    first.tokenizer.inner.save(str(run / "tokenizer.json"))
    other.write_text("".join(f"neither of these words {i}\n" for i in range(2000)))
    folders = set()
    for place, size in ((run, 300), (checkpoint, 300), (run / "tokenizer.json", 999)):
        data = prepare(settings(tmp_path, other, tokenizer=str(place), bpe_vocab=size))
        folders.add(data.folder)
    assert len(folders) == 1
    assert data.manifest["vocab_size"] == first.tokenizer.vocab_size
    assert data.manifest["train"]["tokens"] > 1000
    assert texts(data, "train")[0].startswith("neither of these words 0\n")
    assert f", of the {first.tokenizer.vocab_size} of {run}\n" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_taken_says_why(tmp_path):
    folder, place = corpus(tmp_path), tmp_path / "tokenizer.json"
    data = prepare(settings(tmp_path, folder, tokenizer="bpe", bpe_vocab=300))
    inner = json.loads(data.tokenizer.to_json())

    def refused(content: str) -> str:
        place.write_text(content)
        with pytest.raises(UserError) as caught:
            prepare(settings(tmp_path, folder, tokenizer=str(place)))
        return str(caught.value)

    for kind in ("Lowercase", "NFC", "NFD", "NFKC"):
        assert "changes text" in refused(json.dumps({**inner, "normalizer": {"type": kind}}))
    space = {**inner["pre_tokenizer"], "add_prefix_space": True}
    assert "changes text" in refused(json.dumps({**inner, "pre_tokenizer": space}))
    words = {word: i for word, i in inner["model"]["vocab"].items() if i}
    endless = {**inner, "added_tokens": [], "model": {**inner["model"], "vocab": words}}
    assert "has no <|endoftext|>" in refused(json.dumps(endless))
    for torn in ("{", "[]", '{"model": 1}', '{"model": {"type": "BPE"}}'):
        assert f"cannot read the tokenizer {place}" in refused(torn)
    place.unlink()
    with pytest.raises(UserError, match=r"no tokenizer at .*takes bytes or bpe, or a run"):
        prepare(settings(tmp_path, folder, tokenizer=str(place)))


def test_tokens_that_were_made_with_another_tokenizer_are_refused(tmp_path):
    of_bytes = prepare(settings(tmp_path, corpus(tmp_path))).folder
    of_bpe = prepare(settings(tmp_path, corpus(tmp_path), tokenizer="bpe", bpe_vocab=300)).folder
    for source, tokenizer in ((of_bytes, str(of_bpe)), (of_bytes, "bpe"), (of_bpe, str(of_bytes))):
        with pytest.raises(UserError, match="not made with the tokenizer"):
            prepare(settings(tmp_path, source, tokenizer=tokenizer))
    for source, tokenizer in ((of_bytes, str(of_bytes)), (of_bpe, "bpe"), (of_bpe, "bytes")):
        assert prepare(settings(tmp_path, source, tokenizer=tokenizer)).folder == source


def test_bpe_learns_nothing_from_held_out_text(tmp_path):
    """Every document repeats a word of its own, which becomes a token where it is trained on, and only there."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    (tmp_path / "corpus").mkdir()
    for i, letter in enumerate(letters):
        (tmp_path / "corpus" / f"{i:02d}.txt").write_text(f"{letter}{letter} " * 50)
    bpe = {"tokenizer": "bpe", "bpe_vocab": 400, "validation": 0.3}
    data = prepare(settings(tmp_path, tmp_path / "corpus", **bpe))
    held_out = set(data.tokenizer.decode(tokens(data, "validation")).split())
    assert 4 <= len(held_out) <= 12
    vocabulary = set(json.loads(data.tokenizer.to_json())["model"]["vocab"])
    assert {2 * letter for letter in letters} - vocabulary == held_out
    train = data.manifest["train"]
    assert train["tokens"] < 0.6 * train["bytes"]
    assert data.tokenizer.token_bytes[tokens(data, "train")].sum() == train["bytes"]


def test_copies_of_held_out_text_that_are_trained_on_are_told(tmp_path, capsys):
    folder = corpus(tmp_path)
    for i in range(40):  # a byte each, which does not matter
        (folder / f"alike-{i}.py").write_text("#")
    few = prepare(settings(tmp_path, folder))
    assert "#" in set(texts(few, "train")) & set(texts(few, "validation"))
    assert "copies" not in capsys.readouterr().err
    for i in range(60):
        shutil.copy(folder / f"{i:03d}.txt", folder / f"copy-{i}.txt")
    data = prepare(settings(tmp_path, folder))
    trained_on, held_out = set(texts(data, "train")), texts(data, "validation")
    copies = [text for text in held_out if text in trained_on]
    share = 100 * len("".join(copies)) / len("".join(held_out))
    message = f"copies of {len(copies)} of the {len(held_out)} held-out documents, {share:.0f} %"
    assert message in capsys.readouterr().err


def test_a_large_corpus_is_tokenised_once_and_says_so(tmp_path, capsys, monkeypatch):
    """For minutes nothing else is printed."""
    monkeypatch.setattr("headwater.train.data.dataset.LARGE", 1e6)
    source = tmp_path / "a.txt"
    source.write_bytes(os.urandom(1_000_000).hex().encode())
    folder = prepare(settings(tmp_path, source)).folder
    begins = f"tokenising files of 2 MB, whose tokens are kept in {folder} for later\n"
    assert capsys.readouterr().err.startswith(begins)
    prepare(settings(tmp_path, source))
    assert capsys.readouterr().err == ""


def zero(content: bytes) -> bytes:
    return bytes(len(content))


SPOILED = [
    ("train-00000.bin", zero),
    ("validation-00000.bin", lambda content: content[:-1] + b"x"),
    ("validation-00000.bin", None),
    ("tokenizer.json", lambda content: content.replace(b"257", b"258")),
    ("manifest.json", lambda content: b'{"dtype": 1}'),
    ("manifest.json", lambda content: content.replace(b"by_", b"buy_")),
]


@pytest.mark.parametrize(("name", "spoil"), SPOILED)
def test_a_cache_that_is_not_what_was_written_is_made_anew(tmp_path, capsys, name, spoil):
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder)).folder
    path, before = first / name, contents(first)
    times = path.stat()
    path.unlink()
    if spoil:
        path.write_bytes(spoil(before[name]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert prepare(settings(tmp_path, folder)).folder == first
    assert f"token cache {first} is damaged ({name} is " in capsys.readouterr().err
    assert contents(first) == before
    prepare(settings(tmp_path, folder))
    assert capsys.readouterr().err == ""


def contents(folder) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.name != "checked.json"]
    return {path.name: path.read_bytes() for path in files}


def test_every_start_looks_at_some_blocks(tmp_path, monkeypatch):
    """A bit may turn on a disk without a trace: sizes and times of the files stay."""
    monkeypatch.setattr("headwater.train.data.dataset.BLOCK", 4096)
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder))
    expected = tokens(first, "train").copy()
    shard = first.folder / "train-00000.bin"
    assert len(first.manifest["sha256"][shard.name]) > 4
    monkeypatch.setattr("headwater.train.data.dataset._is_checked", lambda folder: True)
    content = bytearray(shard.read_bytes())
    content[9000] ^= 1
    shard.write_bytes(content)
    answers = {damage(first.folder, 4) for _ in range(100)}
    assert answers == {None, "train-00000.bin is not what was written"}
    monkeypatch.setattr("headwater.train.data.dataset.SAMPLE", 1000)
    assert np.array_equal(tokens(prepare(settings(tmp_path, folder)), "train"), expected)


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path):
    folder = corpus(tmp_path)
    first, file = prepare(settings(tmp_path, folder)), folder / "000.txt"
    before = file.stat()
    file.write_text(file.read_text().swapcase())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert prepare(settings(tmp_path, folder)).identity != first.identity


def test_what_killed_processes_left_goes_and_what_others_write_stays(tmp_path):
    cache = tmp_path / "cache"
    for name in (".tmp-killed", ".tmp-at-work"):
        (cache / name).mkdir(parents=True)
        (cache / name / "train-00000.bin").write_bytes(bytes(1000))
    with taking_turns(cache / ".lock-at-work"):
        prepare(settings(tmp_path, corpus(tmp_path)))
    assert [path.name for path in cache.glob(".tmp-*")] == [".tmp-at-work"]
