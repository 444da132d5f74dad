"""Continuing prompts: with a cache of fixed size or without, in portions, alone or in a batch: the same tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinykimi import KIMI
from tinymodels import VOCAB, model_of

from headwater.generation import prompt_portions
from headwater.generation.generate import generate, stream
from headwater.generation.prompt_portions import bytes_per_token, cache_bytes, choose_chunk
from headwater.generation.sampling import Sampling
from headwater.generation.text_pieces import Continuation, continue_texts
from headwater.models import Decoder
from headwater.residuals import names
from headwater.train.data.tokenizer import ByteTokenizer

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [19], [20, 21, 22]]
TOKEN_CONVOLUTIONS = (
    "ddl:width=2,compress=token,expand=token"  # residuals may look back along the tokens too
)
MODELS = {
    **{name: (name, {}) for name in names()},
    "looks back": (TOKEN_CONVOLUTIONS, {}),
    "short windows": ("attnres-block:block=2", {"shortswa": 3}),
    "value residual": ("attnres-block:block=2", {"value_residual": True}),
    "kimi": ("attnres-block:block=2", KIMI),
    "kimi, plain": ("standard", KIMI),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_any_length_are_what_each_is_alone(kind):
    """Greedy. Every token is the likeliest after those before it, where its row is read by itself and at once: by
    induction the one that is drawn without a cache."""
    spec, settings = MODELS[kind]
    model = model_of(spec, scatter=True, **settings)
    rows = generate(model, PROMPTS, 8, temperature=0.0)
    assert generate(model, PROMPTS, 8, temperature=0.0, prefill_chunk=4) == rows
    for row, prompt in zip(rows, PROMPTS, strict=True):
        likeliest = model(torch.tensor([row]))[0].argmax(-1).tolist()
        assert row == prompt + likeliest[len(prompt) - 1 : -1]
        assert len(row) == len(prompt) + 8


LONG = (
    "standard",
    "attnres-block",
    "looks back",
    "kimi",
)  # a cache of each kind; other residuals fill one of these


@pytest.mark.parametrize("kind", [*names(), "looks back", "kimi"])
def test_tokens_drawn_one_by_one_are_those_of_a_single_pass(kind):
    """Greedy. Drawn one by one with a cache, each is the likeliest after those before it, and so by induction the one
    that is drawn without a cache: where the whole text is read at once, and where it is read in portions."""
    spec, settings = MODELS[kind]
    count = 256 if kind in LONG else 50
    small = {"layers": 2, "pattern": "kda:mla"} if kind == "kimi" else {"layers": 1}
    model = model_of(spec, scatter=True, **(settings | small | {"context": 4 + count})).eval()
    text = torch.tensor(generate(model, [[1, 2, 3, 4]], count, temperature=0.0))
    with torch.no_grad():
        cache = model.new_cache()
        portions = torch.cat(
            [model.hidden(part, cache) for part in text.split(count * 2 // 5, 1)], 1
        )
        for hidden in (model.hidden(text), portions):
            assert torch.equal(model.head(hidden[:, 3:-1]).argmax(-1), text[:, 4:])


def test_a_row_draws_as_if_it_were_alone():
    model = model_of("attnres-full", scatter=True)
    together = generate(model, PROMPTS, 10, seed=3)
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], 10, seed=3 + row) == [together[row]]


@pytest.mark.parametrize("kind", ["attnres-full", "looks back", "kimi"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}]
)
def test_the_same_tokens_are_drawn_without_a_cache(kind, settings):
    """Then every row is read by itself and from its first token on, for every token."""
    spec, shape = MODELS[kind]
    model = model_of(spec, scatter=True, **shape)
    assert generate(model, PROMPTS, 8, **settings) == generate(
        model, PROMPTS, 8, use_cache=False, **settings
    )


def test_each_row_stops_by_itself():
    model = model_of("attnres-full", scatter=True)
    free = generate(model, PROMPTS, 14, temperature=0.0)
    stop = free[0][len(PROMPTS[0]) + 2]
    found = generate(model, PROMPTS, 14, temperature=0.0, stop=stop)
    for row, whole, prompt in zip(found, free, PROMPTS):
        new = whole[len(prompt) :]
        assert row == prompt + (new[: new.index(stop) + 1] if stop in new else new)
    steps = list(
        stream(model, PROMPTS, 14, Sampling(temperature=0.0), ended=lambda row, new: len(new) > row)
    )
    assert [sum(step[row] is not None for step in steps) for row in range(5)] == [1, 2, 3, 4, 5]
    assert len(steps) == 5


@pytest.mark.parametrize("kind", ["attnres-block", "short windows", "kimi", "looks back"])
@pytest.mark.parametrize("prompts", [[[1, 2, 3], [4]], [[1, 2], [3, 4]]], ids=["uneven", "even"])
def test_the_cache_is_allocated_once(kind, prompts, monkeypatch):
    """After any number of tokens its tensors are where they were after the prompts; those of the
    sublayers are there before."""
    spec, settings = MODELS[kind]
    model, caches, places = model_of(spec, scatter=True, context=40, **settings), [], []

    def new_cache(*args):
        caches.append(Decoder.new_cache(model, *args))
        places[:] = [addresses(caches[-1])]  # the first cache is only weighed
        return caches[-1]

    monkeypatch.setattr(model, "new_cache", new_cache)
    for _ in stream(model, prompts, 30, Sampling(temperature=0.0)):
        places.append(addresses(caches[-1]))
    assert len(places) == 31
    *_, (entries, past) = places
    assert all(place[0] == entries for place in places)
    assert all(place[1] == past for place in places[1:])
    lengths = sorted(len(prompt) + 29 for prompt in prompts)  # the last token was not read
    assert caches[-1].lengths.tokens.tolist() == lengths


def addresses(cache):
    tensors = [tensor for entry in cache.entries if entry for tensor in entry.tensors()]
    return [[tensor.data_ptr() for tensor in part] for part in (tensors, cache.past)]


def test_between_two_steps_of_a_stream_the_model_is_as_its_owner_has_it():
    model = model_of("attnres-block", scatter=True)
    steps = stream(model, PROMPTS, 5, Sampling(temperature=0.0))
    next(steps)
    assert all(module.training for module in model.modules())
    model.eval()
    next(steps)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 3, "repetition_penalty": 2.0}]
)
def test_logits_that_are_no_numbers_are_named(settings):
    model = model_of("standard", scatter=True)
    model.embedding.weight.data[7] = torch.nan  # of a token that one prompt alone has
    assert len(generate(model, [[1, 2], [3]], 1, **settings)[0]) == 3
    with pytest.raises(
        ValueError, match="after 0 new tokens the logits of prompt 1 are not numbers"
    ):
        generate(model, [[1, 2], [3, 7, 4]], 3, **settings)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "there is no prompt"),
        (
            torch.tensor([1, 2]),
            {},
            r"tokens must be \(batch, length\) with at least one token, got \(2,\)",
        ),
        ([1, 2], {}, "tokens must be a list of prompts, each a list of tokens; got one prompt"),
        ("def", {}, "tokens must be numbers, got text: encode it"),
        (["def"], {}, "tokens must be numbers, got text: encode it"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [VOCAB]], {}, f"prompt 1 has tokens outside of the vocabulary of {VOCAB}"),
        (
            [[1], list(range(30))],
            {},
            "a prompt of 30 tokens and 4 new ones exceed the context of 32: lower .* to 2",
        ),
        (
            [[1] * 40],
            {},
            "a prompt of 40 tokens and 4 new ones exceed the context of 32: shorten the prompt",
        ),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ([[1]], {"min_p": 1.5}, "min_p must lie in"),
        (
            [[1]],
            {"temperature": 1e-40},
            "temperature must be 0 .* or a number from 1e-30 on, got 1e-40",
        ),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty must be a positive number, got 0"),
    ],
)
def test_what_cannot_be_continued_is_named(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of("standard"), prompts, 4, **settings)


def test_a_model_of_transformers_is_sent_to_its_own_generate():
    with pytest.raises(TypeError, match="got a Linear: a model of transformers has a `generate`"):
        generate(torch.nn.Linear(2, 2), [[1]], 4)


def test_prompts_may_be_tensors_or_arrays():
    model, settings = model_of("standard", scatter=True), {"temperature": 0.0}
    found = generate(model, [torch.tensor([1, 2]), np.array([3])], 2, **settings)
    assert repr(found) == repr(generate(model, [[1, 2], [3]], 2, **settings))


@pytest.mark.parametrize("portion", ["auto", 4, None])
def test_a_cache_that_is_too_large_is_refused_whatever_the_portion(portion, monkeypatch):
    def refuse(*_):
        raise ValueError("takes more than is free")

    monkeypatch.setattr("headwater.generation.prompts.choose_chunk", refuse)
    with pytest.raises(ValueError, match="more than is free"):
        generate(model_of("standard"), [[1]], 2, prefill_chunk=portion)


def test_a_row_that_has_ended_may_have_no_numbers():
    """What follows its end is nobody's: the other rows go on."""
    model = model_of("standard", scatter=True)
    first, other = ([1], [2])
    alone = generate(model, [other], 6, temperature=0.0)[0]
    (ended,) = generate(model, [first], 1, temperature=0.0)
    with torch.no_grad():
        model.embedding.weight[ended[1]] = float("nan")
    assert ended[1] not in alone
    assert generate(model, [first, other], 6, temperature=0.0, stop=ended[1]) == [ended, alone]


