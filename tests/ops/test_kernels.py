"""The kernels under Triton's interpreter: a small set. test_kernels_gpu.py has the full grid."""

import gc
import weakref
from functools import partial

import pytest
import torch
from kernel_cases import (
    DTYPES,
    INDUCTOR,
    UNFUSED,
    assert_all_close,
    assert_all_equal,
    assert_as_exact,
    assert_first_order,
    draw,
    error,
    extremes,
    first_phase,
    growing,
    leaves_of,
    poisoned,
    read,
    run,
    saved_for_backward,
    two_phases,
    with_gradients,
    with_option,
    worst,
)
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels need triton")

from triton.runtime.errors import OutOfResources

from benchmarks.attnres import worst_of
from headwater.models import Decoder, ModelConfig
from headwater.ops import depth_attention
from headwater.ops.depth import autograd, inference_read, merge, mix, score
from headwater.ops.depth import reference as two_phase
from headwater.ops.triton.launch import CHUNK, address_table, launch_that_fits, launches
from headwater.residuals import build

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU runs the grid of test_kernels_gpu instead"
)

CASES = [
    (1, 24, 3, torch.float32),  # one source
    (2, 123, 2, torch.float32),  # a width that no tile divides
    (17, 16, 2, torch.float32),  # more addresses than one launch writes
    (4, 40, 3, torch.bfloat16),
    (3, 40, 3, torch.float16),  # range too small to invert a norm: another path
]


@pytest.mark.parametrize(("count", "dim", "tokens", "dtype"), CASES)
@pytest.mark.parametrize("function", [read, two_phases])
def test_error_is_at_most_twice_plain_pytorchs(function, count, dim, tokens, dtype):
    assert worst(function, count + (function is two_phases), dim, tokens, dtype, "cpu") <= 1


def test_a_merge_without_a_norm_does_not_rebuild_its_input_from_a_rounded_output():
    assert worst(two_phases, 2, 100, 1, torch.float16, "cpu", seed=11) <= 1


def merged(ops, inputs, chosen, seed, dtype, weight=None, keep=True, **options):
    """A merge that opens a block, and the gradients of the chosen inputs."""
    y, out, lse, query = leaves = leaves_of(inputs, dtype)
    if ops is autograd:
        options["keep"] = keep
    if weight is not None:
        weight = weight.to(dtype)
    x, _ = ops.merge(y, None, out, lse, query, None, weight, **options)
    return with_gradients([x], [leaves[k] for k in chosen], [seed])


def rms_normed(x):
    return x * x.square().mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ops", [autograd, two_phase])
def test_a_small_sum_with_nearly_all_of_the_weight_is_not_rounded_like_what_it_replaces(ops, keep):
    """It is ten thousand times smaller than phase 1's output; the norm behind makes both alike."""
    torch.manual_seed(0)
    y, out, seed = torch.randn(3, 4, 40)
    y, query = 1e-4 * y, torch.randn(40)
    lse = rms_normed(y) @ query - torch.tensor([18.0, 15.0, 12.0, 8.0])
    arguments = (y, out, lse, query), (0, 1), seed
    options = {"weight": torch.ones(40), "eps": 1e-12, "norm_eps": 1e-12}
    truth = merged(two_phase, *arguments, torch.float64, **options)
    actual = merged(ops, *arguments, torch.float32, keep=keep, **options)
    assert all(error(*pair) < 2e-6 for pair in zip(actual, truth, strict=True))


