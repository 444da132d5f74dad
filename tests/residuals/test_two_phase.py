"""The two-phase schedule on its references: the same network as with one pass per read, on any device."""

import copy
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from tinymodels import model_of
from tinymodels import scattered as scattered_residual
from torch.utils.checkpoint import checkpoint

from headwater.generation.generate import generate
from headwater.models.norm import RMSNorm
from headwater.residuals import AttentionResidual, attention, build, record, with_options
from headwater.residuals.record import replay

# 3: the last block is partial
SPECS = ["attnres-block:block=3", "attnres-block:block=8", "attnres-full"]


scattered = partial(scattered_residual, scale=0.3)


def phased(spec):
    return with_options(spec, schedule="two-phase", backend="reference")


def one_by_one(spec):
    return with_options(spec, schedule="one-pass")


def models_of(spec, other=phased):
    """The same weights twice: read by read, and in two phases."""
    shape = {"dim": 24, "layers": 5, "mlp_dim": 32}
    one = model_of(one_by_one(spec), scatter=True, **shape)
    two = model_of(other(spec), **shape)
    two.load_weights(one.weights())
    assert len(two.residual.begin(torch.zeros(2, 24))) > 1
    return one, two


def results_of(model, tokens):
    model.zero_grad()
    logits = model(tokens)
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("other", [phased, str], ids=["by name", "by default"])
def test_it_is_the_same_network(spec, other, monkeypatch):
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    (one, two), tokens = models_of(spec, other), torch.randint(0, 40, (2, 7))
    for value, other in zip(results_of(two, tokens), results_of(one, tokens), strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-4)
    text = generate(one, tokens, 9, temperature=0.0)
    assert torch.equal(generate(two, tokens, 9, temperature=0.0), text)


@pytest.mark.parametrize("spec", SPECS)
def test_a_record_shows_the_same_reads_and_weights(spec):
    models, tokens, traces = models_of(spec), torch.randint(0, 40, (1, 5)), []
    for model in models:
        with torch.no_grad(), record(model.residual) as trace:
            model(tokens)
        traces.append(trace)
    one, two = traces
    for value, other in zip([*two.reads, *two.weights], [*one.reads, *one.weights], strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-4)


def drive(residual, state, start, stop, outputs):
    for i in range(start, stop):
        x, state = residual.read(state, i)
        state = residual.write(state, i, outputs[i + 1] + x.tanh())
    return state


