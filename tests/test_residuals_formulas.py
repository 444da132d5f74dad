"""Each residual against its formula, written a second time in the plainest way, on fixed sources in fp64."""

import itertools

import pytest
import torch

from headwater.residuals import build
from headwater.residuals.mhc import sinkhorn
from headwater.residuals.record import replay

DIM, SUBLAYERS, LAYERS = 8, 6, 3
EPS = 1e-6


def scattered(spec, sublayers=SUBLAYERS):
    """A residual in fp64 with random parameters, and random sources."""
    torch.manual_seed(0)
    residual = build(spec, DIM, sublayers).double()
    with torch.no_grad():
        for p in residual.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return residual, list(torch.randn(sublayers + 1, 2, 3, DIM, dtype=torch.float64))


def check(reads, expected):
    assert len(reads) == len(expected)
    for read, wanted in zip(reads, expected):
        read = torch.stack(read) if isinstance(read, tuple) else read
        wanted = torch.stack(wanted) if isinstance(wanted, tuple) else wanted
        torch.testing.assert_close(read, wanted, atol=1e-12, rtol=1e-12)


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def test_highway():
    residual, (h, *outputs) = scattered("highway")
    expected = [h]
    for i, y in enumerate(outputs):
        gate = residual.gates[str(i)]
        g = torch.sigmoid((unit(h) * gate.weight[0]).sum(-1, keepdim=True) + gate.bias)
        h = (1 - g) * h + g * y
        expected.append(h)
    check(replay(residual, [expected[0], *outputs]), expected)


def test_laurel_reads_low_rank_maps_of_the_last_states():
    residual, (h, *outputs) = scattered("laurel:form=previous,states=2,rank=3")
    states = [h]
    for i, y in enumerate(outputs):
        low = residual.low_rank[str(i)]
        mixed = states[-1] if i == 0 else low.mix[0] * states[-1] + low.mix[1] * states[-2]
        states.append(states[-1] + y + mixed @ (low.up @ low.down).T)
    check(replay(residual, [h, *outputs]), states)


def test_laurel_starts_with_the_paper_s_down_matrix():
    down = build("laurel:rank=3", DIM, 2).low_rank["0"].down
    expected = torch.tensor([[float(c % 3 == r) for c in range(DIM)] for r in range(3)]) / (3 * DIM) ** 0.5
    torch.testing.assert_close(down, expected)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2)])
def test_denseformer(dilation, period):
    residual, (x, *outputs) = scattered(f"denseformer:dilation={dilation},period={period}")
    states, y, expected = [x], x, []
    for m in range(LAYERS):
        a, b = outputs[2 * m : 2 * m + 2]
        expected += [y, y + a]
        states.append(y + a + b)
        y = states[-1]
        key = str(2 * m + 2)
        if (m + 1) % period == 0 and key in residual.sums:
            chosen = states[(m + 1) % dilation :: dilation]
            y = sum(weight * state for weight, state in zip(residual.sums[key], chosen, strict=True))
    check(replay(residual, [x, *outputs]), [*expected, y])


def test_denseformer_keeps_only_what_a_later_sum_reads():
    residual, (x, *outputs) = scattered("denseformer:dilation=2,period=2", sublayers=8)
    state = residual.begin(x)
    for i, y in enumerate(outputs):
        _, state = residual.read(state, i)
        state = residual.write(state, i, y)
    assert len(state) == 3  # layer outputs 0, 2 and 4, not 1 and 3


@pytest.mark.parametrize("variant", ["zero", "base", "normalized", "weighted-output"])
def test_elc_bert(variant):
    residual, (x, *outputs) = scattered(f"elc-bert:variant={variant}")
    bank, expected = [x], []
    for m in range(LAYERS):
        shares = residual.logits[str(2 * m)].softmax(0) if m else torch.ones(1, dtype=x.dtype)
        h = sum(share * u for share, u in zip(shares, bank, strict=True))
        attention, mlp = outputs[2 * m : 2 * m + 2]
        expected += [h, attention if variant == "base" else h + attention]
        bank.append(unit(attention + mlp) if variant == "normalized" else attention + mlp)
    final = bank[-1]
    if variant == "weighted-output":
        final = sum(share * u for share, u in zip(residual.logits["6"].softmax(0), bank, strict=True))
    check(replay(residual, [x, *outputs]), [*expected, final])


