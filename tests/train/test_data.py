"""The corpus becomes the same tokens everywhere, and a batch depends on (seed, step) alone."""

import gzip
import json
import lzma
import multiprocessing
import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard
from processes import python

from headwater.errors import UserError
from headwater.runs.settings import DataSettings
from headwater.train.data.corpus import documents, find_files
from headwater.train.data.dataset import cache_folder, damage, permute, prepare


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
    with pytest.raises(UserError, match="does not divide"):
        windows.batch(seed=3, step=0, size=24, world=5)


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
    assert first.startswith(f"{folder}: 4 of 66 files are left out: from a folder only .txt")
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


def test_endings_may_be_in_capitals(tmp_path):
    (tmp_path / "A.TXT").write_text("one")
    (tmp_path / "B.Txt.GZ").write_bytes(gzip.compress(b"two"))
    (tmp_path / "C.JSONL").write_text('{"text": "three"}\n')
    (tmp_path / "D.txt.ZST").write_bytes(zstandard.ZstdCompressor().compress(b"four"))
    assert [d.text for d in documents(find_files((str(tmp_path),)))] == [
        "one",
        "two",
        "three",
        "four",
    ]
    (tmp_path / "E.JSON").write_text('["five"]')
    assert [d.text for d in documents(find_files((str(tmp_path / "E.JSON"),)))] == ["five"]


def test_a_tokenizer_is_taken_as_it_is(tmp_path, capsys):
    """Of a run, of one of its checkpoints, of a folder that holds one; and it matters what it is, not where."""
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder, tokenizer="bpe", bpe_vocab=300))
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000007").mkdir(parents=True)
    shutil.copy(first.folder / "tokenizer.json", run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("".join(f"neither of these words {i}\n" for i in range(2000)))
    made = [
        prepare(settings(tmp_path, other, tokenizer=str(place), bpe_vocab=vocab))
        for place, vocab in (
            (run, 300),
            (run / "checkpoints" / "step-00000007", 300),
            (run / "tokenizer.json", 999),
        )
    ]
    assert made[0].tokenizer.to_json() == first.tokenizer.to_json()
    assert made[0].manifest["vocab_size"] == first.tokenizer.vocab_size
    assert texts(made[0], "train")[0].startswith("neither of these words 0\n")
    assert {data.folder for data in made} == {made[0].folder}
    assert f", of the {first.tokenizer.vocab_size} of {run}\n" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "moved")
    shutil.rmtree(run)
    assert (
        prepare(settings(tmp_path, other, tokenizer=str(tmp_path / "moved"))).folder
        == made[0].folder
    )


def test_how_transformers_last_cut_a_prompt_cuts_no_text(tmp_path):
    folder, place = corpus(tmp_path), tmp_path / "tokenizer.json"
    data = prepare(settings(tmp_path, folder, tokenizer="bpe", bpe_vocab=300))
    data.tokenizer.inner.enable_truncation(8)
    data.tokenizer.inner.enable_padding(length=8)
    data.tokenizer.inner.save(str(place))
    taken = prepare(settings(tmp_path, folder, tokenizer=str(place)))
    assert taken.manifest["train"]["tokens"] == data.manifest["train"]["tokens"] > 1000


def test_tokens_that_were_made_with_another_tokenizer_are_refused(tmp_path):
    made = prepare(settings(tmp_path, corpus(tmp_path)))
    other = prepare(settings(tmp_path, corpus(tmp_path), tokenizer="bpe", bpe_vocab=300))
    assert (
        prepare(settings(tmp_path, made.folder, tokenizer=str(made.folder))).identity
        == made.identity
    )
    with pytest.raises(
        UserError, match=rf"not made with the tokenizer {other.folder}: give data.source the text"
    ):
        prepare(settings(tmp_path, made.folder, tokenizer=str(other.folder)))
    with pytest.raises(UserError, match=r"not made with the tokenizer bpe: give .* the text"):
        prepare(settings(tmp_path, made.folder, tokenizer="bpe"))
    assert prepare(settings(tmp_path, other.folder, tokenizer="bpe")).identity == other.identity


