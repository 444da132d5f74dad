"""The two-phase schedule on its references: the same network as with one pass per read."""

import copy
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from kernel_cases import leaves_of
from tinymodels import advance, model_of
from tinymodels import scattered as scattered_residual
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwater.generation.generate import generate
from headwater.models.norm import RMSNorm
from headwater.residuals import AttentionResidual, attention, build, record, with_options
from headwater.residuals.record import replay

BLOCK, FULL = "attnres-block:block=3", "attnres-full"  # 3: the last block is partial
SPECS = [BLOCK, "attnres-block:block=8", FULL]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}

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
    one, two = models_of(spec, other)
    tokens = torch.randint(0, 40, (2, 7))
    assert_close(results_of(two, tokens), results_of(one, tokens), **CLOSE)
    text = generate(one, tokens, 9, temperature=0.0)
    assert torch.equal(generate(two, tokens, 9, temperature=0.0), text)


@pytest.mark.parametrize("spec", SPECS)
def test_a_record_shows_the_same_reads_and_weights(spec):
    tokens, records = torch.randint(0, 40, (1, 5)), []
    for model in models_of(spec):
        with torch.no_grad(), record(model.residual) as trace:
            model(tokens)
        records.append([*trace.reads, *trace.weights])
    assert_close(*records, **CLOSE)


def drive(residual, state, outputs, start=0, stop=None):
    """The state behind sublayers that add their read, squashed, to an output."""

    def sublayer(i, x):
        return outputs[i + 1] + x.tanh()

    return advance(residual, state, sublayer, start, stop)


@pytest.mark.parametrize("spec", SPECS)
def test_a_settled_state_can_be_read_on(spec):
    residual, outputs = scattered(phased(spec), sublayers=10), torch.randn(11, 2, 16)
    state = residual.begin(outputs[0])
    whole = residual.end(drive(residual, state, outputs))
    for i in range(10):
        settled = residual.settle(state, i)
        assert len(settled) == residual.num_sources(i)
        end = residual.end(drive(residual, settled, outputs, i))
        assert_close(end, whole, **CLOSE)
        state = drive(residual, state, outputs, i, i + 1)


@pytest.mark.parametrize("spec", [*SPECS, "attnres-block:block=1"])
def test_stages_with_their_own_queries_do_what_the_whole_does(spec):
    """Every pair of cuts: inside a block, between two, before the last sublayer.

    Values are compared, and the gradient of every parameter and source.
    """
    whole = scattered(one_by_one(spec), sublayers=10)
    leaves = leaves_of(torch.randn(11, 2, 16))
    end = whole.end(drive(whole, whole.begin(leaves[0]), leaves))
    inputs = [*leaves, *whole.parameters()]
    desired = torch.autograd.grad(end.square().sum(), inputs)
    names = [name for name, _ in whole.named_parameters()]
    blank = scattered(phased(spec), sublayers=10)
    for cuts in combinations(range(1, 10), 2):
        parameters = {}
        state = None
        for start, stop in pairwise((0, *cuts, 10)):
            stage = copy.deepcopy(blank)
            stage.keep_only(start, stop)
            parameters.update(stage.named_parameters())
            state = stage.adopt(state, start) if start else stage.begin(leaves[0])
            assert stage.two_phase.holds(state, "read", start), "the stage runs in two phases"
            state = drive(stage, state, leaves, start, stop)
            if stop < 10:
                state = stage.settle(state, stop)
        last = stage.end(state)
        assert_close(last, end, **CLOSE)
        assert parameters.keys() == set(names)
        inputs = [*leaves, *map(parameters.get, names)]
        actual = torch.autograd.grad(last.square().sum(), inputs)
        assert_close(actual, desired, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_a_cpu_takes_two_phases_to_train_in_fp32(spec):
    """Elsewhere its sources alone are the state: reads are made one by one."""

    def phases(dtype=torch.float32, tokens=4096, **options):
        x = torch.zeros(tokens, 16, dtype=dtype)
        residual = build(with_options(spec, **options), 16, 10)
        state = advance(residual, residual.begin(x), lambda i, _: x, stop=1)
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
    """The first pass of re-entrant checkpointing has no gradients.

    Its state is that of the second pass, which has some.
    """
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    residual, outputs = scattered(spec, sublayers=10), torch.randn(11, 2, 16)

    def begin(x):
        return tuple(drive(residual, residual.begin(x), outputs, stop=inside))

    def results(around):
        residual.zero_grad()
        x = torch.ones(2, 16, requires_grad=True)
        state = around(begin, x * outputs[0])
        assert len(state) > 1
        end = residual.end(drive(residual, state, outputs, inside))
        end.square().sum().backward()
        return [end, x.grad, *(parameter.grad for parameter in residual.parameters())]

    desired = results(lambda function, x: function(x))
    for reentrant in (False, True):
        assert all(map(torch.equal, results(partial(checkpoint, use_reentrant=reentrant)), desired))


@pytest.mark.parametrize("spec", SPECS)
def test_a_compiled_pass_reads_one_by_one(spec):
    residual = build(spec, 16, 10)
    compiled, x = (
        torch.compile(residual.begin, backend="eager", fullgraph=True),
        torch.zeros(4096, 16),
    )
    assert len(compiled(x)) == 1
    assert len(residual.begin(x)) > 1


class Centred(torch.nn.RMSNorm):
    """A norm of the user's, whose weight is around zero."""

    def forward(self, x):
        weight = 1 + self.weight
        return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


def ends_of(residual, norm, outputs):
    """The last read, each read before it normed, of sublayers that scale what they read."""
    norms = [norm] * residual.sublayers
    state = residual.begin(outputs[0])
    state = advance(residual, state, lambda i, x: x * outputs[i + 1], norms=norms)
    return residual.end(state, norm=norm)


@pytest.mark.parametrize("kind", [Centred, torch.nn.RMSNorm])
@pytest.mark.parametrize("spec", SPECS)
def test_over_the_plain_operators_a_norm_is_called(spec, kind, monkeypatch):
    """It is called as in reads one by one: with its class's forward or its own."""
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    norm, calls = kind(16, eps=1e-6), []
    outputs = torch.randn(11, 2, 16)
    norm.forward = lambda x, forward=norm.forward: calls.append(1) or forward(x)
    one, two = (scattered(s, sublayers=10) for s in (one_by_one(spec), spec))
    assert not two.folds_norm(two.begin(outputs[0]), 0)
    expected, actual = ends_of(one, norm, outputs), ends_of(two, norm, outputs)
    assert len(calls) == 22
    assert_close(actual, expected, atol=1e-4, rtol=1e-3)


with_kernels = pytest.mark.parametrize("spec", [BLOCK, FULL])


def on_kernels(spec, sublayers=4, **options):
    pytest.importorskip("triton", reason="the kernels need triton")
    return scattered(with_options(spec, backend="triton", **options), sublayers=sublayers)


@torch.no_grad()
@with_kernels
@pytest.mark.parametrize("folds", [False, True])
def test_a_kernel_takes_no_norm_with_a_forward_of_its_own(spec, folds):
    """Unless its class says that weight and eps are all there is to it."""
    norm = type("Mine", (Centred,), {"folds": folds})(16, eps=1e-6)
    outputs = torch.randn(5, 2, 16)
    expected = ends_of(scattered(one_by_one(spec), sublayers=4), norm, outputs)
    actual = ends_of(on_kernels(spec), norm, outputs)
    assert torch.allclose(actual, expected, atol=1e-4, rtol=1e-3) != folds


@torch.no_grad()
@with_kernels
@pytest.mark.parametrize("hook", ["", "forward_pre_", "full_backward_", "module_forward_"])
def test_the_decoders_norm_is_folded_as_torchs_is_and_none_with_hooks(spec, hook, monkeypatch):
    residual, outputs = on_kernels(spec), torch.randn(5, 2, 16)
    norm_of, called, calls, ends = torch.nn.functional.rms_norm, [], [], []
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda *words: called.append(1) or norm_of(*words)
    )
    for kind in (torch.nn.RMSNorm, RMSNorm, Centred):
        norm = kind(16, eps=1e-6)
        called.clear()
        owner = torch.nn.modules.module if hook == "module_forward_" else norm
        handle = getattr(owner, f"register_{hook}hook")(lambda *_: None) if hook else None
        ends.append(ends_of(residual, norm, outputs))
        calls.append(len(called))
        if handle is not None:
            handle.remove()
    # A norm that is folded in is called by a read of one source only.
    torchs, decoders, users = calls
    assert torchs == decoders
    assert (torchs == 5) == bool(hook)
    assert users == 5
    assert_close(ends[0], ends[1])


