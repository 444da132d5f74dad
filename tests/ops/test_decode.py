"""The parts of a decoding step: kernels against references, in every form that decoders use."""

import pytest
import torch
from kernel_cases import DEVICES, error
from torch.testing import assert_close

from headwater.ops.decode import (
    Merge,
    Norm,
    attend,
    exponentials,
    likeliest,
    open_span,
    project,
    take,
)
from headwater.ops.decode.reference import philox

pytest.importorskip("triton", reason="the kernels need triton")

from headwater.ops.decode import attention, projection, span, token

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
FORMS = [
    *("three, as it is", "three, normed", "three, merged"),
    *("gated, normed", "gated, merged", "added, as it is", "added, merged"),
]


def numbers(*shape, device="cpu", seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(device)


def reading(batch, width, device, merged):
    norm = Norm(1 + 0.1 * numbers(width, device=device, seed=1), 1e-6)
    if not merged:
        return norm, None
    out = numbers(batch, width, device=device, seed=2)
    lse = numbers(batch, device=device, seed=3)
    query = numbers(width, device=device, seed=4, scale=0.1)
    return norm, Merge(out, lse, query, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
# Sums over registers; a read and a product; a read and the library's product.
@pytest.mark.parametrize("batch", [1, 3, 70])
@pytest.mark.parametrize("case", FORMS)
def test_a_projection_is_its_reference(case, batch, device):
    check_projection(*case.split(", "), batch, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["normed", "merged"])
@pytest.mark.parametrize("form", ["three", "gated"])
def test_one_row_that_is_too_wide_to_stay(form, way, device, monkeypatch):
    monkeypatch.setattr(projection, "STREAM_WIDTH", 64)
    check_projection(form, way, 1, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch", "added"),
    [(1, False), (3, False), (1, True)],
    ids=["stay", "few", "one by one"],
)
def test_a_sum_that_nearly_vanishes_is_normed_by_what_is_left(batch, added, device):
    """|out|^2 + 2 <out, x> + |x|^2 would have no digits left, or be negative: NaN behind a root."""
    x = numbers(batch, 72, device=device, scale=100.0)
    weight = numbers(40, 72, device=device)
    remainder = 0.02 * numbers(batch, 72, device=device, seed=5)
    zeros = torch.zeros(72, device=device)
    # x and out have half of the weight each.
    merge = Merge(remainder - x, torch.zeros(batch, device=device), zeros, 1e-6)
    options = {"norm": Norm(zeros + 1, 1e-6), "merge": merge}
    if added:
        options["add"] = torch.zeros(batch, 40, device=device)
    y = project(x, [weight], **options, backend="triton")
    h = (merge.out.double() + x) / 2
    square = h.square().mean(-1, keepdim=True) + 1e-6
    expected = h / square.sqrt() @ weight.double().T
    # The last digits of x and out are 1e-3 by themselves.
    assert error(y, expected) < 1e-2


def check_projection(form, way, batch, device):
    sizes = {"three": (32, 16, 16), "gated": (48, 48), "added": (40,)}[form]
    gated, added = form == "gated", form == "added"
    width = 72  # no power of two
    x = numbers(batch, width, device=device)
    weights = []
    for seed, size in enumerate(sizes):
        weights.append(numbers(size, width, device=device, scale=0.1, seed=seed))
    norm = merge = None
    if way != "as it is":
        norm, merge = reading(batch, width, device, way == "merged")
    add = numbers(batch, sizes[0], device=device, seed=7) if added else None
    options = {"norm": norm, "merge": merge, "add": add, "gated": gated}
    expected = project(x, weights, **options, backend="reference")
    out = torch.full_like(expected, torch.nan)
    y = project(x, weights, **options, out=out, backend="triton")
    assert_close(y, expected, **CLOSE)
    if added:  # in place
        y = project(x, weights, **options, out=add, backend="triton")
        assert_close(y, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["rotated", "normed", "window", "plain", "latents", "odd latents"])
# On a CPU one part; several, of which short rows leave some empty.
@pytest.mark.parametrize("room", [70, 200])
def test_attention_is_its_reference(form, room, device, monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS", 1 if room == 70 else 16)
    monkeypatch.setattr(attention, "TOGETHER", 2)  # the parts of a row are summed up in turns
    batch, heads, kv, width, value = 3, 6, 2, 16, 16
    if "latents" in form:
        heads, kv, width = 4, 1, 24
    if form == "odd latents":
        width = 23  # the halves of a head are not of one size
    lengths = torch.tensor([0, 5, room - 1], device=device)
    qkv = numbers(batch, (heads + kv) * width + kv * value, device=device)
    q, k, v = qkv.split((heads * width, kv * width, kv * value), 1)
    q = q.unflatten(1, (heads, width))
    k = k.unflatten(1, (kv, width))
    v = v.unflatten(1, (kv, value))
    old_keys = numbers(batch, room, kv, width, device=device)
    old_values = numbers(batch, room, kv, value, device=device)
    options = {}
    if form in ("rotated", "normed"):
        angle = numbers(room, width // 2, device=device)
        options["rotary"] = angle.cos(), angle.sin()
    if form == "normed":
        weights = [numbers(width, device=device, seed=seed) for seed in (5, 6)]
        options["norms"] = tuple(Norm(weight, 1e-6) for weight in weights)
    if form == "window":
        options["window"] = 4
    results = []
    for backend in ("reference", "triton"):
        keys, values = old_keys.clone(), old_values.clone()
        for _ in range(2):  # the second call meets the counters that the first one left
            y = attend(q, k, v, keys, values, lengths, **options, backend=backend)
        results.append((y, keys, values))
    assert_close(results[1], results[0], **CLOSE)
    assert not torch.equal(results[1][1], old_keys)  # the new token's keys are there


def test_counters_stay_where_a_graph_has_found_them():
    cpu = torch.device("cpu")
    one = attention._counters(cpu, 1)
    for programs in range(2, 100):
        attention._counters(cpu, programs)
    assert attention._counters(cpu, 1) is one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "many"),
    [(1, 99), (5, 99), (19, 99), (5, 0)],  # at once, in two, one by one
)
def test_a_span_opens_as_its_reference(count, many, device, monkeypatch):
    monkeypatch.setattr(span, "TOGETHER", 1024)  # 19 sources do not fit at once
    monkeypatch.setattr(span, "MANY", many)
    sources = numbers(count, 3, 72, device=device)
    folded = numbers(4, 72, device=device, scale=0.2)
    results = []
    for backend in ("triton", "reference"):
        outs = torch.full((4, 3, 72), torch.nan, device=device)
        lses = torch.zeros(4, 4, device=device)[:, :3]
        open_span(sources, folded, 1e-6, outs, lses, backend=backend)
        results.append((outs, lses))
    assert_close(results[0], results[1], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_looked_up_and_chosen(device, monkeypatch):
    monkeypatch.setattr(token, "LOGITS", 64)
    weight = numbers(300, 72, device=device)
    tokens = torch.tensor([7, 299, 0], device=device)
    out = torch.empty(3, 72, device=device)
    rows = take(weight, tokens, out, backend="triton")
    assert torch.equal(rows, weight[tokens])
    logits = numbers(5, 300, device=device)
    logits[1, [40, 200]] = 9.0  # of equals the first
    logits[2] = float("-inf")
    logits[2, 299] = -1e30
    logits[3] = logits[4, 70] = torch.nan
    places = likeliest(logits, backend="triton")
    assert torch.equal(places, likeliest(logits, backend="reference"))
    assert places.tolist()[1:] == [40, 299, -1, -1]


@pytest.mark.parametrize(
    ("counters", "key", "numbers"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_its_authors_numbers(counters, key, numbers):
    """The known answers of Random123."""
    results = philox(torch.tensor(counters).split(1), torch.tensor(key).split(1))
    assert " ".join(f"{int(number):08x}" for number in results) == numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7, 8, 3001])  # 8: four whole quarters
def test_exponentials_are_their_reference(count, device):
    seeds = torch.tensor([0, 5, 2**62 + 3], device=device)
    for number in (0, 1, 2**31 - 1):
        step = torch.tensor([number], device=device)
        expected = exponentials(seeds, step, count, backend="reference")
        noise = exponentials(seeds, step, count, backend="triton")
        assert_close(noise, expected, atol=0.0, rtol=1e-6)
        assert (expected > 0).all()
        if count > 3000:
            assert expected.mean().item() == pytest.approx(1, abs=0.05)
            assert len(expected.unique()) > 0.999 * expected.numel()
