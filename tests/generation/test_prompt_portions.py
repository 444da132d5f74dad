"""Portions of a prompt fit the free memory, and so does the cache."""

from types import SimpleNamespace

import pytest
import torch
from tinymodels import model_of

from headwater.generation import prompt_portions
from headwater.generation.generate import generate
from headwater.generation.prompt_portions import bytes_per_token, cache_bytes, choose_chunk
from headwater.models import Decoder


def test_portions_fit_the_free_memory():
    """Half of what is free beside the cache; the whole prompt where it fits.

    And never so little that a GPU would only read weights.
    """
    model = model_of("attnres-block:block=2", context=10**6)
    per_token, cache = bytes_per_token(model), cache_bytes(model, 2, 10000)
    # Rows, tokens, layers, keys and values of two heads of 8, fp32.
    assert cache == 2 * 10000 * 4 * (2 * 2 * 8) * 4
    assert choose_chunk(model, 2, 10000, free=cache + 2 * 2 * per_token * 1300) == 1280
    assert choose_chunk(model, 2, 10000, free=cache + 2 * 2 * per_token * 10000) is None
    assert choose_chunk(model, 2, 10000, free=cache) == 256
    full, plain = (bytes_per_token(model_of(spec)) for spec in ("attnres-full", "standard"))
    assert full - plain == 4 * 32 * 8  # one more source for each of eight outputs


def test_a_cache_that_the_gpu_has_no_room_for_is_refused():
    model = model_of("standard", context=10**6)
    model.embedding = torch.nn.Identity()
    model.embedding.weight = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, element_size=lambda: 4, is_meta=True
    )
    cache = cache_bytes(model, 4, 10**6)
    with pytest.raises(ValueError, match=r"1\.9 GiB, and 1\.2 GiB are free: take at most 2"):
        choose_chunk(model, 4, 10**6, free=cache * 5 // 8)
    with pytest.raises(ValueError, match="free: lower max_new_tokens, or shorten the prompts"):
        choose_chunk(model, 4, 10**6, free=cache // 5)


@pytest.mark.parametrize("portion", ["auto", 4, None])
def test_a_cache_that_is_too_large_is_refused_whatever_the_portion(portion, monkeypatch):
    def refuse(*_):
        raise ValueError("takes more than is free")

    monkeypatch.setattr("headwater.generation.prompts.choose_chunk", refuse)
    with pytest.raises(ValueError, match="more than is free"):
        generate(model_of("standard"), [[1]], 2, prefill_chunk=portion)


def test_the_free_memory_decides(monkeypatch):
    model, devices, lengths = model_of("standard"), [], []
    hidden = Decoder.hidden

    def no_memory(device):
        devices.append(device.type)
        return 0

    def counted(self, tokens, *args, **options):
        lengths.append(tokens.shape[1])
        return hidden(self, tokens, *args, **options)

    monkeypatch.setattr(prompt_portions, "free_bytes", no_memory)
    monkeypatch.setattr(Decoder, "hidden", counted)
    monkeypatch.setattr(prompt_portions, "LEAST", 4)
    generate(model, [[1] * 10], 2, temperature=0.0)
    assert devices == ["cpu"]
    assert lengths == [4, 4, 2, 1]
