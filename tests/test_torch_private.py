"""Each private part of PyTorch equals its public way, and without it that way is taken.

`make test-torch` runs this with the oldest release: when a part changes its meaning, it fails here first.
"""

import dataclasses
import importlib
import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headwater import _torch
from headwater.analyze import table
from headwater.models import ModelConfig
from headwater.train.distributed.plan import footprint
from headwater.train.distributed.stages import trace_states

SHAPE = {
    "vocab_size": 13,
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "mlp_dim": 24,
    "context": 8,
}


def loaded_again(module):
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def loaded_without(*paths):
    """A second copy of the file, read in a PyTorch that lacks these; it lacks them only meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            owner, _, name = path.rpartition(".")
            patch.delattr(importlib.import_module(owner), name, raising=False)
        return loaded_again(_torch)


@pytest.fixture
def hidden(monkeypatch):
    """Nothing private is found by those who look for it at each call."""
    monkeypatch.setattr(_torch, "find", lambda path: None)


def test_what_is_missing_is_none():
    assert _torch.find("torch._C._no_such_part") is None
    assert _torch.find("torch._no_such_module.part") is None
    assert _torch.find("torch.optim.Muon") is torch.optim.Muon


def test_every_private_part_is_there_in_this_release():
    """Not one is missing in silence on the releases that we test, but for CUDA's in a build without."""
    actual = (
        _torch._transforms_active,
        _torch._dispatch_mode,
        _torch._foreach_mul_,
        _torch._foreach_norm,
    )
    assert None not in (*actual, _torch._functional, _torch._use_count)
    assert _torch.TorchDispatchMode is not _torch._FunctionMode
    for path in (
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.optim._muon._zeropower_via_newtonschulz",
        "torch.nn.modules.module._has_any_global_hook",
    ):
        assert _torch.find(path) is not None, path
    assert (_torch.current_stream is _torch._public_stream) == (torch.version.cuda is None)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_apply():
    other = loaded_without("torch._C._are_functorch_transforms_active")
    assert other._transforms_active is None
    assert (
        torch.vmap(lambda x: x + _torch.transformed() + 2 * other.transformed())(
            torch.zeros(1)
        ).item()
        == 1
    )
    for apply in (_torch.apply, other.apply):
        x = torch.ones(3, requires_grad=True)
        out = apply(Doubled, x)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((3,), 2.0))
    # Not past functorch, which would be wrong
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: _torch.apply(Doubled, x).sum())(torch.ones(3))


def test_hooked():
    other, module, hook = (
        loaded_without("torch.nn.modules.module._has_any_global_hook"),
        torch.nn.Identity(),
        print,
    )
    assert not _torch.hooked(module)
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    assert _torch.hooked(module)
    assert not other.hooked(module)
    handle.remove()
    module.register_forward_pre_hook(hook)
    assert _torch.hooked(module)
    assert other.hooked(module)


class Alone(Doubled):
    found = None

    @staticmethod
    def backward(ctx, gradient):
        Alone.found = [module.alone(gradient) for module in (_torch, Alone.without)]
        return gradient


def test_alone():
    """Without a count somebody else may have it."""
    Alone.without = loaded_again(_torch)
    Alone.without._use_count = None
    x = torch.ones(3, requires_grad=True)
    for options, expected in ((False, [True, False]), (True, [False, False])):
        middle = Alone.apply(x)
        torch.autograd.grad(Doubled.apply(middle).sum(), [middle, x] if options else x)
        assert Alone.found == expected


def test_traced():
    assert not _torch.traced()
    with _torch.without_data():
        assert _torch.traced()
    assert loaded_without("torch.utils._python_dispatch._get_current_dispatch_mode").traced()
    assert (
        torch.compile(lambda x: x + _torch.traced(), backend="eager", fullgraph=True)(
            torch.zeros(1)
        ).item()
        == 1
    )


@pytest.mark.parametrize(
    "spec", ["attnres-block", "standard", "attnres-block:weights=sigmoid,key_norm=False"]
)
def test_the_table_of_residuals_without_dispatch_modes(spec, monkeypatch):
    other = loaded_without("torch.utils._python_dispatch.TorchDispatchMode")
    assert other.TorchDispatchMode is other._FunctionMode
    monkeypatch.setitem(sys.modules, "headwater._torch", other)
    monkeypatch.setattr("headwater._torch", other)
    # Where its dataclass looks itself up
    monkeypatch.setitem(sys.modules, f"{table.__name__}_again", table)
    (expected,), (row,) = (
        those.residual_table([spec], dim=32, layers=2) for those in (table, loaded_again(table))
    )
    assert dataclasses.astuple(row) == dataclasses.astuple(expected)


def test_tree_leaves():
    leaves = [torch.ones(1), 2, None, "3"]
    assert list(_torch.tree_leaves(({"a": leaves[:2]}, [(), leaves[2]], leaves[3]))) == leaves