def test_a_tokenizer_that_cannot_be_taken_says_why(tmp_path, monkeypatch):
    folder, place = corpus(tmp_path), tmp_path / "tokenizer.json"
    data = prepare(settings(tmp_path, folder, tokenizer="bpe", bpe_vocab=300))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=rf"no tokenizer at wordpiece \(from {tmp_path}\): .*takes bytes or bpe, or a run",
    ):
        prepare(settings(tmp_path, folder, tokenizer="wordpiece"))
    inner = json.loads(data.tokenizer.to_json())
    changes = [
        {**inner, "normalizer": {"type": kind}} for kind in ("Lowercase", "NFC", "NFD", "NFKC")
    ]
    changes.append(
        {**inner, "normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}}
    )
    space = {**inner, "pre_tokenizer": {**inner["pre_tokenizer"], "add_prefix_space": True}}
    endless = {**inner, "added_tokens": []}
    endless["model"] = {
        **inner["model"],
        "vocab": {w: i for w, i in inner["model"]["vocab"].items() if i},
    }
    for changed in (*changes, space, endless):
        place.write_text(json.dumps(changed))
        with pytest.raises(
            UserError, match=r"changes text, or has no <\|endoftext\|>: .*one that headwater made"
        ):
            prepare(settings(tmp_path, folder, tokenizer=str(place)))
    named = {**inner, "added_tokens": [*inner["added_tokens"], dict(inner["added_tokens"][0])]}
    named["added_tokens"][1] |= {"id": 300, "content": "12", "special": False, "lstrip": True}
    place.write_text(json.dumps(named))  # what it takes away, the sample has not
    with pytest.raises(UserError, match=r"tokenizer.json is a tokenizer that changes text"):
        prepare(settings(tmp_path, folder, tokenizer=str(place)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(
            UserError, match=r"cannot read the tokenizer .*tokenizer.json: Permission denied"
        ):
            prepare(settings(tmp_path, folder, tokenizer=str(place)))
    for torn, why in (
        ("{", "Expecting"),
        ("[]", ""),
        ('{"model": 1}', ""),
        ('{"model": {"type": "BPE"}}', "Missing"),
    ):
        place.write_text(torn)
        with pytest.raises(UserError, match=rf"tokenizer.json is not a tokenizer file \(.*{why}"):
            prepare(settings(tmp_path, folder, tokenizer=str(place)))


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


def test_documents_of_every_kind_of_file(tmp_path):
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(
        b"one\r\nline\n<|endoftext|>\ntwo <|endoftext|> inside\n<|endoftext|>\n\n"
    )
    (folder / "deep" / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four", "id": 4}\n')
    with gzip.open(folder / "c.md.gz", "wt") as file:
        file.write("five")
    with lzma.open(folder / "d.jsonl.xz", "wt") as file:
        file.write(json.dumps({"text": "sechs ß"}))
    compress = zstandard.ZstdCompressor().compress
    (folder / "e.txt.zst").write_bytes(compress(b"sie") + compress(b"ben"))  # of two frames
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    found = [document.text for document in documents(find_files((str(folder),)))]
    assert found == [
        "one\r\nline\n",
        "two <|endoftext|> inside\n",
        "five",
        "sechs ß",
        "three",
        "four",
        "sieben",
    ]

    manifest = prepare(settings(tmp_path, folder, validation=0.5)).manifest
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == len(found)
    assert manifest["train"]["bytes"] + manifest["validation"]["bytes"] == len(
        "".join(found).encode()
    )


def test_a_long_file_of_zstd_is_read_whole(tmp_path):
    text = os.urandom(400_000).hex()
    (tmp_path / "long.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    assert [
        document.text for document in documents(find_files((str(tmp_path / "long.txt.zst"),)))
    ] == [text]


def test_the_field_of_json_lines(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"body": "one", "text": "no"}\n{"body": "two", "id": 3}\n'
    )
    found = documents(find_files((str(tmp_path / "rows.jsonl"),), "body"))
    assert [document.text for document in found] == ["one", "two"]
    whole = prepare(
        settings(tmp_path, tmp_path / "rows.jsonl", text_field="body", validation=0.5)
    ).manifest
    assert whole["train"]["bytes"] + whole["validation"]["bytes"] == 6
    for line, words in {
        '{"id": 1}': "found 'id': none of them is a string",
        "{}": "found no field",
        "[1]": "expected a JSON object on a line of its own",
        '{"a": "x", "long": "longer"}': "choose one with data.text_field long",
    }.items():
        (tmp_path / "rows.jsonl").write_text(line)
        with pytest.raises(UserError, match=f"line 1: .*{words}"):
            list(documents(find_files((str(tmp_path / "rows.jsonl"),), "body")))


def test_a_json_file_is_an_array_of_documents_or_json_lines(tmp_path):
    rows = [{"body": "one\n", "id": 1}, "two", {"body": "drei ß"}]
    for name, text in {
        "indented.json": json.dumps(rows, indent=2),
        "flat.json": json.dumps(rows),
        "marked.json": "\ufeff\n" + json.dumps(rows),
        "inner.json": "\n  " + json.dumps(rows),
        "lines.json": "\n".join(map(json.dumps, rows)),
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        for source in (name, f"{name}.gz"):
            found = documents(find_files((str(tmp_path / source),), "body"))
            assert [document.text for document in found] == ["one\n", "two", "drei ß"], source
    for text, words in {
        '["fine", {"id": "1"}]': r"item 2: expected a string under 'body'; found 'id': choose one with .*text_field id",
        '["fine", 2]': r"item 2: expected a JSON object .*in the array of a \.json file",
        '{\n"body": "fine"}': r"line 1: this is not JSON",
        '\n["fine",\n': r"line 2: this is not JSON \(.*: line 3 .*\): write one object a line",
        "[" * 100_000: r"line 1: this is not JSON \(",
    }.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=rf"bad\.json,? {words}"):
            list(documents(find_files((str(tmp_path / "bad.json"),), "body")))


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
    copied = [text for text in held_out if text in trained_on]
    share = 100 * len("".join(copied)) / len("".join(held_out))
    told = f"copies of {len(copied)} of the {len(held_out)} held-out documents, {share:.0f} % of that text, are trained"
    assert told in capsys.readouterr().err
    assert prepare(settings(tmp_path, folder)).identity == data.identity
    assert capsys.readouterr().err == ""


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


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "most", "told"), [("a.txt", 3e6, False), ("a.txt", 1e6, True), ("a.gz", 3e6, True)]
)
def test_a_large_corpus_is_tokenised_once_and_says_so(
    tmp_path, capsys, monkeypatch, name, most, told
):
    """For minutes nothing else is printed. Compressed, less is large: it is the text that takes long."""
    monkeypatch.setattr("headwater.train.data.dataset.LARGE", most)
    source = tmp_path / name
    noise = np.random.default_rng(0).integers(97, 123, 2_000_000, dtype=np.uint8).tobytes()
    source.write_bytes(gzip.compress(noise, 1) if name == "a.gz" else noise)
    folder, size = prepare(settings(tmp_path, source)).folder, source.stat().st_size
    said = f"tokenising files of {size / 1e6:.0f} MB, whose tokens are kept in {folder} for later\n"
    assert capsys.readouterr().err.startswith(said if told else "text: files 1, ")
    prepare(settings(tmp_path, source))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("train-00000.bin", zero),
        ("validation-00000.bin", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")),
        ("validation-00000.bin", lambda path: path.unlink()),
        ("tokenizer.json", lambda path: path.write_text(path.read_text().replace("257", "258"))),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("manifest.json", lambda path: path.write_text('{"dtype": 1}')),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace("by_", "buy_"))),
    ],
)
def test_a_cache_that_is_not_what_was_written_is_made_anew_and_says_so(
    tmp_path, capsys, name, spoil
):
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder))
    expected = {
        path.name: path.read_bytes()
        for path in first.folder.iterdir()
        if path.name != "checked.json"
    }
    before = (first.folder / name).stat()
    spoil(first.folder / name)
    if (first.folder / name).exists():
        os.utime(first.folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    capsys.readouterr()
    again = prepare(settings(tmp_path, folder))
    assert again.folder == first.folder
    message = capsys.readouterr().err
    assert f"token cache {first.folder} is damaged ({name} is " in message
    assert {
        path.name: path.read_bytes()
        for path in again.folder.iterdir()
        if path.name != "checked.json"
    } == expected
    prepare(settings(tmp_path, folder))
    assert capsys.readouterr().err == ""


def test_every_start_looks_at_some_blocks(tmp_path, capsys, monkeypatch):
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
    assert any(damage(first.folder, 4) for _ in range(100))
    assert not all(damage(first.folder, 4) for _ in range(100))
    monkeypatch.setattr("headwater.train.data.dataset.SAMPLE", 1000)
    capsys.readouterr()
    assert np.array_equal(tokens(prepare(settings(tmp_path, folder)), "train"), expected)
    assert "is damaged (train-00000.bin is not what was written)" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="must be the only source"):
        prepare(DataSettings(source=(str(moved), "stdlib")))
    (moved / "train-00000.bin").write_bytes(b"other")
    with pytest.raises(UserError, match=r"damaged \(train-00000.bin is not what was written"):
        prepare(DataSettings(source=(str(moved),)))


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path):
    folder = corpus(tmp_path)
    first = prepare(settings(tmp_path, folder))
    file = folder / "000.txt"
    before = file.stat()
    file.write_text(file.read_text().swapcase())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert (
        prepare(settings(tmp_path, folder)).identity["source_hash"] != first.identity["source_hash"]
    )


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
    data = prepare(
        settings(tmp_path, corpus(tmp_path), validation=0.0500001)
    )  # another cache key, the same split
    assert len(data.manifest["train"]["shards"]) > 3
    assert np.array_equal(tokens(data, "train"), tokens(whole, "train"))
    windows = data.windows("train", 16)
    lengths = [(shard["tokens"] - 1) // 16 for shard in data.manifest["train"]["shards"]]
    assert len(windows) == sum(lengths)
    assert damage(data.folder) is None
    first_of_second = windows.take(np.array([lengths[0]]))[0]
    assert np.array_equal(first_of_second, windows.shards[1][:17])


def test_bpe_knows_its_bytes(tmp_path):
    pytest.importorskip("tokenizers", reason="the extra headwater[bpe] is not installed")
    data = prepare(settings(tmp_path, corpus(tmp_path), tokenizer="bpe", bpe_vocab=300))
    assert data.manifest["train"]["tokens"] < 0.6 * data.manifest["train"]["bytes"]
    assert (
        data.tokenizer.token_bytes[tokens(data, "train")].sum() == data.manifest["train"]["bytes"]
    )


def test_evaluation_windows_are_spread_over_the_text(tmp_path):
    windows = prepare(settings(tmp_path, corpus(tmp_path))).windows("train", 8)
    assert len(windows) > 100
    chosen = windows.spread(5)
    assert chosen[0] == 0
    assert np.diff(chosen) == pytest.approx([len(windows) / 5] * 4, abs=1)
    assert windows.spread(10**6).tolist() == list(range(len(windows)))


def test_bpe_learns_nothing_from_held_out_text(tmp_path):
    """Every document repeats a word of its own, which becomes a token where it is trained on, and only there."""
    pytest.importorskip("tokenizers", reason="the extra headwater[bpe] is not installed")
    letters = "abcdefghijklmnopqrstuvwxyz"
    (tmp_path / "corpus").mkdir()
    for i, letter in enumerate(letters):
        (tmp_path / "corpus" / f"{i:02d}.txt").write_text(f"{letter}{letter} " * 50)
    data = prepare(
        settings(tmp_path, tmp_path / "corpus", tokenizer="bpe", bpe_vocab=400, validation=0.3)
    )
    assert data.manifest["split"] == "by_document"
    held_out = set(data.tokenizer.decode(tokens(data, "validation")).split())
    assert 4 <= len(held_out) <= 12
    vocabulary = set(json.loads(data.tokenizer.to_json())["model"]["vocab"])
    assert {2 * letter for letter in letters} - vocabulary == held_out


def test_bad_corpora_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no corpus at .*absent"):
        prepare(settings(tmp_path, tmp_path / "absent"))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "settings.json").write_text(
        "[]"
    )  # as a rule what stands beside texts is none
    with pytest.raises(
        UserError,
        match=r"nothing is empty: it holds no file that ends in \.txt.*names each of them",
    ):
        prepare(settings(tmp_path, tmp_path / "nothing"))
    (tmp_path / "blank.txt").write_text("\n  \n")
    with pytest.raises(UserError, match=r"blank\.txt is empty or too short"):
        prepare(settings(tmp_path, tmp_path / "blank.txt"))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 50)
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8"):
        prepare(settings(tmp_path, tmp_path / "latin.txt"))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "no"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        prepare(settings(tmp_path, tmp_path / "bad.jsonl"))
    with pytest.raises(
        UserError,
        match=r"expected a string under 'text'; found 'body': choose one with .*text_field body",
    ):
        prepare(settings(tmp_path, tmp_path / "bad.jsonl"))
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-20])
    with pytest.raises(UserError, match=r"cannot read .*torn\.txt\.gz"):
        prepare(settings(tmp_path, tmp_path / "torn.txt.gz"))
    packed = zstandard.ZstdCompressor().compress(os.urandom(1000).hex().encode() * 9)
    for torn in (packed[:-20], b"?" + packed[1:]):  # cut off, and no zstd at all
        (tmp_path / "torn.txt.zst").write_bytes(torn)
        with pytest.raises(UserError, match=r"cannot read .*torn\.txt\.zst"):
            prepare(settings(tmp_path, tmp_path / "torn.txt.zst"))
    for split, advice in (
        ("train", "lower data.validation"),
        ("validation", "raise data.validation"),
    ):
        with pytest.raises(
            UserError,
            match=rf"shorter than the context: its {split} split has \d+ tokens.*{advice}",
        ):
            prepare(settings(tmp_path, corpus(tmp_path))).windows(split, 100_000)
    assert not list((tmp_path / "cache").glob(".tmp-*"))


