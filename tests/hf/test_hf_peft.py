"""PEFT: what an adapter trains of the residual is in its folder, and comes back."""

import warnings
from unittest import TestCase

import pytest
import torch
from tinyhf import agree, converted, load, logits, same, stir, tiny_model, tokens
from transformers import Trainer, TrainingArguments

from headwater.errors import UserError
from headwater.hf import convert, load_delta, revert, save_delta, trainable
from headwater.hf.convert.install import conversion_of

peft = pytest.importorskip("peft")


def base(residual="attnres-block"):
    return converted(residual, amount=0.0)


def with_lora(model, name="default", **options):
    return peft.get_peft_model(model, lora(**options), name)


def lora(**options):
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options)


def with_trainable():
    model = with_lora(base())
    trainable(model)
    return model


def with_modules_to_save():
    return with_lora(base(), modules_to_save=["residual"])


def converted_after():
    model = with_lora(tiny_model("llama"))
    convert(model)
    return model


ways = pytest.mark.parametrize("make", [with_trainable, with_modules_to_save, converted_after])


def trained(model):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def queries(model):
    residual = conversion_of(model)[0].depth.residual
    return torch.stack([p for name, p in residual.named_parameters() if "query" in name])


def learning(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@ways
def test_the_trained_residual_is_in_the_adapter_s_folder_and_comes_back(make, tmp_path):
    model = trained(make())
    assert queries(model).abs().mean() > 0.01
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    assert torch.equal(queries(again), queries(model))
    assert same(again, model)
    assert agree(again, model)
    with again.disable_adapter():
        assert queries(again).abs().max() == 0
        torch.testing.assert_close(logits(again), logits(tiny_model("llama")))


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_prompt_s_folder_would_lose_the_residual_so_it_is_kept_beside(kind, tmp_path):
    prompt = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UserError, match=f"{kind.__name__} adapter holds its prompt alone"):
        convert(peft.get_peft_model(tiny_model("llama"), prompt))
    model = peft.get_peft_model(base(), prompt)
    with pytest.raises(UserError, match=r"give model\.base_model"):
        trainable(model)
    trainable(model.base_model)
    trained(model)
    model.save_pretrained(tmp_path)
    save_delta(model, tmp_path / "residual.safetensors")
    plain = tiny_model("llama")
    load_delta(plain, tmp_path / "residual.safetensors")
    again = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_saving_beside_a_plain_base_warns_of_nothing_and_an_adapter_alone_is_no_model(
    tmp_path, command
):
    """PEFT reads the config of the folder that the base came from, which is of the plain type."""
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain")
    convert(plain)
    with TestCase().assertNoLogs("transformers", "WARNING"):
        with_lora(plain).save_pretrained(tmp_path / "adapter")
    assert "it holds an adapter of PEFT" in command("generate", tmp_path / "adapter", code=1)


def test_an_adapter_of_a_saved_conversion_brings_its_residual_and_pefts_own_way_compares_none(
    tmp_path,
):
    """The guide warns of this: should PEFT come to compare them, the guide can say so."""
    base("attnres-block:block=2").save_pretrained(tmp_path / "base")
    model = with_lora(load(tmp_path / "base"))
    trainable(model)
    trained(model).save_pretrained(tmp_path / "adapter")
    assert same(load(tmp_path / "adapter").eval(), model)
    for other in (base("attnres-block:block=4"), base("attnres-full"), tiny_model("llama")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PEFT asks transformers under a name that is going away.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
            other = peft.PeftModel.from_pretrained(other, tmp_path / "adapter").eval()
        assert not torch.allclose(logits(other), logits(model), atol=1e-4)


@ways
def test_merged_it_keeps_the_trained_residual_and_saves_as_a_converted_model(make, tmp_path):
    model = trained(make())
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert not any("modules_to_save" in name for name, _ in merged.named_parameters())
    merged.save_pretrained(tmp_path)
    assert same(type(merged).from_pretrained(tmp_path), merged)
    revert(merged)
    assert "residual" not in dict(merged.model.named_children())


@ways
def test_the_trainer_s_checkpoints_hold_it_and_training_resumes(make, tmp_path):
    def train(model, **resume):
        settings = TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
            lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens(16)]
        Trainer(model, settings, train_dataset=data).train(**resume)
        return model.eval()

    whole = train(make())
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "checkpoint-4").eval()
    assert same(again, whole)
    resumed = train(make(), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(logits(resumed), logits(whole))


def test_separate_inputs_and_both_orders():
    plain = tiny_model("llama")
    before = with_lora(tiny_model("llama"))
    convert(before, "muddformer")  # with separate inputs for query, key and value
    assert agree(before, plain)
    after = tiny_model("llama")
    report = convert(after)
    after = with_lora(after)
    assert trainable(after) == sum(torch.Size(shape).numel() for shape in report.added.values())
    assert trainable(after) == trainable(after.base_model.model)  # a second time changes nothing
    after(tokens(), labels=tokens()).loss.backward()
    with_gradient = [name for name, p in after.named_parameters() if p.grad is not None]
    assert any("lora" in name for name in with_gradient)
    assert any("residual" in name for name in with_gradient)
    trainable(after, only=True)
    assert all("residual" in name for name in learning(after))
    revert(after)
    assert agree(after, plain)


def test_two_adapters_have_a_residual_each():
    model = with_lora(base(), "one")
    trainable(model)
    stir(model, 0.3)
    expected = {"one": logits(model)}
    model.add_adapter("two", lora(modules_to_save=["residual"]))
    model.set_adapter("two")
    with torch.no_grad():
        conversion_of(model)[0].depth.residual.reads["3"].query.fill_(2.0)
    expected["two"] = logits(model)
    assert not torch.equal(*expected.values())
    for name, values in expected.items():
        model.set_adapter(name)
        assert torch.equal(logits(model), values)
    trainable(model, only=True)
    assert learning(model)
    assert all(".residual.modules_to_save.two." in name for name in learning(model))


def test_a_trained_copy_of_the_final_norm_is_the_one_that_computes():
    model = with_lora(base(), modules_to_save=["model.norm"])
    before = logits(model)
    weight = model.base_model.model.model.norm.modules_to_save["default"].weight
    with torch.no_grad():
        weight.mul_(2.0)
    torch.testing.assert_close(logits(model), 2 * before)
    model(tokens(), labels=tokens()).loss.backward()
    assert weight.grad.abs().max() > 0