@pytest.mark.parametrize("half", [False, True])
def test_states_and_footprints_without_fake_tensors(half, monkeypatch):
    config = ModelConfig(**SHAPE, residual="attnres-block:block=2")

    def found():
        saved = footprint(config, 2, half=half, fused=True)
        sizes = [sorted(these.values()) for these in saved.kept]  # by storage, whose numbers differ
        return trace_states(config, 2, 8, torch.device("cpu")), saved.states, sizes

    expected = found()
    monkeypatch.setattr(_torch, "find", lambda path: None)
    assert found() == expected


def test_storage_key():
    with _torch.without_data():
        x = torch.ones(4)
        assert (
            _torch.storage_key(x) == _torch.storage_key(x[1:]) != _torch.storage_key(torch.ones(4))
        )


def test_many_tensors_at_once():
    other = loaded_without("torch._foreach_mul_", "torch._foreach_norm")
    assert other._foreach_mul_ is other._foreach_norm is None
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (1, 17, 1000)]
    for value, its in zip(_torch.norms_of(tensors), other.norms_of(tensors), strict=True):
        assert torch.equal(value, its)
    scaled = [[t.clone() for t in tensors] for _ in range(2)]
    for module, those in zip((_torch, other), scaled):
        module.scale_all_(those, 0.3)
        module.scale_all_([], 0.3)
    for value, its, t in zip(*scaled, tensors):
        assert torch.equal(value, its)
        assert torch.equal(value, 0.3 * t)


def test_device_and_stream_without_private_ways():
    other = loaded_without("torch._C._cuda_getDevice", "torch._C._cuda_getCurrentRawStream")
    assert other.current_device is torch.cuda.current_device
    assert other.current_stream is other._public_stream
    if torch.cuda.is_available():
        with torch.cuda.stream(torch.cuda.Stream()):
            assert _torch.current_device() == other.current_device()
            assert _torch.current_stream(0) == other.current_stream(0) != 0


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_muons_iteration_without_the_private_one(shape, hidden):
    torch.manual_seed(0)
    matrix, options = torch.randn(shape).bfloat16(), ((3.4445, -4.775, 2.0315), 5, 1e-7)
    before = matrix.clone()
    values = _torch.newton_schulz(matrix, *options)
    assert torch.equal(matrix, before)
    assert torch.equal(
        values, torch.optim._muon._zeropower_via_newtonschulz(matrix.clone(), *options)
    )


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("kind", [None, "original", "match_rms_adamw"])
def test_muons_rate_is_what_its_documentation_says(shape, kind):
    """A whole step, from the outside: minus the rate times the orthogonalised gradient."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    options = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
    direction = _torch.newton_schulz(weight.grad, *options.values())
    rate = _torch.adjusted_rate(0.02, kind, shape)
    expected = torch.zeros(shape).add_(direction, alpha=-rate)
    torch.optim.Muon(
        [weight], lr=0.02, weight_decay=0, momentum=0, nesterov=False, adjust_lr_fn=kind, **options
    ).step()
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_leave_a_step_out_where_they_are_told_to(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, bad = kind([weight], lr=0.1, fused=True), torch.ones(())
    _torch.skip_where(optimizer, bad)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    bad.zero_()
    optimizer.step()
    assert (weight < 1).all()


def on_two_ranks():
    dist.init_process_group("gloo")
    rank, functional, find = dist.get_rank(), _torch._functional, _torch.find
    mesh = init_device_mesh("cpu", (2,))
    name = _torch.group_name(mesh.get_group())
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    results = []
    for _torch._functional in (functional, None):
        results.append(
            (
                _torch.all_gather(x, 2, name),
                _torch.reduce_scatter(x, 2, name),
                _torch.all_reduce(x, name),
            )
        )
    (gathered, reduced, summed), (slow_gathered, slow_reduced, slow_summed) = results
    assert torch.equal(
        gathered, torch.cat([torch.arange(6.0).view(2, 3) + 10 * r for r in range(2)])
    )
    assert torch.equal(reduced, torch.arange(6.0).view(2, 3)[rank : rank + 1] * 2 + 10)
    assert torch.equal(gathered, slow_gathered)
    assert torch.equal(reduced, slow_reduced)
    assert torch.equal(summed, torch.arange(6.0).view(2, 3) * 2 + 10)
    assert torch.equal(summed, slow_summed)
    assert torch.equal(x, torch.arange(6.0).view(2, 3) + 10 * rank)  # as it was
    for length in (1, 4, 5):  # 1: one rank has nothing
        whole = torch.arange(length * 3.0).view(length, 3)
        for placement in (Shard(0), Shard(1), Replicate()):
            part: DTensor = distribute_tensor(whole, mesh, [placement])
            for _torch.find in (find, lambda path: None):
                assert torch.equal(whole[_torch.local_rectangle(part)], part.to_local())


def test_collectives_and_parts_on_two_ranks():
    spawn(2, on_two_ranks)


def test_a_part_that_cannot_be_worked_out_is_refused(hidden):
    class Strided(Shard):
        pass

    class Divided:
        shape, placements = torch.Size([4]), (Strided(0),)

        class device_mesh:
            shape = (2,)
            get_coordinate = staticmethod(lambda: [0])

    with pytest.raises(NotImplementedError, match="Strided"):
        _torch.local_rectangle(Divided())