def test_damaged_and_marked_files_are_read_or_named_with_the_line(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "first"}\n{"text": "second"}\n')
    assert [d.text for d in documents(find_files((str(tmp_path / "marked.jsonl"),)))] == [
        "first",
        "second",
    ]

    (tmp_path / "half.jsonl").write_text(
        '{"text": "\\ud83c\\udf0a fine"}\n{"text": "half \\ud83c only"}\n'
    )
    with pytest.raises(UserError, match=r"half\.jsonl, line 2: \\ud83c is half of a character"):
        prepare(settings(tmp_path, tmp_path / "half.jsonl"))

    (tmp_path / "nested.jsonl").write_text('{"text": "fine"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"nested\.jsonl, line 2: this is not JSON"):
        prepare(settings(tmp_path, tmp_path / "nested.jsonl"))

    digits = random.Random(0)
    packed = bytearray(
        gzip.compress("".join(f"{digits.random()}\n" for _ in range(20_000)).encode())
    )
    middle = len(packed) // 2
    packed[middle : middle + 400] = b"\xff" * 400
    (tmp_path / "rotten.txt.gz").write_bytes(packed)
    with pytest.raises(UserError, match=r"cannot read .*rotten\.txt\.gz \(after line \d+\): "):
        prepare(settings(tmp_path, tmp_path / "rotten.txt.gz"))
    (tmp_path / "mixed.txt").write_bytes(b"fine\n" * 5000 + b"\xff")
    with pytest.raises(UserError, match=r"mixed\.txt \(after line \d+\) is not UTF-8 text"):
        prepare(settings(tmp_path, tmp_path / "mixed.txt"))