@torch.no_grad()
@with_kernels
def test_kernels_keep_the_eps_of_keys_apart_from_the_eps_of_the_norm(spec):
    """Sources are small and both eps large, so that an exchange of the two shows in every read."""
    norm = torch.nn.RMSNorm(16, eps=0.5)
    outputs = 0.3 * torch.randn(7, 2, 16)
    results = []
    for residual in (
        scattered(with_options(one_by_one(spec), eps=0.02), sublayers=6),
        on_kernels(spec, 6, eps=0.02),
    ):
        reads = []

        def output_of(i, x, reads=reads):
            reads.append(x)
            return outputs[i + 1]

        state = advance(residual, residual.begin(outputs[0]), output_of, norms=[norm] * 6)
        results.append([*reads, residual.end(state, norm=norm)])
    assert_close(*results, atol=1e-5, rtol=1e-4)


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
    """On a GPU the attention of hyper-attnres has the state of two phases.

    A stage is handed sources alone.
    """
    residual = scattered("hyper-attnres:streams=2,block=3", sublayers=8)
    sources = list(torch.randn(9, 2, 5, 16))
    expected = replay(residual, sources)
    phased = AttentionResidual(16, 8, block=3, schedule="two-phase", backend="reference")
    phased.load_state_dict(residual.depth_part.state_dict())
    residual.depth_part = phased
    residual.forget_layouts()
    close = {"atol": 1e-5, "rtol": 1e-5}
    assert_close(replay(residual, sources), expected, **close)
    begun = residual.begin(sources[0])
    state = advance(residual, begun, lambda i, _: sources[i + 1], stop=4)
    assert len(state) > 4
    settled = residual.settle(state, 4)
    lengths = [len(layout) for layout in residual.layouts["read", 4]]
    assert lengths == [4, len(state)]
    assert len(settled) == 4  # streams, embedding, a finished block, the running sum
    read, _ = residual.read(tuple(settled), 4)
    assert_close(read, expected[4], **close)


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_without_gradients_two_phases_begin_behind_the_first_sublayer(spec):
    """A GPU has work while the host gathers the queries; reads are those of a pass with gradients."""
    residual, outputs = scattered(phased(spec), sublayers=10), torch.randn(11, 2, 16)
    state = residual.begin(outputs[0])
    assert len(state) == 1
    state = drive(residual, state, outputs, stop=1)
    assert residual.two_phase.holds(state, "read", 1)
    end = residual.end(drive(residual, state, outputs, 1))
    with torch.enable_grad():
        state = residual.begin(outputs[0])
        assert len(state) > 1
        desired = residual.end(drive(residual, state, outputs))
    assert_close(end, desired, atol=1e-6, rtol=1e-5)
