"""Models spread over devices by accelerate: the state moves with the hidden states, parameters are where they are read.

Without a GPU, layers offloaded to memory and disk stand for numbers, and the meta device stands for a second device: it
computes shapes alone, and refuses operands of two devices as CUDA does.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from tinyhf import stir, tiny_model, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from headwater.hf import convert, revert, verify
from headwater.hf.convert.devices import execution_device
from headwater.residuals import attention, with_options
from headwater.residuals.two_phase import TwoPhase

accelerate = pytest.importorskip("accelerate")

EVERYWHERE = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
RESIDUALS = [
    "attnres-block",
    "muddformer",
    "hyper-connections",
    "mhc-lite",
    "ddl:width=2,compress=token,expand=token",
]
GPU = torch.cuda.is_available()


def reference(residual):
    model = tiny_model("llama")
    convert(model, residual)
    stir(model, 0.2)
    return model


def layers(*places):
    return {f"model.layers.{i}": place for i, place in enumerate(places)}


def dispatch(model, places):
    """Without the hook of the whole, which sends the logits back: nothing comes back from the meta device."""
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    accelerate.hooks.remove_hook_from_module(model)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_parameters_are_placed_with_their_layers_and_reads_happen_there(residual):
    model = tiny_model("llama")
    places = layers("cpu", "cpu", "meta", "meta") | dict.fromkeys(EVERYWHERE, "cpu")
    places |= {"model.norm": "meta", "lm_head": "meta"}
    dispatch(model, places)
    convert(model, residual)
    for name, parameter in model.model.residual.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        assert parameter.device.type == ("cpu" if number < 4 else "meta"), name
    out = model(tokens(), use_cache=False, output_depth_weights=True)
    assert out.logits.device.type == "meta"
    assert [weights.device.type for weights in out.depth_weights] == ["cpu"] * 4 + ["meta"] * 5


@pytest.mark.parametrize("residual", RESIDUALS)
def test_parameters_on_another_device_than_their_layers_are_copied(residual):
    """As a device map of one's own may have it: all of the residual on one device."""
    model = reference(residual)
    places = layers("cpu", "meta", "meta", "meta") | dict.fromkeys(EVERYWHERE, "cpu")
    places |= {"model.norm": "meta", "lm_head": "meta", "model.residual": "cpu"}
    dispatch(model, places)
    assert {p.device.type for p in model.model.residual.parameters()} <= {"cpu"}
    assert model(tokens(), use_cache=False).logits.device.type == "meta"