@pytest.mark.parametrize("weight", [None, torch.ones(40)], ids=["bare", "normed"])
@pytest.mark.parametrize("ops", [autograd, two_phase])
def test_where_a_sum_has_nearly_all_of_the_weight_its_logit_s_gradient_keeps_its_digits(
    ops, weight
):
    """b (1 - b) <dh, P - out>: if b rounds to one, 1 - b is zero, and <dh, P> nearly <dh, h>."""
    torch.manual_seed(0)
    y, out, seed = torch.randn(3, 4, 40)
    query = torch.randn(40)
    lse = rms_normed(y) @ query - torch.tensor([8.0, 12.0, 16.0, 20.0])
    arguments = (y, out, lse, query), (2,), seed
    _, expected = merged(two_phase, *arguments, torch.float64, weight)
    _, gradient = merged(ops, *arguments, torch.float32, weight)
    assert_close(gradient.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_sum_of_a_block_passes_its_own_gradient_on(dtype):
    assert worst(growing, 3, 100, 3, dtype, "cpu") <= 1


def first_phases(sources, queries, keys, seeds):
    """Outputs and gradients of phase 1, by the kernels and by the reference."""
    for backend in ("triton", "reference"):
        leaves = *sources, queries, keys = leaves_of([*sources, queries, keys])
        outs, lses = first_phase(sources, queries, keys, backend)
        yield with_gradients([torch.stack(outs), torch.stack(lses)], leaves, seeds)


PERMUTED = torch.randn(2, 24, 2).movedim(-1, 0)


@pytest.mark.parametrize("seed", [PERMUTED, torch.tensor(0.7).expand(2, 2, 24)])
def test_gradients_may_lie_in_memory_as_they_like(seed):
    """Permuted, and one number for all."""
    sources, queries, keys, _ = draw(3, 24, 2, torch.float32, "cpu")
    leaves = [t.requires_grad_() for t in (*sources, queries, keys)]
    results = []
    for backend in ("triton", "reference"):
        outs, _ = first_phase(sources, queries, keys, backend)
        results.append(torch.autograd.grad(outs, leaves, seed.unbind(0)))
    assert_all_close(*results, rtol=1e-4)


def test_queries_and_weights_may_be_columns_and_must_be_vectors():
    sources, queries, keys, norm = draw(3, 24, 2, torch.float32, "cpu")
    vectors = torch.stack([queries[0], keys[0], norm])
    expected = depth_attention(sources, *vectors[:2], norm_weight=norm, backend="reference")
    query, key, weight = vectors.T.contiguous().unbind(1)
    read = depth_attention(sources, query, key, norm_weight=weight, backend="triton")
    assert_close(read, expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="one query for all tokens"):
        depth_attention(sources, torch.randn(2, 24), backend="triton")
    with pytest.raises(ValueError, match="query must be"):
        depth_attention(sources, queries[0].to("meta"), backend="triton")


def test_a_second_derivative_is_refused():
    sources, queries, *_ = draw(2, 24, 2, torch.float32, "cpu")
    leaf = sources[0].requires_grad_()
    assert_first_order(depth_attention(sources, queries[0], backend="triton"), leaf)


def test_rows_that_do_not_fit_are_summed_again_for_the_norm():
    """Sixteen queries leave room for 1024 channels a program."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 1100) for _ in range(3)]
    norm, z = torch.randn(1100), torch.randn(2, 3, 16)
    with poisoned():
        outs, lses, _ = autograd.mix(sources, (z,), norm)
    expected_outs, expected_lses, _ = two_phase.mix(sources, (z,), norm)
    assert_all_close((*outs, *lses), (*expected_outs, *expected_lses))


def test_the_inference_read_agrees_and_gives_weights():
    sources, queries, keys, norm = draw(4, 40, 3, torch.float32, "cpu")
    results, options = [], {"norm_weight": norm, "return_weights": True}
    with torch.no_grad(), poisoned():
        for backend in ("triton", "reference"):
            read = depth_attention(sources, queries[0], keys[0], backend=backend, **options)
            results.append(read)
    assert_all_close(*results, atol=1e-6)


def test_more_queries_than_one_launch_holds():
    sources, _, _, _ = draw(2, 16, 2, torch.float32, "cpu")
    queries = torch.randn(70, 16) * 0.3  # scores take 64 a launch, mixing 16 and 8
    seeds = torch.randn(70, 2, 16), torch.randn(70, 2)
    results = first_phases(sources, queries, torch.ones_like(queries), seeds)
    assert_all_close(*results, rtol=1e-4)


def assert_same_gradients(loss, leaves, **close):
    """Gradients of a loss with the kernels are those with the references."""
    gradients = [torch.autograd.grad(loss(ops), leaves) for ops in (autograd, two_phase)]
    assert_all_close(*gradients, **close)


def test_scores_of_more_queries_than_one_launch_holds_add_to_one_gradient():
    """The second launch adds to what the first has written anew: no read gave a gradient before."""
    torch.manual_seed(0)
    source, folded = torch.randn(2, 16), torch.randn(70, 16) * 0.3
    leaves, slope = leaves_of([source, folded]), torch.randn(2, 1, 70)

    def loss(ops):
        _, _, (z,) = ops.score(*leaves, 1e-6)
        return (z * slope).sum()

    assert_same_gradients(loss, leaves, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [80.0, -80.0])
def test_extremes_stay_finite(value, dtype):
    assert all(t.isfinite().all() for t in extremes(value, dtype, "cpu"))


def test_a_norm_weight_of_zero_has_its_gradient():
    sources, queries, keys, norm = draw(3, 24, 3, torch.float32, "cpu")
    norm[::5] = 0.0
    inputs = [*sources, queries, keys, norm]
    values, seeds = run(two_phases, inputs, "triton", torch.float32)
    expected, _ = run(two_phases, inputs, "reference", torch.float32, seeds)
    truth = [value.double() for value in expected]
    assert all(error(*pair) < 1e-5 for pair in zip(values, truth, strict=True))


def sum_of_squares(*tensors):
    return sum(tensor.square().sum() for tensor in tensors)


def test_a_source_that_others_use_keeps_its_gradient():
    """The threaded gradient is added to in place only where nobody else holds it."""
    torch.manual_seed(0)
    source, other, folded = leaves = leaves_of(torch.randn(3, 2, 16))
    z = torch.randn(2, 1, 1)

    def loss(ops):
        inner = source * 1.0
        v, _, scores = ops.score(inner, folded, 1e-6)
        outs, _, (w,) = ops.mix([v], scores)
        both = w + other  # one gradient tensor for w and other
        (out,), _, (u,) = ops.mix([w], (z,))
        linear = 2 * both + 3 * u + v * inner
        return linear.sum() + out.sum() + sum_of_squares(*outs)

    assert_same_gradients(loss, leaves)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_sources_may_share_one_gradient(compiled):
    """Neither source may add to it; compiled, inductor must find out which copies to keep."""
    torch.manual_seed(0)
    leaves = leaves_of(torch.randn(2, 4, 16))
    folded, weight = torch.randn(3, 16) * 0.3, torch.randn(4, 16)

    def loss(ops):
        a, _, za = ops.score(leaves[0] * 1.0, folded, 1e-6)
        b, _, zb = ops.score(leaves[1] * 1.0, folded, 1e-6)
        outs, lses, (a, b) = ops.mix([a, b], za + zb)
        shared = a + b + weight * leaves[0].sum()  # one gradient for a, b and a third
        lengths = sum(lse.sum() for lse in lses)
        return (shared.square() * weight).sum() + sum_of_squares(*outs) + lengths

    expected = torch.autograd.grad(loss(two_phase), leaves)
    function = torch.compile(loss, options=INDUCTOR | UNFUSED) if compiled else loss
    assert_all_close(torch.autograd.grad(function(autograd), leaves), expected, atol=1e-4)


@pytest.mark.parametrize("opens", [True, False])
def test_queries_threaded_twice_may_share_one_gradient(opens):
    """A source that is scored threads them, and so does the read that opens a block."""
    torch.manual_seed(0)
    y, partial, source, folded = leaves = leaves_of(torch.randn(4, 4, 16))
    weight = torch.randn(4, 16)

    def loss(ops):
        options = {"eps": 1e-6, "start": 1, "sizes": (2, 1)}
        queries = 0.3 * folded
        _, fa, za = ops.score(source, queries * 1.0, **options)
        before = None if opens else partial
        arguments = y, before, queries * 1.0, (source,), za[:1]
        outs, lses, (query,), fb, sources, zb = ops.open_block(*arguments, **options)
        shared = fa + fb  # one gradient for both
        squares = sum_of_squares(*outs, *lses, *sources, *za, *zb)
        weighted = shared.square() * weight
        return weighted.sum() + squares + (query * weight[0]).sum()

    used = [y, source, folded] if opens else leaves
    assert_same_gradients(loss, used)


class Net(nn.Module):
    def __init__(self, spec, dim=24, sublayers=7):
        super().__init__()
        torch.manual_seed(1)
        self.residual = build(spec, dim, sublayers)
        norms = [nn.RMSNorm(dim, eps=1e-6) for _ in range(sublayers + 1)]
        linears = [nn.Linear(dim, dim, bias=False) for _ in range(sublayers)]
        self.norms, self.linears = nn.ModuleList(norms), nn.ModuleList(linears)
        for p in (*self.residual.parameters(), *self.norms.parameters()):
            nn.init.normal_(p, mean=0.5, std=0.5)

    def step(self, i, *state):
        x, state = self.residual.read(state, i, norm=self.norms[i])
        return self.residual.write(state, i, self.linears[i](x))

    def forward(self, x):
        state = self.residual.begin(x)
        for i in range(len(self.linears)):
            state = self.step(i, *state)
        return self.residual.end(state, norm=self.norms[-1])


def results_of(net, forward=None):
    generator = torch.Generator().manual_seed(3)
    x, seed = torch.randn(2, 2, 24, generator=generator)
    x.requires_grad_()
    net.zero_grad()
    out = (net if forward is None else forward)(x)
    out.backward(seed)  # re-entrant checkpointing takes no autograd.grad
    return [out.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


SPECS = ["attnres-block:block=3", "attnres-full"]


@pytest.mark.parametrize("spec", [*SPECS, "attnres-block:block=7"])
def test_the_fused_residual_equals_the_reference(spec):
    expected = results_of(Net(with_option(spec, "backend=reference")))
    net = Net(with_option(spec, "backend=triton"))
    before = launches.total()
    values = results_of(net)
    assert launches.total() > before
    truth = [value.double() for value in expected]
    assert all(error(*pair) < 2e-5 for pair in zip(values, truth, strict=True))
    step = net.step
    for reentrant in (False, True):
        net.step = partial(checkpoint, step, use_reentrant=reentrant)
        assert_all_equal(values, results_of(net))


SHAPE = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp_dim": 24, "context": 9}


@pytest.mark.parametrize("spec", SPECS)
def test_under_autocast_a_bf16_stream_meets_fp32_weights(spec):
    def results(backend, half):
        torch.manual_seed(0)
        residual = with_option(spec, f"backend={backend}")
        model = Decoder(ModelConfig(**SHAPE, vocab_size=13, residual=residual))
        with torch.no_grad():
            for parameter in model.residual.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        dtypes = set()
        last = model.sublayers[-1].body
        last.register_forward_hook(lambda _, inputs, __: dtypes.add(inputs[0].dtype))
        before = launches.total()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(torch.arange(9).view(1, 9))
            loss = logits.float().square().mean()
        loss.backward()
        assert (launches.total() > before) == (backend == "triton")
        assert dtypes == {torch.bfloat16 if half else torch.float32}
        return [loss.detach(), *(p.grad for p in model.parameters())]

    truth = [t.double() for t in results("reference", half=False)]
    plain = results("reference", half=True)
    assert_as_exact(results("triton", half=True), plain, truth, spare=1e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_the_schedule_of_training_is_as_exact(spec):
    spec = with_option(spec, "backend=triton")
    assert worst_of(spec, 40, 2, torch.float32, "cpu", draws=1) <= 1


@pytest.mark.parametrize("spec", SPECS)
def test_of_width_d_only_sources_and_what_the_plain_residual_saves_are_kept(spec):
    """Per sublayer its input and its output (of a block: the running sum).

    Phase 1's outputs are rebuilt.
    """
    net = Net(with_option(spec, "backend=triton"))
    x = torch.randn(9, 24, requires_grad=True)
    saved = saved_for_backward(lambda: net(x))
    wide = {tensor.data_ptr() for tensor in saved if tensor.shape == (9, 24)}
    inputs_and_outputs = 2 * len(net.linears)
    # And the embedding, and the final norm's output.
    assert inputs_and_outputs // 2 <= len(wide) <= inputs_and_outputs + 2


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        ("attnres-block:block=3,backend=triton", "inductor"),  # which drops copies of gradients
        # Which keeps them, and takes a third of the time
        ("attnres-full:backend=triton", "aot_eager"),
    ],
)
def test_the_fused_residual_compiles_without_a_break(spec, backend):
    net = Net(spec, sublayers=4)  # of which three make a block
    values = results_of(net)
    options = INDUCTOR | UNFUSED if backend == "inductor" else None
    compiled = torch.compile(net, fullgraph=True, backend=backend, options=options)
    assert_all_close(results_of(net, compiled), values, atol=1e-6)


def test_settling_gives_back_the_plain_state():
    fast = build("attnres-block:block=3,backend=triton", 16, 7)
    slow = build("attnres-block:block=3,backend=reference", 16, 7)
    slow.load_state_dict(fast.state_dict())
    x = torch.ones(2, 16)
    one, two = fast.begin(x), slow.begin(x)
    for i in range(7):
        assert len(two) == fast.num_sources(i)
        assert_close(fast.settle(one, i), two)
        assert_close(fast.weights(one, i), slow.weights(two, i))
        _, one = fast.read(one, i)
        _, two = slow.read(two, i)
        y = torch.randn(2, 16)
        one = fast.write(one, i, y)
        two = slow.write(two, i, y)


def test_the_backend_asked_for_runs_or_raises():
    sources = [torch.randn(2, 8) for _ in range(2)]
    before = launches.copy()
    depth_attention(sources, torch.zeros(8))
    assert launches == before  # auto on CPU: the reference
    depth_attention(sources, torch.zeros(8), backend="triton")
    assert launches - before == {"read": 1}
    wrong = [
        (sources, {"heads": 2}, "2 heads"),
        ([s.double() for s in sources], {}, r"\(2, 8\), torch.float64"),
        ([sources[0], sources[1].bfloat16()], {}, "tensors differ"),
        ([torch.zeros(1, 40000)], {}, "width 40000"),
    ]
    for tensors, options, message in wrong:
        query = torch.zeros(tensors[0].shape[-1])
        with pytest.raises(ValueError, match=message):
            depth_attention(tensors, query, backend="triton", **options)


def test_operators_are_well_registered():
    v, w, u, s = torch.randn(4, 2, 16)
    folded, douts = torch.randn(3, 16), list(torch.randn(3, 2, 16))
    query, g = torch.ones(2, 16)
    z, rstd = score.score(v, folded, 1e-6)
    scores = torch.stack([z, z], -2)
    x, r, out, lse, p = mix.mix([v, w], [scores], g, 1e-6, False)
    out, lse = out[0].clone(), lse[1].clone()
    one = p[..., :1].contiguous()
    merged = merge.merge(v, None, out, lse, query, None, g, 1e-6, 1e-6)[2]
    # Tensors of which one operator changes some: no two of them may be the same.
    seeds, gradient = torch.randn(2, 2).unbind(0), torch.randn(2, 16)
    checks = [
        (score.score, (v, folded, 1e-6)),
        (score.score_backward, (v, folded, z, rstd, z.clone(), None)),
        (score.score_backward_, (v, folded, z, rstd, z.clone(), gradient)),
        (mix.mix, ([v, w], [scores], g, 1e-6, False)),
        (mix.mix, ([v, w], scores.split(1, -2), None, 1e-6, True)),
        (mix.mix_backward, ([v, w], p, douts, seeds, False, None)),
        (mix.mix_backward, ([v], one, douts[:1], [], False, rstd)),
        (mix.mix_backward_, ([v, w], p, douts, [], [u, s], None)),
        (mix.mix_backward_, ([v], one, douts[:1], [], [gradient], rstd)),
        (merge.merge, (v, None, out, lse, query, None, g, 1e-6, 1e-6)),
        (merge.merge_backward, (v, w, x, u, None, lse, query, None, g, merged, 1e-6)),
        (merge.norm_backward, (v, x, g, r, 1e-6, True)),
        (inference_read.read, ([v, w], query, None, g, 1e-6, True)),
    ]
    tests = ("test_schema", "test_faketensor")
    for writer, arguments in checks:
        outputs = writer.allocate(*arguments)
        assert writer.overload(*arguments, *outputs) is None  # see `Writer`
        torch.library.opcheck(writer.overload, (*arguments, *outputs), test_utils=tests)


class Hungry:
    """Stands in for a compiled kernel whose shared memory grows with the rows under way."""

    def __init__(self, arg_names, limit):
        self.arg_names, self.limit, self.tried = arg_names, limit, []
        self.__name__ = "_hungry"

    def __getitem__(self, grid):
        return self.run

    def run(self, *arguments, num_warps, **constants):
        self.tried.append(constants["STAGES" if "STAGES" in self.arg_names else "num_stages"])
        if self.tried[-1] > self.limit:
            raise OutOfResources(100 * self.tried[-1], 100 * self.limit, "shared memory")
        return "compiled"


def launched(kernel, *tensors_and_constants):
    *tensors, constants = tensors_and_constants
    return launch_that_fits(kernel, (1,), tuple(tensors), (), constants, 4, 3)


@pytest.mark.parametrize("names", [["x", "STAGES"], ["x"]])
def test_wide_rows_run_with_fewer_stages_or_are_refused_by_shape(names):
    x, kernel = torch.zeros(3, 7168), Hungry(names, limit=2)
    compiled, constants = launched(kernel, x, {"BD": 8})
    assert (compiled, kernel.tried) == ("compiled", [3, 2])
    stages = "STAGES" if len(names) > 1 else "num_stages"
    assert constants == {"num_stages": 1, "BD": 8} | {stages: 2}
    table = torch.zeros(16, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"\(3, 7168\).* takes 100 of shared memory"):
        launched(Hungry(names, limit=0), table, x, {})


def test_an_attempt_that_did_not_fit_keeps_no_tensor_alive():
    x = torch.zeros(4)
    references = weakref.ref(x)
    gc.disable()
    try:
        launched(Hungry(["x"], limit=1), x, {})
        del x
        assert references() is None
    finally:
        gc.enable()


PIECES = [
    # Columns of ever narrower tensors, as a rule
    [torch.randn(2, 5, 1, width)[..., 2:7] for width in (19, 14, 9)],
    [torch.randn(10, 1, 7)[..., 1:6], torch.randn(10, 2, 5)],
    # Rows that are no neighbours
    [torch.randn(5, 2, 1, 9)[..., 4:].transpose(0, 1), torch.randn(2, 5, 2, 5)],
    [torch.randn(5, 1, 2, 5).transpose(0, 1), torch.randn(1, 5, 5, 1).mT],
    [torch.randn(1, 1, 3, 5)],  # one token
]


@pytest.mark.parametrize("pieces", PIECES)
def test_scores_are_read_where_they_lie(pieces):
    scores, g = torch.cat(pieces, -2).contiguous(), torch.rand(16)
    *tokens, count, _ = scores.shape
    sources = list(torch.randn(count, *tokens, 16))
    parts = mix.mix(sources, pieces, g, 1e-6, False)
    assert_all_equal(parts, mix.mix(sources, [scores], g, 1e-6, False))
    assert_close(parts[-1], scores.softmax(-2))


def test_tables_of_any_length_hold_their_addresses():
    for count in (1, CHUNK, CHUNK + 1):
        addresses = [2**40 + 3 * n for n in range(count)]
        assert address_table(addresses, torch.device("cpu"))[:count].tolist() == addresses
