"""Every text survives a round trip, and the bytes of its tokens add up to the bytes of the text."""

import numpy as np
import pytest

from headwater.errors import UserError
from headwater.train.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

TEXTS = ["", "plain text", "naïve — 深さ 🌊\r\n\ttabs", "a <|endoftext|> inside a document"]


def bpe() -> BPETokenizer:
    return BPETokenizer.train(["the river and the headwater of the river"] * 3, vocab_size=280)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else bpe()


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_byte_counts(tokenizer, text, tmp_path):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[np.asarray(ids, dtype=int)].sum() == len(text.encode())
    assert tokenizer.end_of_text not in ids
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size

    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(tokenizer)
    assert list(again.encode(text)) == list(ids)
    assert again.to_json() == tokenizer.to_json()


def test_the_end_of_a_text_stands_for_no_bytes(tokenizer):
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    assert (np.delete(tokenizer.token_bytes, tokenizer.end_of_text) > 0).all()


def test_bpe_merges_what_is_frequent():
    assert len(bpe().encode("the river")) < len("the river")


def test_bytes_decode_drops_end_of_text_and_marks_unknown_ids():
    assert ByteTokenizer().decode([104, 256, 105, 300]) == "hi\ufffd"


def test_missing_and_broken_tokenizer_files_are_named(tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot read the tokenizer .*tokenizer\.json"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
