"""Promises of every registered residual, whatever its formula."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from tinymodels import DIM, gradients_of, model_of, tokens_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from headwater.generation.generate import generate
from headwater.models import Decoder
from headwater.residuals import build, mixing, names, record
from headwater.residuals.record import replay

# Options crossed: each value of each option is there, beside several values of the others.
OPTIONS = [
    "attnres-block:block=3",  # the last block is partial
    "attnres-block:block=8,query=projected,key_norm=false,key_dim=8",  # one block
    "attnres-block:block=3,key_norm=false,window=1,scale=width,start=0.5",
    "attnres-block:block=3,weights=sigmoid,window=2,key_weight=false,scale=root",
    "attnres-block:block=2,scale=gain,key_weight=false,heads=4",
    "attnres-full:query=projected,weights=sigmoid,heads=4,key_dim=8",
    "attnres-full:weights=static,heads=2,window=3",
    "attnres-full:weights=static",
    "highway:gate=channel,start=carry",
    "laurel:form=previous,states=3,rank=4",
    "laurel:form=weighted-low-rank,rank=4",
    "denseformer:dilation=3,period=2",
    "elc-bert:variant=weighted-output",
    "deepcrossattention:version=v1,last=1",
    "deepcrossattention:version=v2,inputs=shared,last=2",
    "muddformer:norm=true",
    "hyper-connections:streams=2,form=static",
    "hyper-connections:streams=1",
    "hyper-attnres:streams=1,form=static,block=3",
    "mhc:streams=2,iterations=3,start=uniform",
    "mhc-lite:streams=3,start=biased",
    "ddl:width=3,compress=channel,expand=token,value=linear,beta=0.5",
    "ddl:width=2,compress=token",
    "depth-window:window=2,width=5,maps=reader",
    "depth-window:maps=shared,window=3",
    "delta-attnres:block=3",
]
SPECS = [*names(), *OPTIONS]
# The options that decide which tensors a state has.
CHANGING = ("block=", "window=", "form=previous", "dilation=", "last=", "width=", "maps=")
STATES = [*names(), *(spec for spec in OPTIONS if any(word in spec for word in CHANGING))]


@cache
def plain_start():
    """A model with the plain residual at its start, its logits and its gradients; nobody changes them."""
    model = model_of("standard")
    return model, *gradients_of(model, tokens_of())


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_reach_every_parameter(spec):
    logits, gradients = gradients_of(model_of(spec, scatter=True), tokens_of())
    assert logits.isfinite().all()
    silent = [
        name
        for name, g in gradients.items()
        if g is None or not g.isfinite().all() or g.abs().max() == 0
    ]
    assert not silent


@pytest.mark.parametrize("spec", STATES)
def test_activation_checkpointing_changes_nothing(spec):
    model, tokens = model_of(spec, scatter=True), tokens_of()
    logits, plain = gradients_of(model, tokens)
    for reentrant in (False, True):
        model.around = partial(checkpoint, use_reentrant=reentrant)
        again, recomputed = gradients_of(model, tokens)
        assert torch.equal(logits, again)
        for name, gradient in plain.items():
            torch.testing.assert_close(recomputed[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("spec", names())
def test_saved_and_loaded_is_the_same_model(spec, tmp_path):
    model, tokens = model_of(spec, scatter=True), tokens_of()
    model.save(tmp_path)
    assert torch.equal(Decoder.load(tmp_path)(tokens), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize("spec", STATES)
def test_decoding_with_a_cache_equals_decoding_without(spec):
    """Portions have the logits of a single pass; of tokens that follow one by one, each is the likeliest there too."""
    model, prompt = model_of(spec, scatter=True), tokens_of(batch=2, length=5)
    text = generate(model, prompt, 8, temperature=0.0)
    whole, cache = model(text), model.new_cache(len(text))
    assert torch.equal(whole[:, 4:-1].argmax(-1), text[:, 5:])
    portions = torch.cat([model(part, cache) for part in text.split([5, 1, 1, 6], 1)], 1)
    torch.testing.assert_close(portions, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", names())
def test_one_seed_gives_every_residual_the_same_shared_weights(spec):
    model = model_of(spec)
    if model.residual.weight_gain != 1:
        pytest.skip("this method asks for smaller sublayer weights")
    weights = dict(model.named_parameters())
    for name, parameter in plain_start()[0].named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("spec", SPECS)
def test_it_starts_as_it_says(spec):
    (plain, expected, shared), model = plain_start(), model_of(spec)
    model.load_state_dict(plain.state_dict(), strict=False)
    logits, gradients = gradients_of(model, tokens_of())
    distance = (logits - expected).abs().max()
    if model.residual.at_start == "different":
        assert distance > 1e-3
        return
    assert distance <= (1e-6 if model.residual.at_start == "exact" else 1e-4)
    for name, gradient in shared.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("spec", SPECS)
def test_the_mixing_matrix_gives_back_the_reads(spec):
    model = model_of(spec, scatter=True)
    with torch.no_grad(), record(model.residual) as trace:
        model(tokens_of())
    assert (
        len(trace.sources) == len(trace.reads) == len(trace.weights) == model.config.sublayers + 1
    )
    matrix = mixing(model.residual, trace.sources)
    assert matrix.movedim((0, 1), (-2, -1)).triu(1).abs().max() == 0
    if not model.residual.scalar_mixing:
        pytest.skip("mixing differs between channels: the matrix is their average")
    for row, read in zip(matrix, trace.reads):
        mixed = torch.einsum("n...,n...d->...d", row, torch.stack(trace.sources))
        torch.testing.assert_close(
            mixed, read[0] if isinstance(read, tuple) else read, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("spec", STATES)
def test_recording_leaves_no_trace(spec):
    model = model_of(spec, scatter=True)
    before, keys = model(tokens_of()), set(model.residual.__dict__)
    with record(model.residual):
        during = model(tokens_of())
    torch.testing.assert_close(during, before, atol=1e-5, rtol=1e-5)
    assert set(model.residual.__dict__) == keys
    assert torch.equal(model(tokens_of()), before)


@torch.no_grad()  # only leaves of a graph can be deep-copied
@pytest.mark.parametrize("spec", STATES)
def test_state_is_a_value(spec):
    """Two interleaved passes do not disturb each other, and a state can be kept and used again."""
    residual = build(spec, DIM, 8)
    torch.manual_seed(0)
    for p in residual.parameters():
        torch.nn.init.normal_(p, std=0.3)
    one, two = (list(torch.randn(9, 2, 3, DIM)) for _ in range(2))

    def run(sources):
        state = residual.begin(sources[0])
        for i, y in enumerate(sources[1:]):
            _, state = residual.read(state, i)
            state = residual.write(state, i, y)
        return state

    alone = residual.end(run(one))
    first, second = residual.begin(one[0]), residual.begin(two[0])
    for i in range(8):
        _, first = residual.read(first, i)
        _, second = residual.read(second, i)
        second = residual.write(second, i, two[i + 1])
        first = residual.write(first, i, one[i + 1])
    assert all(isinstance(t, torch.Tensor) for t in first)
    assert torch.equal(residual.end(first), alone)
    assert torch.equal(residual.end(first), alone)
    assert torch.equal(residual.end(copy.deepcopy(first)), alone)


@pytest.mark.parametrize("spec", SPECS)
def test_a_residual_born_on_meta_is_reset_to_its_start(spec):
    with torch.device("meta"):
        residual = build(spec, DIM, 8)
    residual.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*residual.parameters(), *residual.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(5)
    residual.reset_parameters()
    torch.manual_seed(5)
    fresh = build(spec, DIM, 8)
    values = [dict((*r.named_parameters(), *r.named_buffers())) for r in (residual, fresh)]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_a_stage_and_a_sharded_residual_are_reset_too():
    """FSDP2 over a group of one; a stage lacks the parameters of other sublayers."""
    fresh, stage, sharded = (build("mhc:streams=2", DIM, 4) for _ in range(3))
    stage.keep_only(1, 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for residual in (stage, sharded):
            for parameter in residual.parameters():
                torch.nn.init.constant_(parameter, 3.0)
            residual.reset_parameters()
        for name, parameter in sharded.named_parameters():
            assert torch.equal(parameter.full_tensor(), fresh.get_parameter(name))
        assert [*stage.mappings] == ["1", "2"]
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, fresh.get_parameter(name))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("spec", names())
def test_bf16_autocast_trains(spec):
    model, tokens = model_of(spec, scatter=True), tokens_of()
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients = gradients_of(model, tokens)
    assert logits.isfinite().all()
    assert all(g is not None and g.isfinite().all() for g in gradients.values())


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_bf16_reads_are_a_few_roundings_from_fp32(spec):
    """On the same bf16 sources: weights are computed in fp32 inside, so only the stored state is rounded."""
    residual = model_of(spec, scatter=True).residual
    generator = torch.Generator().manual_seed(3)
    sources = [
        torch.randn(2, 12, DIM, generator=generator).bfloat16()
        for _ in range(residual.sublayers + 1)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = replay(residual, sources)
    for low, exact in zip(rounded, replay(residual, [source.float() for source in sources])):
        low, exact = (read[0] if isinstance(read, tuple) else read for read in (low, exact))
        assert (low.float() - exact).norm() <= 0.02 * exact.norm()
