"""`verify` calls models equal: in half precision against the fp32 forward, and decoding with padding too."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tinyhf import converted, stir, tiny_config, tiny_model, tokens
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headwater.cli import main
from headwater.errors import UserError
from headwater.hf import convert, verify
from headwater.hf.formats import folder
from headwater.hf.same_function import divergence
from headwater.hf.verify import KL_LIMIT, _distance

BF16 = torch.bfloat16


def pair(kind, dtype, tmp_path):
    """Weights large enough that half precision shows, loaded twice as a user loads them; the first is converted."""
    model = tiny_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(tmp_path)
    model, plain = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype) for _ in range(2))
    convert(model, "attnres-block", block=3)
    return model, plain


HALVES = [
    (name, BF16)
    for name in ("llama", "gemma2", "olmo2", "gpt_neox", "granite", "qwen3_moe", "lfm2")
]
# Its rounding shows an eighth as much.
HALVES += [(name, torch.float16) for name in ("llama", "gemma2", "qwen3_moe")]


@pytest.mark.parametrize(("kind", "dtype"), HALVES)
def test_half_precision_is_judged_by_the_plain_model_s_distance_from_fp32(kind, dtype, tmp_path):
    model, plain = pair(kind, dtype, tmp_path)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    result = verify(model, plain, tokens(4, 24))
    assert result.equal, str(result)
    assert "the limit is 2 times what the plain model itself is off by, or 1e-06" in str(result)
    if dtype is BF16:
        assert result.kl > KL_LIMIT / 2  # the limit of fp32 would not do, or hardly
        assert result.whole.limit > KL_LIMIT
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    stir(model, 0.2)
    assert not verify(model, plain, tokens(4, 24)).equal


def test_half_precision_bears_twice_the_plain_model_s_distance_and_no_more(tmp_path):
    model, plain = pair("llama", BF16, tmp_path)
    limit = verify(model, plain, tokens(4, 24)).whole.limit
    stir(model, 0.003)
    result = verify(model, plain, tokens(4, 24))
    assert limit < result.whole.kl_median < 5 * limit
    assert result.whole.limit == limit
    assert not result.equal


@pytest.mark.parametrize("count", [4, 8, 32])
def test_few_tokens_in_half_precision_are_no_false_alarm(count):
    """Tokens round more and less, so a median of four is twice the plain model's once in ten times, by chance."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth = 3 * normal(100, 256, 16)

    def rounded(factor):
        sizes = 0.01 * factor * normal(100, 256, 1).mul(0.7).exp()
        return truth + sizes * normal(*truth.shape)

    plain, ours, wrong = rounded(1), rounded(1), rounded(15)
    few = slice(-count, None)

    def equal(logits):
        verdicts = []
        for row, theirs, true in zip(logits, plain, truth, strict=True):
            rounding = [divergence(theirs, true), divergence(theirs[few], true[few])]
            verdicts.append(_distance(row[few], true[few], rounding).equal)
        return sum(verdicts)

    assert equal(ours) >= 99  # of a hundred
    assert equal(wrong) <= 5


def test_a_reference_in_fp32_gives_the_same_verdict(tmp_path):
    model, plain = pair("llama", BF16, tmp_path)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert verify(model, truth, tokens(4, 24)).equal
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.copy_(parameter.bfloat16())
    kls = [verify(model, reference, tokens(4, 24)).kl for reference in (plain, truth)]
    assert kls[0] == pytest.approx(kls[1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_logits_that_are_no_numbers_are_equal_to_nothing(dtype, tmp_path):
    model, plain = pair("llama", dtype, tmp_path)
    with torch.no_grad():
        model.model.residual.reads["8"].query[0] = torch.nan
    result = verify(model, plain, tokens(2, 12))
    assert not result.equal
    assert str(result).startswith("NOT equal")


def test_the_limit_is_a_millionth_of_a_nat():
    """A model that is off by little more is not equal, whatever else it is judged by."""
    result = verify(converted("attnres-block", amount=0.02), tiny_model("llama"), tokens(4, 24))
    assert 2e-6 < result.kl < 2e-4
    assert not result.equal
    assert result.whole.limit == KL_LIMIT == 1e-6


def test_the_command_takes_as_many_tokens_and_the_seed_that_it_is_given(monkeypatch):
    calls = []
    answer = SimpleNamespace(equal=True)
    monkeypatch.setattr(folder, "verify_folders", lambda *words: calls.append(words) or answer)
    words = ["--tokens", "9", "--seed", "4", "--dtype", "bfloat16", "--device", "cpu"]
    assert main(["verify", "one", "two", *words]) == 0
    assert calls == [(Path("one"), Path("two"), 9, 4, "bfloat16", "cpu")]


def drop(model, argument):
    """Every attention of the model stays without an argument that its layer is given."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, argument: None}), with_kwargs=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("lost", "shows"),
    [
        ("past_key_values", {"from the cache", "from the cache, rows with padding"}),
        ("attention_mask", {"rows with padding", "from the cache, rows with padding"}),
    ],
)
def test_a_model_that_decodes_wrongly_or_forgets_padding_is_not_equal(lost, shows, dtype, tmp_path):
    model, plain = pair("llama", dtype, tmp_path)
    drop(model, lost)
    result = verify(model, plain, tokens(4, 24))
    assert result.whole.equal
    assert not result.equal
    assert {name for name, distance in result.decoding.items() if not distance.equal} == shows


def test_padding_in_the_batch_does_not_count_and_modes_are_kept(tmp_path):
    model, plain = pair("llama", torch.float32, tmp_path)
    model.train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    rows = tokens(3, 12)
    mask = torch.ones_like(rows)
    mask[2, :5] = 0
    result = verify(model, plain, {"input_ids": rows, "attention_mask": mask, "labels": rows})
    assert result.equal, str(result)
    assert result.whole.tokens == 31
    counts = {"rows with padding": 3, "from the cache": 8, "from the cache, rows with padding": 4}
    assert {name: distance.tokens for name, distance in result.decoding.items()} == counts
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_models_of_other_vocabularies_do_not_compare():
    with pytest.raises(UserError, match="the models do not compare"):
        verify(tiny_model("llama"), tiny_model("llama", vocab_size=80), tokens())


def test_where_there_is_no_cache_none_is_tried():
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("qwen3")).eval()
    plain = copy.deepcopy(classifier)
    convert(classifier)
    result = verify(classifier, plain, tokens())
    assert result.equal
    assert not result.decoding
    looks_back = converted("ddl:width=2,compress=token,expand=token")
    result = verify(looks_back, tiny_model("llama"), tokens())
    assert not result.decoding
    assert str(result).endswith("decoding from a cache: not tried")


def test_a_reference_without_an_fp32_forward_is_refused(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, plain = pair("llama", BF16, tmp_path)
    accelerate.cpu_offload(plain, "cpu")
    with pytest.raises(UserError, match="load the reference in fp32, without a device map"):
        verify(model, plain, tokens())
