"""Experts: the formula, no token dropped, a bias that evens the load and is saved."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import leaves_of, with_gradients
from tinykimi import KIMI
from tinymodels import model_of, tokens_of
from torch.testing import assert_close

from headwater.models import Decoder, ModelConfig
from headwater.models.moe import MoE, count, routers
from headwater.ops.experts import grouped_linear


def moe_of(seed=0, **settings):
    shape = {"dim": 16, "mlp_dim": 24, "pattern": "kda", "heads": 2, "layers": 1}
    experts = {"experts": 6, "experts_per_token": 2, "expert_scale": 1.7}
    model = model_of("standard", seed, **shape | experts | settings)
    return model.sublayers[1].body.double()


def by_token(moe: MoE, x):
    """The formula, one token after the other."""
    router, expert, outputs = moe.router, moe.experts, []
    for token in x.flatten(0, -2):
        scores = torch.sigmoid(router.weight @ token)
        ranked = (scores + router.bias).argsort(descending=True)
        chosen = ranked[: router.chosen].tolist()
        weights = router.scale * scores / scores[chosen].sum()
        y = moe.shared(token) if moe.shared is not None else 0
        for e in chosen:
            gate, up = expert.gate[e] @ token, expert.up[e] @ token
            hidden = F.silu(gate) * up
            y = y + weights[e] * (expert.output[e] @ hidden)
        outputs.append(y)
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize(
    "settings", [{}, {"shared_experts": 0}, {"shared_experts": 2}, {"experts_per_token": 6}]
)
def test_it_is_the_formula(settings):
    moe = moe_of(**settings)
    moe.router.bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    seeds, parameters = [torch.randn_like(x)], [*moe.parameters()]
    outputs = (moe(x), by_token(moe, x))
    results = [with_gradients([y], parameters, seeds) for y in outputs]
    assert_close(*results)


def test_the_bias_chooses_and_does_not_weigh():
    moe, x = moe_of(), torch.randn(50, 16, dtype=torch.float64)
    moe.router.bias[3] = 10.0
    routes = moe.router(x)
    assert (routes.experts == 3).any(-1).all()
    scores = routes.scores.gather(1, routes.experts)
    shares = scores / scores.sum(-1, keepdim=True)
    assert_close(routes.weights, 1.7 * shares)
    assert not moe.router.bias.requires_grad


def test_scores_are_fp32_under_autocast():
    """In bf16 experts that are nearly even would be chosen by rounding."""
    router, x = moe_of().router.float(), torch.randn(50, 16)
    with torch.autocast("cpu", torch.bfloat16):
        scores = router(x).scores
    assert torch.equal(scores, router(x).scores)


def test_no_token_is_dropped_where_all_want_one_expert():
    moe = moe_of(experts_per_token=1, shared_experts=0)
    x = torch.randn(1000, 16, dtype=torch.float64)
    moe.router.bias[2] = 10.0
    expert = moe.experts
    gate, up = x @ expert.gate[2].T, x @ expert.up[2].T
    hidden = F.silu(gate) * up
    assert_close(moe(x), 1.7 * hidden @ expert.output[2].T)
    assert moe.router.load.tolist() == [0, 0, 1000, 0, 0, 0]


def grouped_results(backend, ends, rest=False):
    torch.manual_seed(0)
    leaves = leaves_of([torch.randn(40, 8), torch.randn(4, 12, 8)])
    bounds = torch.tensor(ends, dtype=torch.int32)
    y = grouped_linear(*leaves, bounds, rest=rest, backend=backend)
    return with_gradients([y], leaves, [torch.randn(40, 12)])


ENDS = [[10, 20, 30, 40], [0, 40, 40, 40], [0, 0, 0, 40], [3, 3, 39, 40]]


@pytest.mark.parametrize("ends", ENDS)
def test_grouped_products_are_the_plain_ones(ends):
    """torch's grouped product runs on a CPU too, where it is slow."""
    expected = grouped_results("loop", ends)
    for backend in ("grouped", "copied"):
        results = grouped_results(backend, ends)
        assert_close(results, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "grouped", "copied"])
