"""PEFT: what an adapter trains of the residual is in its folder, and comes back."""

import warnings
from unittest import TestCase

import pytest
import torch
from tinyhf import stir, tiny_model, tokens
from transformers import AutoModelForCausalLM

from headwater.cli import main
from headwater.errors import UserError
from headwater.hf import convert, load_delta, revert, save_delta, trainable, verify
from headwater.hf.convert.install import conversion_of

peft = pytest.importorskip("peft")


def lora(**options):
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options)


def converted(residual="attnres-block", **options):
    model = tiny_model("llama")
    convert(model, residual, **options)
    return model


def with_trainable():
    model = peft.get_peft_model(converted(), lora())
    trainable(model)
    return model


def with_modules_to_save():
    return peft.get_peft_model(converted(), lora(modules_to_save=["residual"]))


def converted_after():
    model = peft.get_peft_model(tiny_model("llama"), lora())
    convert(model)
    return model


WAYS = [with_trainable, with_modules_to_save, converted_after]


def steps(model, count=3):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(count):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def queries(model):
    return torch.stack(
        [p for n, p in conversion_of(model)[0].depth.residual.named_parameters() if "query" in n]
    )


@pytest.mark.parametrize("make", WAYS)
def test_the_trained_residual_is_in_the_adapter_s_folder_and_comes_back(make, tmp_path):
    model = steps(make())
    assert queries(model).abs().mean() > 0.01
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(converted(), tmp_path).eval()
    assert torch.equal(queries(again), queries(model))
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert verify(again, model, tokens()).equal
    with again.disable_adapter():
        assert queries(again).abs().max() == 0
        torch.testing.assert_close(again(tokens()).logits, tiny_model("llama")(tokens()).logits)


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_prompt_s_folder_would_lose_the_residual_so_it_is_kept_beside(kind, tmp_path):
    prompt = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    with pytest.raises(UserError, match=f"{kind.__name__} adapter holds its prompt alone"):
        convert(peft.get_peft_model(tiny_model("llama"), kind(**prompt)))
    model = peft.get_peft_model(converted(), kind(**prompt))
    with pytest.raises(
        UserError, match=r"give model\.base_model, and keep the residual by .*save_delta"
    ):
        trainable(model)
    trainable(model.base_model)
    steps(model)
    model.save_pretrained(tmp_path)
    save_delta(model, tmp_path / "residual.safetensors")
    base = tiny_model("llama")
    load_delta(base, tmp_path / "residual.safetensors")
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_saving_beside_a_plain_base_warns_of_nothing_and_an_adapter_alone_is_no_model(
    tmp_path, capsys
):
    """PEFT reads the config of the folder that the base came from, which is of the plain type."""
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    convert(base)
    model = peft.get_peft_model(base, lora())
    with TestCase().assertNoLogs("transformers", "WARNING"):
        model.save_pretrained(tmp_path / "adapter")
    assert main(["generate", str(tmp_path / "adapter")]) == 1
    assert "it holds an adapter of PEFT; load it on its model" in capsys.readouterr().err


def test_an_adapter_of_a_saved_conversion_brings_its_residual_and_pefts_own_way_compares_none(
    tmp_path,
):
    """What the guide warns of: should PEFT come to compare them, the guide can say so."""
    converted(block=2).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
    trainable(model)
    steps(model).save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    for base in (converted(block=4), converted("attnres-full"), tiny_model("llama")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert not torch.allclose(other(tokens()).logits, model(tokens()).logits, atol=1e-4)


@pytest.mark.parametrize("make", WAYS)
def test_merged_it_keeps_the_trained_residual_and_saves_as_a_converted_model(make, tmp_path):
    model = steps(make())
    with torch.no_grad():
        expected = model(tokens()).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
        assert not any("modules_to_save" in name for name, _ in merged.named_parameters())
        merged.save_pretrained(tmp_path)
        loaded = type(merged).from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens()).logits, merged(tokens()).logits)
    revert(merged)
    assert "residual" not in dict(merged.model.named_children())


@pytest.mark.parametrize("make", WAYS)
def test_the_trainer_s_checkpoints_hold_it_and_training_resumes(make, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def train(model, steps, **resume):
        settings = TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
            lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens(16)]
        Trainer(model, settings, train_dataset=data).train(**resume)
        return model.eval()

    whole = train(make(), 4)
    again = peft.PeftModel.from_pretrained(converted(), tmp_path / "checkpoint-4").eval()
    assert torch.equal(again(tokens()).logits, whole(tokens()).logits)
    resumed = train(make(), 4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed(tokens()).logits, whole(tokens()).logits)


def test_separate_inputs_and_both_orders():
    plain = tiny_model("llama")
    before = peft.get_peft_model(tiny_model("llama"), lora())
    convert(before, "muddformer")  # with separate inputs for query, key and value
    assert verify(before, plain, tokens()).equal
    after = tiny_model("llama")
    report = convert(after)
    after = peft.get_peft_model(after, lora())
    assert trainable(after) == sum(torch.Size(shape).numel() for shape in report.added.values())
    assert trainable(after) == trainable(after.base_model.model)  # a second time changes nothing
    after(tokens(), labels=tokens()).loss.backward()
    with_gradient = {
        name for name, parameter in after.named_parameters() if parameter.grad is not None
    }
    assert any("lora" in name for name in with_gradient)
    assert any("residual" in name for name in with_gradient)
    trainable(after, only=True)
    assert all(
        "residual" in name
        for name, parameter in after.named_parameters()
        if parameter.requires_grad
    )
    revert(after)
    assert verify(after, plain, tokens()).equal


def test_two_adapters_have_a_residual_each():
    model = peft.get_peft_model(converted(), lora(), "one")
    trainable(model)
    stir(model, 0.3)
    first = model(tokens()).logits
    model.add_adapter("two", lora(modules_to_save=["residual"]))
    model.set_adapter("two")
    with torch.no_grad():
        conversion_of(model)[0].depth.residual.reads["3"].query.fill_(2.0)
    second = model(tokens()).logits
    assert not torch.equal(first, second)
    model.set_adapter("one")
    assert torch.equal(model(tokens()).logits, first)
    model.set_adapter("two")
    assert torch.equal(model(tokens()).logits, second)
    trainable(model, only=True)
    ours = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ours
    assert all(".residual.modules_to_save.two." in name for name in ours)


def test_a_trained_copy_of_the_final_norm_is_the_one_that_computes():
    model = peft.get_peft_model(converted(), lora(modules_to_save=["model.norm"]))
    before = model(tokens()).logits
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save["default"].weight.mul_(2.0)
    torch.testing.assert_close(model(tokens()).logits, 2 * before)
    model(tokens(), labels=tokens()).loss.backward()
    assert model.base_model.model.model.norm.modules_to_save["default"].weight.grad.abs().max() > 0
