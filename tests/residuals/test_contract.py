"""Promises of every residual, whatever its formula.

Authors check the others for themselves (`check_residual`, which tests/analyze runs over every name).
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from tinymodels import DIM, gradients_of, inputs_of, model_of, tokens_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwater.analyze import check_residual
from headwater.residuals import build, names, record
from headwater.residuals.record import replay

# Options that decide which tensors a state or a layer has.
STATES = [
    "attnres-block:block=3,weights=sigmoid,window=2",
    "attnres-block:block=5,query=projected,key_norm=false,key_dim=8,heads=4",
    "attnres-full:weights=static,heads=2,window=3",
    "laurel:form=previous,states=3,rank=4",
    "denseformer:dilation=3,period=2",
    "deepcrossattention:version=v2,inputs=shared,last=2",
    "muddformer:norm=true",
    "mhc:streams=3,iterations=3,start=normal,final=learned,eps=1e-3,norm_eps=1e-6",
    "mhc:streams=2,final=mean",
    "identity-hc:streams=3,magnitude=1.5,start=normal",
    "gated-hc:streams=3,rank=5,start=normal",
    "hyper-connections:streams=1",
    "hyper-attnres:streams=3,form=static,block=5",
    "ddl:width=3,compress=channel,expand=token,value=linear,beta=0.5",
    "ddl:width=2,compress=token",
    "depth-window:window=3,width=5,maps=reader",
    "depth-window:maps=shared,window=2",
]
SPECS = [*names(), *STATES]


@pytest.mark.parametrize("spec", STATES)
def test_options_keep_the_contract(spec):
    assert not {check: fault for check, fault in check_residual(spec).items() if fault}


@pytest.mark.parametrize("spec", SPECS)
def test_activation_checkpointing_changes_nothing(spec):
    model, tokens = model_of(spec, scatter=True), tokens_of()
    logits, plain = gradients_of(model, tokens)
    for reentrant in (False, True):
        model.around = partial(checkpoint, use_reentrant=reentrant)
        again, recomputed = gradients_of(model, tokens)
        assert torch.equal(logits, again)
        assert_close(recomputed, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", names())
def test_one_seed_gives_every_residual_the_same_shared_weights(spec):
    model = model_of(spec)
    if model.residual.weight_gain != 1:
        pytest.skip("this method asks for smaller sublayer weights")
    weights = dict(model.named_parameters())
    for name, parameter in model_of("standard").named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("spec", SPECS)
def test_recording_changes_no_pass_and_leaves_no_trace(spec):
    model = model_of(spec, scatter=True)
    before, attributes = model(tokens_of()), set(model.residual.__dict__)
    with record(model.residual) as trace:
        during = model(tokens_of())
    lengths = {len(part) for part in (trace.sources, trace.reads, trace.weights)}
    assert lengths == {model.config.sublayers + 1}
    assert_close(during, before, atol=1e-5, rtol=1e-5)
    assert set(model.residual.__dict__) == attributes
    assert torch.equal(model(tokens_of()), before)


def tensors_of(residual):
    return dict((*residual.named_parameters(), *residual.named_buffers()))


@pytest.mark.parametrize("spec", SPECS)
def test_a_residual_born_on_meta_is_reset_to_its_start(spec):
    with torch.device("meta"):
        residual = build(spec, DIM, 8)
    residual.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in tensors_of(residual).values():
            tensor.fill_(float("nan"))
    torch.manual_seed(5)
    residual.reset_parameters()
    torch.manual_seed(5)
    fresh = build(spec, DIM, 8)
    assert_close(tensors_of(residual), tensors_of(fresh), rtol=0, atol=0)


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
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_bf16_reads_are_a_few_roundings_from_fp32(spec):
    """On the same bf16 sources: weights are computed in fp32, so only the stored state is rounded."""
    residual = model_of(spec, scatter=True).residual
    generator = torch.Generator().manual_seed(3)
    sources = torch.randn(residual.sublayers + 1, 2, 12, DIM, generator=generator)
    sources = sources.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = replay(residual, sources)
    for low, exact in zip(rounded, replay(residual, sources.float())):
        one, other = inputs_of(low)[0], inputs_of(exact)[0]
        assert (one.float() - other).norm() <= 0.02 * other.norm()