def shown(text: str, stops: list[str]) -> list[str]:
    """The pieces of a text whose bytes come one by one."""
    piece, found = Continuation(ByteTokenizer(), stops), []
    ids = list(text.encode())
    for end in range(1, len(ids) + 1):
        done = piece.update(ids[:end])
        found.append(piece.piece())
        if done:
            break
    return [*found, piece.piece(last=True)]


def test_stop_words_and_half_characters_are_held_back():
    assert "".join(shown("a river. END and more", ["END", "nd"])) == "a river. "
    assert shown("a EN b", ["END"]) == ["a", " ", "", "", "EN ", "b", ""]
    assert shown("aß", []) == ["a", "", "ß", ""]
    assert shown("xEN", ["END"]) == ["x", "", "", "EN"]  # it never became one


def test_the_first_stop_word_in_the_text_ends_it_whichever_is_named_first():
    """One token may bring two stop words at once."""
    tokenizer = SimpleNamespace(end_of_text=-1, decode=lambda ids: "".join(WORDS[i] for i in ids))
    for stops in (["STOP", "END"], ["END", "STOP"]):
        piece = Continuation(tokenizer, stops)
        assert not piece.update([0])
        assert piece.update([0, 1])
        assert piece.piece() == "a river "


WORDS = ["a river ", "END and STOP"]