def test_vertical_attention():
    residual, (x, *outputs) = scattered("vertical-attention")
    bank, expected = [x], []
    for m in range(LAYERS):
        h = x if m == 0 else sum(s * unit(u) for s, u in zip(residual.logits[str(2 * m)].softmax(0), bank, strict=True))
        expected += [h, h + outputs[2 * m]]
        bank.append(h + outputs[2 * m] + outputs[2 * m + 1])
    check(replay(residual, [x, *outputs]), [*expected, bank[-1]])


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
@pytest.mark.parametrize("last", [None, 1])
def test_deepcrossattention(version, last):
    residual, (x, *outputs) = scattered(f"deepcrossattention:version={version},last={last}")

    def read(bank, m, way):
        grn = residual.grns[str(2 * m)]
        weights = [grn.constant[way, n] for n in range(len(bank))]
        if version == "v3":
            dots = [(u * grn.query[way]).sum(-1, keepdim=True) for u in bank]
            weights = [w + d.relu() for w, d in zip(weights, dots)]
        return sum(w * u for w, u in zip(weights, bank))

    whole, expected = [x], []
    for m in range(LAYERS + 1):
        bank = whole
        if last is not None and len(whole) > last + 2:
            bank = [x, sum(whole[1:-last]), *whole[-last:]]
        if m == LAYERS:
            expected.append(read(bank, m, 0))
            break
        inputs = tuple(read(bank, m, way) for way in range(3)) if m else x
        attention, mlp = outputs[2 * m : 2 * m + 2]
        expected += [inputs, (inputs[0] if m else x) + attention]
        whole.append(attention + mlp)
    check(replay(residual, [x, *outputs]), expected)


def test_the_cross_attention_query_can_leave_zero():
    residual = build("deepcrossattention", DIM, SUBLAYERS)
    reads = replay(residual, list(torch.randn(SUBLAYERS + 1, 2, 3, DIM)))
    reads[-1].square().sum().backward()
    gradient = residual.grns[str(SUBLAYERS)].query.grad
    assert gradient is not None
    assert gradient.abs().min() > 0


def test_muddformer():
    residual, (x, *outputs) = scattered("muddformer")
    bank, expected = [x], []
    for m in range(LAYERS + 1):
        ways = [x, x, x, x]
        if m:
            dense = residual.dense[str(2 * m)]
            hidden = torch.nn.functional.gelu(unit(bank[-1]) @ dense.down.T) @ dense.up.T
            weights = hidden.unflatten(-1, (-1, m + 1)) + dense.constant
            ways = [sum(w[..., j, None] * bank[j] for j in range(m + 1)) for w in weights.unbind(-2)]
        if m == LAYERS:
            expected.append(ways[0])
            break
        attention, mlp = outputs[2 * m : 2 * m + 2]
        expected += [tuple(ways[:3]) if m else x, ways[3] + attention]
        bank.append(ways[3] + attention + mlp)
    check(replay(residual, [x, *outputs]), expected)


@pytest.mark.parametrize("form", ["static", "dynamic"])
def test_hyper_connections(form):
    """H' = A_r^T H + B^T y with the paper's matrices, one token at a time."""
    residual, (x, *outputs) = scattered(f"hyper-connections:streams=3,form={form}")
    expected = [torch.empty_like(x) for _ in range(SUBLAYERS + 1)]
    for token in itertools.product(range(2), range(3)):
        streams = x[token].repeat(3, 1)
        for i, y in enumerate(outputs):
            c = residual.connections[str(i)]
            beta, alpha_m, alpha_r = c.post, c.pre, c.res
            if form == "dynamic":
                t = torch.tanh(unit(streams) @ c.dynamic.T)  # (n, n + 2)
                beta = beta + c.post_scale * t[:, 0]
                alpha_m, alpha_r = alpha_m + c.mix_scale * t[:, 1], alpha_r + c.mix_scale * t[:, 2:]
            expected[i][token] = alpha_m @ streams
            streams = alpha_r.T @ streams + torch.outer(beta, y[token])
        expected[-1][token] = streams.sum(0)
    check(replay(residual, [x, *outputs]), expected)


@pytest.mark.parametrize("name", ["mhc", "mhc-lite"])
def test_constrained_hyper_connections(name):
    residual, (x, *outputs) = scattered(f"{name}:streams=3")
    orders = list(itertools.permutations(range(3)))
    expected = [torch.empty_like(x) for _ in range(SUBLAYERS + 1)]
    for token in itertools.product(range(2), range(3)):
        streams = x[token].repeat(3, 1)
        for i, y in enumerate(outputs):
            mapping = residual.mappings[str(i)]
            flat = streams.flatten()
            raw = mapping.weight @ (flat / flat.square().mean().sqrt())
            scales = mapping.scale.repeat_interleave(torch.tensor([3, 3, len(raw) - 6]))
            logits = scales * raw + mapping.bias
            pre, post = logits[:3].sigmoid(), 2 * logits[3:6].sigmoid()
            if name == "mhc":
                res = logits[6:].view(3, 3).exp()
                for _ in range(20):
                    res = res / res.sum(0, keepdim=True)
                    res = res / res.sum(1, keepdim=True)
            else:
                shares = logits[6:].softmax(0)
                res = sum(s * torch.eye(3, dtype=x.dtype)[list(order)] for s, order in zip(shares, orders, strict=True))
            expected[i][token] = pre @ streams
            streams = res @ streams + torch.outer(post, y[token])
        expected[-1][token] = streams.sum(0)
    check(replay(residual, [x, *outputs]), expected)


