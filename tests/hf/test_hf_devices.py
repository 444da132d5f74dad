"""Models spread over devices by accelerate: the state moves with the hidden states, parameters are where they are read.

Without a GPU, layers offloaded to memory and disk stand for numbers, and the meta device stands for a second device: it
computes shapes alone, and refuses operands of two devices as CUDA does.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from tinyhf import agree, converted, greedy, stir, tiny_model, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from headwater.hf import convert, revert, verify
from headwater.hf.convert.devices import execution_device
from headwater.residuals import attention, with_options
from headwater.residuals.two_phase import TwoPhase

accelerate = pytest.importorskip("accelerate")

RESIDUALS = [
    "attnres-block",
    "muddformer",
    "hyper-connections",
    "mhc-lite",
    "ddl:width=2,compress=token,expand=token",
]
residuals = pytest.mark.parametrize("residual", RESIDUALS)
GPU = torch.cuda.is_available()


def reference(residual):
    return converted(residual, amount=0.2)


def places(*layers, others="cpu", end=None, **names):
    """A device map: of the layers, of all others, and of the norm and the head."""
    device_map = {f"model.layers.{i}": place for i, place in enumerate(layers)}
    device_map |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), others)
    device_map |= dict.fromkeys(("model.norm", "lm_head"), others if end is None else end)
    return device_map | {f"model.{name}": place for name, place in names.items()}


def dispatch(model, device_map):
    """Dispatch without the hook of the whole, which sends the logits back: nothing comes back from meta."""
    accelerate.dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    accelerate.hooks.remove_hook_from_module(model)


def offload(model, device_map, folder):
    accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True
    )


@residuals
def test_parameters_are_placed_with_their_layers_and_reads_happen_there(residual):
    model = tiny_model("llama")
    dispatch(model, places("cpu", "cpu", "meta", "meta", end="meta"))
    convert(model, residual)
    for name, parameter in model.model.residual.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        assert parameter.device.type == ("cpu" if number < 4 else "meta"), name
    out = model(tokens(), use_cache=False, output_depth_weights=True)
    assert out.logits.device.type == "meta"
    assert [weights.device.type for weights in out.depth_weights] == ["cpu"] * 4 + ["meta"] * 5


@residuals
def test_parameters_on_another_device_than_their_layers_are_copied(residual):
    """A device map may put all of the residual on one device."""
    model = reference(residual)
    dispatch(model, places("cpu", "meta", "meta", "meta", end="meta", residual="cpu"))
    assert {p.device.type for p in model.model.residual.parameters()} <= {"cpu"}
    assert model(tokens(), use_cache=False).logits.device.type == "meta"


@pytest.mark.parametrize("residual", ["attnres-block:block=2", "attnres-full"])
def test_only_sources_go_to_another_device(residual, monkeypatch):
    """The tensors that kernels keep beside them stay: kernels may not run there."""
    model = reference(residual)
    inner = model.model.residual
    two_phase = TwoPhase(inner.sublayers, inner.block, inner.eps, backend="reference")
    reads, read = [], two_phase.read

    def seen(state, i, norm):
        reads.append((i, state[0].device.type))
        return read(state, i, norm)

    monkeypatch.setattr(inner, "two_phase", two_phase)
    monkeypatch.setattr(inner, "begin", lambda x: two_phase.begin(x, inner._folded(x.device)))
    monkeypatch.setattr(two_phase, "read", seen)
    assert agree(model, reference(residual))
    assert len(reads) == 9 * 6  # one pass, one before the cache, and four tokens from it
    dispatch(model, places("cpu", "cpu", "cpu", "meta", end="meta", residual="cpu"))
    reads.clear()
    assert model(tokens(), use_cache=False).logits.device.type == "meta"
    assert reads == [(i, "cpu") for i in range(6)]


@residuals
def test_offloaded_before_and_after_the_conversion(residual, tmp_path):
    expected = reference(residual)
    after = copy.deepcopy(expected)
    accelerate.cpu_offload(after, "cpu")
    assert all(p.is_meta for p in after.parameters())
    assert agree(after, expected)
    before = tiny_model("llama")
    offload(before, places("cpu", "disk", "cpu", "disk", others="disk"), tmp_path)
    convert(before, residual)
    stir(before, 0.2)
    assert not any(p.is_meta for p in before.model.residual.parameters())
    assert agree(before, expected)
    revert(before)
    assert agree(before, tiny_model("llama"))


@pytest.mark.parametrize("residual", ["attnres-block:block=3", "attnres-full"])
def test_a_residual_between_offloaded_layers_trains_as_one_by_one(residual, tmp_path, monkeypatch):
    """Its own parameters are not offloaded, so that it runs in two phases."""
    gradients, reads, read = [], [], TwoPhase.read

    def seen(self, *args):
        reads.append(1)
        return read(self, *args)

    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    monkeypatch.setattr(TwoPhase, "read", seen)
    for offloaded, schedule in ((True, "auto"), (False, "one-pass")):
        model = tiny_model("llama")
        if offloaded:
            offload(model, places("cpu", "disk", "cpu", "disk"), tmp_path)
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
    device_map = places("cpu", "disk", "cpu", "cpu", residual="disk")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "off"
    )
    assert agree(model, expected)
    assert torch.equal(greedy(model, tokens(1)), greedy(expected, tokens(1)))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert agree(again, expected)


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
    accelerate.dispatch_model(model, places(*[place] * 4, others=place), force_hooks=True)
    convert(model, "attnres-block:block=3")
    stir(model, 0.2)
    launches.clear()
    result = verify(model, expected, tokens())
    assert launches["merge"] > 0, dict(launches)
    assert result.kl < 1e-5, str(result)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU: layers on it and on the CPU")
@residuals
def test_a_gpu_and_offloaded_layers(residual, tmp_path):
    expected = reference(residual).to("cuda")
    expected.save_pretrained(tmp_path / "saved")
    device_map = places(0, "cpu", 0, "disk", others=0)
    offloaded = tiny_model("llama")
    accelerate.dispatch_model(offloaded, device_map, offload_dir=tmp_path)
    convert(offloaded, residual)
    stir(offloaded, 0.2)
    # Layers on both devices compute where they are. The model is made last: what a conversion draws follows its seed.
    split = tiny_model("llama")
    on_both = places(0, 0, "cpu", "cpu", others=0, end="cpu")
    accelerate.dispatch_model(split, on_both, main_device="cpu", force_hooks=True)
    convert(split, residual)
    stir(split, 0.2)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map={**device_map, "model.residual": "cpu"},
        offload_folder=tmp_path / "off",
    )
    for model in (offloaded, loaded, split):
        result = verify(model, expected, tokens())
        assert result.kl < 1e-5, str(result)