def test_texts_are_continued_together():
    model, tokenizer = (
        model_of("attnres-full", scatter=True, vocab_size=320, context=64),
        ByteTokenizer(),
    )
    greedy = Sampling(temperature=0.0)
    prompts = ["one", "", "a longer prompt"]
    texts = [
        "".join(pieces) for pieces in zip(*continue_texts(model, tokenizer, prompts, 16, greedy))
    ]
    for prompt, text in zip(prompts, texts):
        assert (
            "".join(piece for (piece,) in continue_texts(model, tokenizer, [prompt], 16, greedy))
            == text
        )
    assert any(texts)


def test_portions_fit_the_free_memory():
    """Half of what is free beside the cache; whole where it fits; never so small that weights are all one reads."""
    model = model_of("attnres-block:block=2", context=10**6)
    each, cache = bytes_per_token(model), cache_bytes(model, 2, 10000)
    assert (
        cache == 2 * 10000 * 4 * (2 * 2 * 8) * 4
    )  # rows, tokens, layers, keys and values of two heads of 8, fp32
    assert choose_chunk(model, 2, 10000, free=cache + 2 * 2 * each * 1300) == 1280
    assert choose_chunk(model, 2, 10000, free=cache + 2 * 2 * each * 10000) is None
    assert choose_chunk(model, 2, 10000, free=cache) == 256
    more = bytes_per_token(model_of("attnres-full")) - bytes_per_token(model_of("standard"))
    assert more == 4 * 32 * 8  # one more source for each of eight outputs


def test_a_cache_that_the_gpu_has_no_room_for_is_refused():
    model = model_of("standard", context=10**6)
    model.embedding = torch.nn.Identity()
    model.embedding.weight = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, element_size=lambda: 4, is_meta=True
    )
    cache = cache_bytes(model, 4, 10**6)
    with pytest.raises(
        ValueError, match=r"takes 1\.9 GiB, and 1\.2 GiB are free: take at most 2 prompts"
    ):
        choose_chunk(model, 4, 10**6, free=cache * 5 // 8)
    with pytest.raises(ValueError, match="free: lower max_new_tokens, or shorten the prompts"):
        choose_chunk(model, 4, 10**6, free=cache // 5)


def test_what_is_free_is_asked(monkeypatch):
    model, asked = model_of("standard"), []
    monkeypatch.setattr(
        prompt_portions, "free_bytes", lambda device: asked.append(device.type) or 0
    )
    hidden, read = Decoder.hidden, []
    monkeypatch.setattr(
        Decoder,
        "hidden",
        lambda *words, **ways: read.append(words[1].shape[1]) or hidden(*words, **ways),
    )
    monkeypatch.setattr(prompt_portions, "LEAST", 4)
    generate(model, [[1] * 10], 2, temperature=0.0)
    assert asked == ["cpu"]
    assert read == [4, 4, 2, 1]
    with pytest.raises(
        ValueError, match="prefill_chunk must be a number of tokens or 'auto', got 'most'"
    ):
        generate(model, [[1]], 1, prefill_chunk="most")
