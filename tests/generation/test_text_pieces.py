"""Text as it comes: stop words and half characters are held back."""

from types import SimpleNamespace

from tinymodels import model_of

from headwater.generation.sampling import Sampling
from headwater.generation.text_pieces import Continuation, continue_texts
from headwater.train.data.tokenizer import ByteTokenizer


def pieces_of(text, stops=()):
    """The pieces of a text whose bytes come one by one."""
    continuation, pieces = Continuation(ByteTokenizer(), stops), []
    ids = list(text.encode())
    for end in range(1, len(ids) + 1):
        ended = continuation.update(ids[:end])
        pieces.append(continuation.piece())
        if ended:
            break
    return [*pieces, continuation.piece(last=True)]


def test_stop_words_and_half_characters_are_held_back():
    assert "".join(pieces_of("a river. END and more", ["END", "nd"])) == "a river. "
    assert pieces_of("a EN b", ["END"]) == ["a", " ", "", "", "EN ", "b", ""]
    assert pieces_of("aß") == ["a", "", "ß", ""]
    assert pieces_of("xEN", ["END"]) == ["x", "", "", "EN"]  # it never became a stop word


def test_the_first_stop_word_in_the_text_ends_it_whichever_is_named_first():
    """One token may bring two stop words at once."""
    words = ["a river ", "END and STOP"]
    tokenizer = SimpleNamespace(end_of_text=-1, decode=lambda ids: "".join(words[i] for i in ids))
    for stops in (["STOP", "END"], ["END", "STOP"]):
        continuation = Continuation(tokenizer, stops)
        assert not continuation.update([0])
        assert continuation.update([0, 1])
        assert continuation.piece() == "a river "


def test_texts_are_continued_together():
    model = model_of("attnres-full", scatter=True, vocab_size=320, context=64)

    def texts_after(prompts):
        steps = continue_texts(model, ByteTokenizer(), prompts, 16, Sampling(temperature=0.0))
        return ["".join(pieces) for pieces in zip(*steps)]

    prompts = ["one", "", "a longer prompt"]
    texts = texts_after(prompts)
    assert any(texts)
    for prompt, text in zip(prompts, texts):
        assert texts_after([prompt]) == [text]