def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    matrix = sinkhorn(2 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 200)
    ones = torch.ones(5, 4, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(-1), ones, atol=1e-14, rtol=0)
    torch.testing.assert_close(matrix.sum(-2), ones, atol=1e-6, rtol=0)


def test_sinkhorn_survives_logits_that_exp_cannot():
    logits = torch.tensor([[500.0, -500.0], [0.0, 900.0]], requires_grad=True)
    matrix = sinkhorn(logits, 20)
    torch.testing.assert_close(matrix, torch.eye(2))
    matrix[0, 0].backward()
    assert logits.grad.isfinite().all()


def test_sinkhorn_survives_a_row_far_below_the_others():
    matrix = sinkhorn(torch.tensor([[0.0, 0.0], [-300.0, -300.0]]), 20)
    torch.testing.assert_close(matrix, torch.full((2, 2), 0.5))


def test_permutation_mixtures_are_doubly_stochastic_without_iterations():
    residual, (x, *_) = scattered("mhc-lite:streams=4")
    res = residual.coefficients(residual.begin(x)[0], 0)[2]
    for axis in (-1, -2):
        torch.testing.assert_close(res.sum(axis), torch.ones(2, 3, 4, dtype=torch.float64), atol=1e-14, rtol=0)


@pytest.mark.parametrize("value", ["bounded", "linear"])
@pytest.mark.parametrize(("width", "compress"), [(1, "none"), (3, "channel"), (2, "token")])
def test_deep_delta_learning(width, compress, value):
    residual, (x, *outputs) = scattered(f"ddl:width={width},compress={compress},value={value}")
    stream = x.unsqueeze(-1).repeat(1, 1, 1, width)  # (B, T, D, n)

    def compressed(stream, i):
        if width == 1:
            return stream[..., 0]
        compressor = residual.compressors[str(i - i % 2) if i < SUBLAYERS else str(SUBLAYERS)]
        if compress == "channel":
            taps = range(width)
            padded = torch.nn.functional.pad(stream, (1, width))
            convolved = [sum(compressor.kernel[j] * padded[..., o + j] for j in taps) for o in range(width)]
        else:
            padded = torch.nn.functional.pad(stream, (0, 0, 0, 0, 3, 0))
            convolved = [
                sum(compressor.kernel[j, o] * padded[:, j : j + 3, :, o] for j in range(4)) for o in range(width)
            ]
        return sum(r * c for r, c in zip(compressor.read, convolved))

    expected = []
    for i, y in enumerate(outputs):
        h = compressed(stream, i)
        expected.append(h)
        write = residual.writes[str(i)]
        k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
        beta = 2 * torch.sigmoid(unit(h) @ write.beta_weight[0] + write.beta_bias)[..., None, None]
        if value == "bounded":
            v = 4 * torch.sigmoid(h @ write.value_weight.T + write.value_bias)
        else:
            v = unit(h) @ write.value_weight.T
        error = v - torch.einsum("btd,btdn->btn", k, stream)
        stream = stream + beta * torch.einsum("btd,btn->btdn", k, error)
    check(replay(residual, [x, *outputs]), [*expected, compressed(stream, SUBLAYERS)])


def test_delta_learning_contracts_the_error_along_its_direction():
    residual, (x, y, *_) = scattered("ddl")
    _, state = residual.read(residual.begin(x), 0)
    (after,) = residual.write(state, 0, y)
    write = residual.writes["0"]
    k = y / (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    beta = 2 * torch.sigmoid(unit(x) @ write.beta_weight[0] + write.beta_bias)
    value = 4 * torch.sigmoid(x @ write.value_weight[0] + write.value_bias)
    before_error, after_error = (k * x).sum(-1) - value, (k * after[..., 0, :]).sum(-1) - value
    torch.testing.assert_close(after_error, (1 - beta) * before_error, atol=1e-8, rtol=1e-8)


def test_deepnorm():
    residual, (h, *outputs) = scattered("deepnorm")
    expected = [h]
    for i, y in enumerate(outputs):
        expected.append(unit((2 * LAYERS) ** 0.25 * expected[-1] + y) * residual.norms[str(i)])
    check(replay(residual, [h, *outputs]), expected)


def test_delta_attention_residual_adds_a_read_to_the_stream():
    residual, (x, *outputs) = scattered("delta-attnres:block=2")
    expected = [2 * x]
    for i in range(1, SUBLAYERS):
        blocks = [x, *(sum(outputs[b : min(b + 2, i)]) for b in range(0, i, 2))]
        read = residual.reads[str(i)]
        logits = torch.stack([(unit(v) * read.key_weight * read.query).sum(-1) for v in blocks])
        mixed = (logits.softmax(0).unsqueeze(-1) * torch.stack(blocks)).sum(0)
        expected.append(x + sum(outputs[:i]) + mixed)
    check(replay(residual, [x, *outputs]), [*expected, x + sum(outputs)])