@pytest.mark.parametrize("residual", ["attnres-block:block=2", "attnres-full"])
def test_only_sources_go_to_another_device(residual, monkeypatch):
    """What the kernels keep beside them stays: they may not run there."""
    model = reference(residual)
    inner = model.model.residual
    two_phase = TwoPhase(inner.sublayers, inner.block, inner.eps, backend="reference")
    monkeypatch.setattr(inner, "two_phase", two_phase)
    monkeypatch.setattr(inner, "begin", lambda x: two_phase.begin(x, inner._folded(x.device)))
    seen = []
    read = two_phase.read
    monkeypatch.setattr(
        two_phase,
        "read",
        lambda state, i, norm: seen.append((i, state[0].device.type)) or read(state, i, norm),
    )
    assert verify(model, reference(residual), tokens()).equal
    assert len(seen) == 9 * 6  # one pass, one before the cache, and four tokens from it
    places = layers("cpu", "cpu", "cpu", "meta") | dict.fromkeys(EVERYWHERE, "cpu")
    dispatch(model, places | {"model.norm": "meta", "lm_head": "meta", "model.residual": "cpu"})
    seen.clear()
    assert model(tokens(), use_cache=False).logits.device.type == "meta"
    assert seen == [(i, "cpu") for i in range(6)]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_offloaded_before_and_after_the_conversion(residual, tmp_path):
    expected = reference(residual)
    after = copy.deepcopy(expected)
    accelerate.cpu_offload(after, "cpu")
    assert all(p.is_meta for p in after.parameters())
    assert verify(after, expected, tokens()).equal
    before = tiny_model("llama")
    places = layers("cpu", "disk", "cpu", "disk") | dict.fromkeys(EVERYWHERE, "disk")
    accelerate.dispatch_model(
        before, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    convert(before, residual)
    stir(before, 0.2)
    assert not any(p.is_meta for p in before.model.residual.parameters())
    assert verify(before, expected, tokens()).equal
    revert(before)
    assert verify(before, tiny_model("llama"), tokens()).equal


@pytest.mark.parametrize("residual", ["attnres-block:block=3", "attnres-full"])
def test_a_residual_between_offloaded_layers_trains_as_one_by_one(residual, tmp_path, monkeypatch):
    """In two phases: its own parameters are not offloaded."""
    gradients, reads = [], []
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    read = TwoPhase.read
    monkeypatch.setattr(
        TwoPhase, "read", lambda self, *args: (reads.append(1), read(self, *args))[1]
    )
    for offload, schedule in ((True, "auto"), (False, "one-pass")):
        model = tiny_model("llama")
        places = layers("cpu", "disk", "cpu", "disk") | dict.fromkeys(EVERYWHERE, "cpu")
        if offload:
            accelerate.dispatch_model(
                model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
            )
        convert(model, with_options(residual, schedule=schedule))
        stir(model, 0.2)
        model(tokens(), use_cache=False, labels=tokens()).loss.backward()
        gradients.append({name: p.grad for name, p in model.model.residual.named_parameters()})
    assert len(reads) == 9
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_a_saved_model_loads_with_a_device_map(tmp_path):
    expected = reference("attnres-block")
    expected.save_pretrained(tmp_path / "saved")
    places = (
        layers("cpu", "disk", "cpu", "cpu")
        | dict.fromkeys(EVERYWHERE, "cpu")
        | {"model.residual": "disk"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "off"
    )
    assert verify(model, expected, tokens()).equal
    written = model.generate(tokens(1), do_sample=False, max_new_tokens=8)
    assert torch.equal(written, expected.generate(tokens(1), do_sample=False, max_new_tokens=8))
    model.save_pretrained(tmp_path / "again")
    assert verify(
        AutoModelForCausalLM.from_pretrained(tmp_path / "again"), expected, tokens()
    ).equal


@pytest.mark.parametrize("place", ["cuda", 0, torch.device("cuda")])
def test_a_hook_s_device_is_the_one_that_tensors_name(place):
    """Fake tensors are on a GPU where there is none."""
    layer = torch.nn.Identity()
    layer.__dict__["_hf_hook"] = SimpleNamespace(execution_device=place)
    with FakeTensorMode():
        assert execution_device(layer, torch.device("cpu")) == torch.ones(1, device="cuda").device


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("place", ["cuda", 0])
def test_hooked_layers_on_one_gpu_hand_on_what_the_kernels_keep(place):
    from headwater.ops.triton.launch import launches

    model, expected = tiny_model("llama"), reference("attnres-block:block=3")
    accelerate.dispatch_model(
        model, layers(*[place] * 4) | dict.fromkeys(EVERYWHERE, place), force_hooks=True
    )
    convert(model, "attnres-block:block=3")
    stir(model, 0.2)
    launches.clear()
    result = verify(model, expected, tokens())
    assert launches["merge"] > 0, dict(launches)
    assert result.kl < 1e-5, str(result)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: layers on it and on the CPU")
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_gpu_and_offloaded_layers(residual, tmp_path):
    expected = reference(residual).to("cuda")
    model = tiny_model("llama")
    places = layers(0, "cpu", 0, "disk") | dict.fromkeys(EVERYWHERE, 0)
    accelerate.dispatch_model(model, places, offload_dir=tmp_path)
    convert(model, residual)
    stir(model, 0.2)
    result = verify(model, expected, tokens())
    assert result.kl < 1e-5, str(result)
    expected.save_pretrained(tmp_path / "saved")
    places |= {"model.residual": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "off"
    )
    assert verify(loaded, expected, tokens()).kl < 1e-5
    on_both = layers(0, 0, "cpu", "cpu") | dict.fromkeys(EVERYWHERE, 0)
    on_both |= {"model.norm": "cpu", "lm_head": "cpu"}
    split = tiny_model("llama")
    accelerate.dispatch_model(
        split, on_both, main_device="cpu", force_hooks=True
    )  # they compute where they are
    convert(split, residual)
    stir(split, 0.2)
    assert verify(split, expected, tokens()).kl < 1e-5