@pytest.mark.parametrize("spec", SPECS)
def test_a_settled_state_can_be_read_on(spec):
    residual, outputs = scattered(phased(spec), sublayers=10), torch.randn(11, 2, 16)
    whole = residual.end(drive(residual, residual.begin(outputs[0]), 0, 10, outputs))
    for i in range(10):
        state = residual.settle(drive(residual, residual.begin(outputs[0]), 0, i, outputs), i)
        assert len(state) == residual.num_sources(i)
        end = residual.end(drive(residual, state, i, 10, outputs))
        torch.testing.assert_close(end, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", [*SPECS, "attnres-block:block=1"])
def test_stages_with_their_own_queries_do_what_the_whole_does(spec):
    """Every pair of cuts: inside a block, between two, before the last sublayer. Values, and the gradient of every
    parameter and source."""
    sublayers = 10
    whole, outputs = (
        scattered(one_by_one(spec), sublayers=sublayers),
        torch.randn(sublayers + 1, 2, 16),
    )
    leaves = [o.requires_grad_() for o in outputs.unbind(0)]
    end = whole.end(drive(whole, whole.begin(leaves[0]), 0, sublayers, leaves))
    desired = torch.autograd.grad(end.square().sum(), [*leaves, *whole.parameters()])
    names = [name for name, _ in whole.named_parameters()]
    blank = scattered(phased(spec), sublayers=sublayers)
    for cuts in combinations(range(1, sublayers), 2):
        stages, state = [], None
        for start, stop in pairwise((0, *cuts, sublayers)):
            stage = copy.deepcopy(blank)
            stage.keep_only(start, stop)
            state = stage.adopt(state, start) if start else stage.begin(leaves[0])
            assert stage.two_phase.holds(state, "read", start), "the stage runs in two phases"
            state = drive(stage, state, start, stop, leaves)
            stages.append(stage)
            state = state if stop == sublayers else stage.settle(state, stop)
        last = stages[-1].end(state)
        torch.testing.assert_close(last, end, atol=1e-5, rtol=1e-4)
        references = {name: p for stage in stages for name, p in stage.named_parameters()}
        assert references.keys() == set(names)
        actual = torch.autograd.grad(
            last.square().sum(), [*leaves, *(references[name] for name in names)]
        )
        for value, other in zip(actual, desired, strict=True):
            torch.testing.assert_close(value, other, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_a_cpu_takes_two_phases_to_train_in_fp32(spec):
    """Elsewhere its sources alone are the state: reads are made one by one."""

    def phases(dtype=torch.float32, tokens=4096, **options):
        x = torch.zeros(tokens, 16, dtype=dtype)
        residual = build(with_options(spec, **options), 16, 10)
        state = residual.begin(x)
        state = residual.write(residual.read(state, 0)[1], 0, x)
        return residual.two_phase is not None and residual.two_phase.holds(state, "read", 1)

    assert phases()
    assert phases(backend="reference")
    assert not phases(tokens=2048)
    assert not phases(schedule="one-pass")
    assert not phases(window=2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert not phases(dtype)
    with torch.no_grad():
        assert not phases()
        assert phases(schedule="two-phase", backend="reference")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_what_begins_may_be_recomputed(spec, inside, monkeypatch):
    """The first pass of re-entrant checkpointing has no gradients; its state is that of the second, which has some."""
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    residual, outputs = scattered(spec, sublayers=10), torch.randn(11, 2, 16)

    def begin(x):
        return tuple(drive(residual, residual.begin(x), 0, inside, outputs))

    def results(around):
        residual.zero_grad()
        x = torch.ones(2, 16, requires_grad=True)
        state = around(begin, x * outputs[0])
        assert len(state) > 1
        end = residual.end(drive(residual, state, inside, 10, outputs))
        end.square().sum().backward()
        return [end, x.grad, *(parameter.grad for parameter in residual.parameters())]

    desired = results(lambda function, x: function(x))
    for reentrant in (False, True):
        assert all(map(torch.equal, results(partial(checkpoint, use_reentrant=reentrant)), desired))


@pytest.mark.parametrize("spec", SPECS)
def test_a_compiled_pass_reads_one_by_one(spec):
    residual = build(spec, 16, 10)
    assert (
        len(torch.compile(residual.begin, backend="eager", fullgraph=True)(torch.zeros(4096, 16)))
        == 1
    )
    assert len(residual.begin(torch.zeros(4096, 16))) > 1


class Centred(torch.nn.RMSNorm):
    """One of the user's own, whose weight is around zero."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


@pytest.mark.parametrize("kind", [Centred, torch.nn.RMSNorm])
@pytest.mark.parametrize("spec", SPECS)
def test_over_the_plain_operators_a_norm_is_called(spec, kind, monkeypatch):
    """It is called as in reads one by one: with its class's forward or its own."""
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    norm, noted, outputs = kind(16, eps=1e-6), [], torch.randn(11, 2, 16)
    norm.forward = lambda x, forward=norm.forward: noted.append(1) or forward(x)
    results = []
    for residual in (scattered(one_by_one(spec), sublayers=10), scattered(spec, sublayers=10)):
        state = residual.begin(outputs[0])
        for i in range(10):
            assert not residual.folds_norm(state, i)
            x, state = residual.read(state, i, norm=norm)
            state = residual.write(state, i, x * outputs[i + 1])
        results.append(residual.end(state, norm=norm))
    assert len(noted) == 22
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["attnres-block:block=3", "attnres-full"])
@pytest.mark.parametrize("folds", [False, True])
def test_a_kernel_takes_no_norm_with_a_forward_of_its_own(spec, folds):
    """Unless its class says that weight and eps are all there is to it."""
    pytest.importorskip("triton", reason="the kernels need triton")
    norm, outputs = type("Mine", (Centred,), {"folds": folds})(16, eps=1e-6), torch.randn(5, 2, 16)
    results = []
    for options in ({"schedule": "one-pass"}, {"backend": "triton"}):
        residual = scattered(with_options(spec, **options), sublayers=4)
        state = residual.begin(outputs[0])
        for i in range(4):
            _, state = residual.read(state, i, norm=norm)
            state = residual.write(state, i, outputs[i + 1])
        results.append(residual.end(state, norm=norm))
    assert torch.allclose(*results, atol=1e-4, rtol=1e-3) != folds


@torch.no_grad()
@pytest.mark.parametrize("spec", ["attnres-block:block=3", "attnres-full"])
@pytest.mark.parametrize("hook", ["", "forward_pre_", "full_backward_", "module_forward_"])
def test_the_decoders_norm_is_folded_as_torchs_is_and_none_with_hooks(spec, hook, monkeypatch):
    pytest.importorskip("triton", reason="the kernels need triton")
    residual = scattered(with_options(spec, backend="triton"), sublayers=4)
    outputs, norm_of = torch.randn(5, 2, 16), torch.nn.functional.rms_norm
    called, calls, ends = [], [], []
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda *words: called.append(1) or norm_of(*words)
    )
    for norm in (torch.nn.RMSNorm(16, eps=1e-6), RMSNorm(16, 1e-6), Centred(16, eps=1e-6)):
        called.clear()
        owner = torch.nn.modules.module if hook == "module_forward_" else norm
        handle = getattr(owner, f"register_{hook}hook")(lambda *_: None) if hook else None
        state = residual.begin(outputs[0])
        for i in range(4):
            state = residual.write(residual.read(state, i, norm=norm)[1], i, outputs[i + 1])
        ends.append(residual.end(state, norm=norm))
        calls.append(len(called))
        if handle is not None:
            handle.remove()
    # A norm that is folded in is called by a read of one source only.
    torchs, decoders, own = calls
    assert torchs == decoders
    assert (torchs == 5) == bool(hook)
    assert own == 5
    torch.testing.assert_close(ends[0], ends[1])


@torch.no_grad()
@pytest.mark.parametrize("spec", ["attnres-block:block=3", "attnres-full"])
def test_kernels_keep_the_eps_of_keys_apart_from_the_eps_of_the_norm(spec):
    """Sources are small and both eps large, so that an exchange of the two shows in every read."""
    pytest.importorskip("triton", reason="the kernels need triton")
    norm, outputs = torch.nn.RMSNorm(16, eps=0.5), 0.3 * torch.randn(7, 2, 16)
    results = []
    for options in ({"schedule": "one-pass"}, {"backend": "triton"}):
        residual = scattered(with_options(spec, eps=0.02, **options), sublayers=6)
        state, reads = residual.begin(outputs[0]), []
        for i in range(6):
            x, state = residual.read(state, i, norm=norm)
            reads.append(x)
            state = residual.write(state, i, outputs[i + 1])
        results.append(torch.stack([*reads, residual.end(state, norm=norm)]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-4)


def test_queries_on_another_device_stay_there():
    """A model lies on several devices: read 9 is made where its layer is."""
    residual = build("attnres-block:block=3", 16, 10)
    residual.reads["9"].to("meta")
    assert len(residual.begin(torch.zeros(4096, 16))) == 1


def test_a_schedule_asked_for_by_name_runs_or_says_why_not():
    residual = build("attnres-full:schedule=two-phase", 16, 4)
    with pytest.raises(ValueError, match="backend='triton' cannot take"):
        residual.begin(torch.zeros(2, 16, dtype=torch.float64))
    residual = build("attnres-full:schedule=one-pass,backend=triton", 16, 4)
    assert len(residual.begin(torch.zeros(2, 16))) == 1


@torch.no_grad()
def test_sources_beside_streams_are_read_in_two_phases_too():
    """On a GPU the attention of hyper-attnres has the state of two phases; a stage is handed sources alone."""
    torch.manual_seed(0)
    residual = build("hyper-attnres:streams=2,block=3", 16, 8)
    for parameter in residual.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape))
    sources = list(torch.randn(9, 2, 5, 16))
    expected = replay(residual, sources)
    phased = AttentionResidual(16, 8, block=3, schedule="two-phase", backend="reference")
    phased.load_state_dict(residual.depth_part.state_dict())
    residual.depth_part = phased
    residual.forget_layouts()
    for read, desired in zip(replay(residual, sources), expected):
        torch.testing.assert_close(read, desired, atol=1e-5, rtol=1e-5)
    state = residual.begin(sources[0])
    for i in range(4):
        state = residual.write(residual.read(state, i)[1], i, sources[i + 1])
    assert len(state) > 4
    settled = residual.settle(state, 4)
    assert [len(layout) for layout in residual.layouts["read", 4]] == [4, len(state)]
    assert len(settled) == 4  # streams, embedding, a finished block, the running sum
    torch.testing.assert_close(
        residual.read(tuple(settled), 4)[0], expected[4], atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_without_gradients_two_phases_begin_behind_the_first_sublayer(spec):
    """So that a GPU has work while the host gathers the queries; the reads are those of a pass with gradients."""
    residual, outputs = scattered(phased(spec), sublayers=10), torch.randn(11, 2, 16)
    state = residual.begin(outputs[0])
    assert len(state) == 1
    state = drive(residual, state, 0, 1, outputs)
    assert residual.two_phase.holds(state, "read", 1)
    end = residual.end(drive(residual, state, 1, 10, outputs))
    with torch.enable_grad():
        state = residual.begin(outputs[0])
        assert len(state) > 1
        desired = residual.end(drive(residual, state, 0, 10, outputs))
    torch.testing.assert_close(end, desired, atol=1e-6, rtol=1e-5)