def test_rows_of_nobody_give_zeros(backend):
    y, d_x, d_weight = grouped_results(backend, [5, 5, 20, 25], rest=True)
    assert not y[25:].any()
    assert not d_x[25:].any()
    whole, d_whole, _ = grouped_results("loop", [5, 5, 20, 40])
    assert_close(y[:25], whole[:25], atol=1e-5, rtol=1e-5)
    assert_close(d_x[:25], d_whole[:25], atol=1e-5, rtol=1e-5)
    assert d_weight.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 6, 7)}, r"got \(40, 8\), \(4, 6, 7\) and \(4,\)"),
        ({"ends": torch.zeros(4)}, "ends be int32"),
        ({"backend": "cutlass"}, "'auto', 'loop', 'grouped' or 'copied', got 'cutlass'"),
    ],
)
def test_grouped_products_name_what_does_not_fit(change, message):
    arguments = {"x": torch.zeros(40, 8), "weight": torch.zeros(4, 6, 8)}
    arguments["ends"] = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        grouped_linear(**arguments | change)


def test_load_is_counted_in_training_alone():
    model, tokens = model_of("standard", **KIMI), tokens_of()
    assert list(routers(model)) == [f"sublayers.{i}.body.router" for i in (3, 5, 7)]

    def loads():
        return [int(router.load.sum()) for router in routers(model).values()]

    with torch.no_grad():
        model(tokens)
    model.eval()(tokens)
    assert loads() == [0] * 3
    model.train()(tokens)
    assert loads() == [2 * tokens.numel()] * 3
    choices = torch.tensor([[0, 2], [2, 3]])
    assert count(choices, 5).tolist() == [1, 0, 2, 1, 0]


def test_the_bias_is_saved_and_moves_toward_the_mean(tmp_path):
    model = model_of("standard", **KIMI)
    router = routers(model)["sublayers.3.body.router"]
    router.move_bias(torch.tensor([10.0, 0.0, 5.0, 5.0]), 0.01)
    assert router.bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.0])
    model.save(tmp_path)
    loaded = routers(Decoder.load(tmp_path))["sublayers.3.body.router"]
    assert torch.equal(loaded.bias, router.bias)
    assert "sublayers.3.body.router.load" not in model.weights()


@pytest.mark.slow
def test_after_200_steps_the_load_is_less_than_half_as_uneven():
    """A few tokens make most of the text: without the rule, they all choose the same experts."""

    def unevenness(rate):
        torch.manual_seed(0)
        config = ModelConfig(
            vocab_size=32, dim=16, layers=1, heads=2, mlp_dim=24, context=16,
            experts=8, experts_per_token=2, router_rate=rate,
        )  # fmt: skip
        model = Decoder(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        likely = torch.arange(1, 33).float().reciprocal()
        generator = torch.Generator().manual_seed(1)
        spreads = []
        for step in range(200):
            tokens = torch.multinomial(likely, 8 * 17, True, generator=generator).view(8, 17)
            logits = model(tokens[:, :-1])
            following = tokens[:, 1:].flatten()
            F.cross_entropy(logits.flatten(0, 1), following).backward()
            optimizer.step()
            optimizer.zero_grad()
            for router in routers(model).values():
                if step >= 180:
                    spread = router.load.std(correction=0) / router.load.mean()
                    spreads.append(spread.item())
                router.move_bias(router.load, rate)
                router.load.zero_()
        return sum(spreads) / len(spreads)

    assert unevenness(0.01) < 0.5 * unevenness(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="grouped products in bf16 run on a GPU")
@pytest.mark.parametrize("ends", [[100, 200, 300, 400], [0, 400, 400, 400], [3, 3, 399, 400]])
def test_grouped_products_on_a_gpu(ends):
    torch.manual_seed(0)
    x, weight = torch.randn(400, 64), torch.randn(4, 32, 64)
    along, bounds = torch.randn(400, 32), torch.tensor(ends, dtype=torch.int32)

    def run(dtype, device, backend):
        leaves = [t.bfloat16().to(device, dtype).requires_grad_() for t in (x, weight)]
        y = grouped_linear(*leaves, bounds.to(device), backend=backend)
        return [
            t.double().cpu() for t in (y, *torch.autograd.grad(y, leaves, along.bfloat16().to(y)))
        ]

    truth = run(torch.float64, "cpu", "loop")
    plain = run(torch.bfloat16, "cuda", "loop")
    for exact, loop, grouped in zip(truth, plain, run(torch.bfloat16, "cuda", "auto")):
        assert (grouped - exact).abs().max() <= 2 * (loop - exact).abs().max() + 1e-3
