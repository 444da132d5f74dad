"""Continuing prompts with a cache or without, in portions, in a batch: the same tokens."""

import numpy as np
import pytest
import torch
from tinykimi import KIMI
from tinymodels import VOCAB, model_of

from headwater.generation.generate import generate, stream
from headwater.generation.sampling import Sampling
from headwater.models import Decoder
from headwater.residuals import names

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [*range(9, 19)], [19], [20, 21, 22]]
GREEDY = Sampling(temperature=0.0)
LOOKS_BACK = "ddl:width=2,compress=token,expand=token"  # along the tokens too
MODELS = {
    **{name: (name, {}) for name in names()},
    "looks back": (LOOKS_BACK, {}),
    "short windows": ("attnres-block:block=2", {"shortswa": 3}),
    "value residual": ("attnres-block:block=2", {"value_residual": True}),
    "kimi": ("attnres-block:block=2", KIMI),
    "kimi, plain": ("standard", KIMI),
}
# A cache of each kind, and states of each kind.
LONG = ("standard", "attnres-block", "looks back", "kimi")
SHORT = ("mhc", "muddformer", "depth-window", "laurel")


def tiny(kind, **settings):
    spec, shape = MODELS[kind]
    return model_of(spec, scatter=True, **{**shape, **settings})


def cut_at(stop, prompt, row):
    """A row that was not stopped, up to the first stop token behind its prompt."""
    new = row[len(prompt) :]
    return prompt + (new[: new.index(stop) + 1] if stop in new else new)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_any_length_are_what_each_is_alone(kind):
    """Greedy: every token is the likeliest after the tokens before it.

    Its row is read by itself and at once: by induction it is the token drawn without a cache.
    """
    model = tiny(kind)
    rows = generate(model, PROMPTS, 8, temperature=0.0)
    assert generate(model, PROMPTS, 8, temperature=0.0, prefill_chunk=4) == rows
    for row, prompt in zip(rows, PROMPTS, strict=True):
        logits = model(torch.tensor([row]))[0]
        likeliest = logits.argmax(-1).tolist()
        assert row == prompt + likeliest[len(prompt) - 1 : -1]
        assert len(row) == len(prompt) + 8


@torch.no_grad()
@pytest.mark.parametrize("kind", [*LONG, *SHORT])
def test_tokens_drawn_one_by_one_are_those_of_a_single_pass(kind):
    """Greedy, with a cache: each token is the likeliest after the tokens before it.

    The whole text is read at once, and in portions.
    """
    count = 256 if kind in LONG else 50
    small = {"layers": 2, "pattern": "kda:mla"} if kind == "kimi" else {"layers": 1}
    model = tiny(kind, **small, context=4 + count).eval()
    prompt, cache = torch.tensor([[1, 2, 3, 4]]), model.new_cache()
    text = generate(model, prompt, count, temperature=0.0)
    parts = text.split(count * 2 // 5, 1)
    portions = [model.hidden(part, cache) for part in parts]
    for hidden in (model.hidden(text), torch.cat(portions, 1)):
        likeliest = model.head(hidden[:, 3:-1]).argmax(-1)
        assert torch.equal(likeliest, text[:, 4:])


def test_a_row_draws_as_if_it_were_alone():
    model = tiny("attnres-full")
    together = generate(model, PROMPTS, 10, seed=3)
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], 10, seed=3 + row) == [together[row]]


@pytest.mark.parametrize("kind", ["attnres-full", "looks back", "kimi"])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}],
)
def test_the_same_tokens_are_drawn_without_a_cache(kind, settings):
    model = tiny(kind)
    rows = generate(model, PROMPTS, 8, **settings)
    assert generate(model, PROMPTS, 8, use_cache=False, **settings) == rows


def test_a_seed_decides_the_draws_and_the_model_is_left_as_it_was():
    model, prompts = tiny("standard"), [[1, 2, 3, 4]]
    texts = [generate(model, prompts, 12, seed=seed) for seed in (0, 1, 2, 1)]
    assert texts[0] != texts[1] != texts[2]
    assert texts[1] == texts[3]
    assert model.training
    model.eval()
    model.sublayers[1].train()
    generate(model, prompts, 1)
    training = [i for i, sublayer in enumerate(model.sublayers) if sublayer.training]
    assert training == [1]


def test_each_row_stops_by_itself():
    model = tiny("attnres-full")
    free = generate(model, PROMPTS, 14, temperature=0.0)
    stop = free[0][len(PROMPTS[0]) + 2]
    rows = generate(model, PROMPTS, 14, temperature=0.0, stop=stop)
    assert rows == [cut_at(stop, prompt, row) for prompt, row in zip(PROMPTS, free)]
    # Row n ends after n + 1 tokens.
    steps = list(stream(model, PROMPTS, 14, GREEDY, ended=lambda row, new: len(new) > row))
    assert len(steps) == 5
    for number, tokens in enumerate(steps):
        assert [token is None for token in tokens] == [number > row for row in range(5)]


def test_rows_of_a_tensor_repeat_their_last_token():
    model, prompts = tiny("standard"), torch.arange(1, 9).view(2, 4)

    def continued(**stop):
        rows = generate(model, prompts, 12, temperature=0.0, **stop)
        return rows[:, 4:].tolist()

    one, other = continued()
    stop = next(token for token in one[:8] if token not in other)
    before = one[: one.index(stop)]
    repeated = [stop] * (12 - len(before))
    assert continued(stop=stop) == [before + repeated, other]


@pytest.mark.parametrize("kind", ["attnres-block", "short windows", "kimi", "looks back"])
@pytest.mark.parametrize("prompts", [[[1, 2, 3], [4]], [[1, 2], [3, 4]]])
def test_the_cache_is_allocated_once(kind, prompts, monkeypatch):
    """After any number of tokens its tensors are where they were after the prompts.

    Those of the sublayers are there before.
    """
    model, caches, places = tiny(kind, context=40), [], []

    def new_cache(*args):
        caches.append(Decoder.new_cache(model, *args))
        places[:] = [addresses(caches[-1])]  # the first cache is only weighed
        return caches[-1]

    monkeypatch.setattr(model, "new_cache", new_cache)
    for _ in stream(model, prompts, 30, GREEDY):
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
    model = tiny("attnres-block")
    steps = stream(model, PROMPTS, 5, GREEDY)
    next(steps)
    assert all(module.training for module in model.modules())
    model.eval()
    next(steps)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {}, {"top_k": 3, "repetition_penalty": 2.0}],
)
def test_logits_that_are_no_numbers_are_named(settings):
    model = tiny("standard")
    model.embedding.weight.data[7] = torch.nan  # only one prompt has this token
    rows = generate(model, [[1, 2], [3]], 1, **settings)
    assert [len(row) for row in rows] == [3, 2]
    with pytest.raises(ValueError, match="after 0 new tokens the logits of prompt 1 are not num"):
        generate(model, [[1, 2], [3, 7, 4]], 3, **settings)


def test_a_row_that_has_ended_may_have_no_numbers():
    """Tokens after its end are nobody's: the other rows go on."""
    model = tiny("standard")
    (other,) = generate(model, [[2]], 6, temperature=0.0)
    ((_, stop),) = generate(model, [[1]], 1, temperature=0.0)
    model.embedding.weight.data[stop] = torch.nan
    assert stop not in other
    rows = generate(model, [[1], [2]], 6, temperature=0.0, stop=stop)
    assert rows == [[1, stop], other]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "there is no prompt"),
        (torch.tensor([1, 2]), {}, "tokens must be a list of prompts"),
        (["def"], {}, "continue_texts takes text"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1], [VOCAB]], {}, f"prompt 1 has tokens outside of the vocabulary of {VOCAB}"),
        ([[1], [1] * 30], {}, "exceed the context of 32: lower max_new_tokens to 2"),
        ([[1] * 40], {}, "exceed the context of 32: shorten the prompt"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be 0 or more"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ([[1]], {"min_p": 1.5}, "min_p must lie in"),
        ([[1]], {"top_p": 0.0}, "top_p must lie in"),
        ([[1]], {"top_k": 0}, "top_k must be at least 1"),
        ([[1]], {"temperature": 1e-40}, "temperature must be 0 .* or a number from 1e-30 on"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty must be a positive number"),
    ],
)
def test_what_cannot_be_continued_is_named(prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of("standard"), prompts, **{"max_new_tokens": 4, **settings})


def test_a_model_of_transformers_is_sent_to_its_own_generate():
    with pytest.raises(TypeError, match="got a Linear: a model of transformers has a `generate`"):
        generate(torch.nn.Linear(2, 2), [[1]], 4)


def test_prompts_may_be_tensors_or_arrays():
    model = tiny("standard")
    expected = generate(model, [[1, 2], [3]], 2, temperature=0.0)
    tensors = [torch.tensor([1, 2]), np.array([3])]
    # Their tokens are plain numbers too.
    assert repr(generate(model, tensors, 2, temperature=0.0)) == repr(expected)
