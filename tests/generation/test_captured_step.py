"""Decoding steps in fused launches and as CUDA graphs: the tokens of the forward pass."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tinykimi import KIMI
from tinymodels import model_of
from torch.testing import assert_close

from headwater.generation.captured_step import CapturedSteps, GeneralStep, step_of
from headwater.generation.fused_step import FusedStep, can_step, fused_step
from headwater.generation.generate import generate, stream
from headwater.generation.prompts import CachedReader, DeviceReader
from headwater.generation.sampling import Sampling
from headwater.residuals import StandardResidual, names

GPU = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
ROWS = 3
FUSED = ["standard", "attnres-full", *(f"attnres-block:block={size}" for size in (2, 3, 8))]
SHAPES = {"": {}, "qk_norm": {"qk_norm": True}, "tied": {"tie_embeddings": True}}


def on_gpu(*values):
    return [pytest.param(value, marks=gpu) for value in values]


def cache_of(model, prompts, room=24):
    """A cache that has the prompts, whose lengths only the device knows."""
    rows = sorted(prompts, key=len)
    reader = CachedReader(model, rows, room - len(rows[-1]), None)
    with torch.no_grad():
        reader.read_prompts()
    reader.cache.lengths.even = None
    return reader.cache


def captured_steps(model, prompts, *draw, room=24):
    cache, device = cache_of(model, prompts, room), model.embedding.weight.device
    return CapturedSteps(step_of(model, cache), len(prompts), device, *draw)


def step_over(model, cache, backend):
    step = fused_step(model, cache, backend)
    assert step is not None
    return step


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", FUSED)
def test_the_fused_step_computes_the_forward_pass(spec, shape):
    """Over the references of its parts, in fp64, so that no error of the plan hides; with caches."""
    model = model_of(spec, scatter=True, **SHAPES[shape]).double().eval()
    fused_cache, cache = (cache_of(model, PROMPTS) for _ in range(2))
    fused, general = step_over(model, fused_cache, "reference"), GeneralStep(model, cache)
    with torch.no_grad():
        for token in range(3):
            tokens = torch.tensor([token, token + 1, token + 2])
            assert_close(fused(tokens), general(tokens), atol=1e-9, rtol=1e-9)
    for fused_entry, entry in zip(fused_cache.entries, cache.entries):
        if entry is not None:
            assert_close(fused_entry.tensors(), entry.tensors())
    assert fused_cache.lengths.tokens.tolist() == [4, 6, 10]


@pytest.mark.skipif(GPU, reason="the interpreter is off where there is a GPU")
# Launches of the embedding, the layers and the head.
@pytest.mark.parametrize(("rows", "launched"), [(1, 1 + 2 * 5 + 1), (2, 1 + 2 * 7 + 2)])
def test_the_fused_step_over_its_kernels(rows, launched, monkeypatch):
    pytest.importorskip("triton", reason="the kernels need triton")
    from headwater.ops.decode import attention, projection, span, token
    from headwater.ops.triton.launch import launch

    launches = []

    def counted(*args, **options):
        launches.append(args[0])
        launch(*args, **options)

    for part in (attention, projection, span, token):
        monkeypatch.setattr(part, "launch", counted)
    model = model_of("attnres-block:block=3", scatter=True, layers=2).eval()
    logits = []
    with torch.no_grad():
        for backend in ("triton", "reference"):
            step = step_over(model, cache_of(model, PROMPTS[:rows]), backend)
            logits.append(step(torch.arange(3, 3 + rows)))
    assert_close(*logits, atol=2e-5, rtol=2e-5)
    assert len(launches) == launched + 2  # and one for each block


def test_residuals_without_a_form_for_one_token():
    stream = torch.zeros(1, 32)
    for spec in ("mhc", "attnres-block:heads=2", "attnres-block:backend=reference"):
        assert model_of(spec).residual.one_token(stream, "auto") is None

    subclass = type("Mine", (StandardResidual,), {})
    assert subclass(32, 8).one_token(stream, "auto") is None


def test_parts_that_kernels_cannot_read():
    assert can_step(model_of("standard"))
    assert not can_step(model_of("standard", shortswa=3))
    assert not can_step(model_of("standard", value_residual=True))
    assert not can_step(model_of("standard", **KIMI))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_step(model_of("standard"))
    wrapped, biased, watched, mixed = (model_of("standard") for _ in range(4))
    body = wrapped.sublayers[0].body
    # As adapters do, with the weight inside.
    body.query = torch.nn.Sequential(body.query, torch.nn.Identity())
    biased.sublayers[1].body.output = torch.nn.Linear(48, 32)
    watched.sublayers[1].body.register_forward_hook(lambda *_: None)
    mixed.head.double()
    assert not any(can_step(model) for model in (wrapped, biased, watched, mixed))


def as_on_a_gpu(monkeypatch):
    """Generate on a CPU by a GPU's steps: what is recorded runs again, tokens arrive at once."""
    monkeypatch.setattr("headwater.generation.generate.CachedReader", DeviceReader)
    monkeypatch.setattr(CapturedSteps, "_capture", lambda self: setattr(self, "replay", self._once))
    arrival = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(CapturedSteps, "_send", lambda self: (self.drawn.clone(), arrival))


SETTINGS = [
    {"temperature": 0.0, "stop": None},
    {"seed": 3, "top_p": 0.9, "ended": lambda row, new: len(new) > row},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"seed": 5, "repetition_penalty": 3.0, "top_k": 20},
]


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("standard", SETTINGS),
        ("attnres-block:block=3", SETTINGS[:2]),
        ("mhc", SETTINGS[:1]),  # what is done with logits knows of no residual
    ],
)
def test_a_host_that_is_behind_sees_the_same_tokens(spec, settings, monkeypatch):
    """Draws, penalties and stops do not wait for the host, however few tokens there are."""
    model = model_of(spec, scatter=True)
    stop = generate(model, PROMPTS, 3, temperature=0.0)[0][-1]

    def texts():
        rows = []
        for options in settings:
            options = {**options, "stop": stop} if "stop" in options else options
            rows += [generate(model, PROMPTS, count, **options) for count in (0, 1, 3, 14)]
        return rows

    expected = texts()
    as_on_a_gpu(monkeypatch)
    assert texts() == expected


def test_a_step_runs_with_its_own_gpu_as_the_current_one(monkeypatch):
    current, devices = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    def draw(logits):
        devices.append(current[-1])
        return logits.argmax(-1)

    steps = captured_steps(model_of("standard").eval(), PROMPTS, draw)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    with torch.no_grad():
        steps.run()
    assert devices[0] is steps.tokens
    assert not current


@pytest.fixture
def exact(monkeypatch):
    """Convolutions in fp32, too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


MODELS = {
    **{name: (name, {}) for name in names()},
    "qk_norm": ("attnres-block:block=3", {"qk_norm": True}),
    "looks back": ("ddl:width=2,compress=token,expand=token", {}),
    "short windows": ("attnres-block:block=2", {"shortswa": 3}),
    "value residual": ("attnres-block:block=2", {"value_residual": True}),
    "kimi": ("attnres-block:block=2", KIMI),
    "kimi, plain": ("standard", KIMI),
}


@pytest.mark.filterwarnings("error:decoding is not captured")
@pytest.mark.parametrize("kind", on_gpu(*MODELS))
def test_replayed_tokens_are_the_tokens(kind, exact):
    """Greedy, on the GPU, in fp32: without a cache, step by step, and as a graph; one row too."""
    spec, settings = MODELS[kind]
    model = model_of(spec, scatter=True, **settings).cuda()
    rows = generate(model, PROMPTS, 20, temperature=0.0, use_cache=False)
    assert generate(model, PROMPTS, 20, temperature=0.0, graph=False) == rows
    assert generate(model, PROMPTS, 20, temperature=0.0) == rows
    assert generate(model, PROMPTS[:1], 20, temperature=0.0) == rows[:1]
    sample = generate(model, PROMPTS, 20, seed=3, graph=False)
    assert generate(model, PROMPTS, 20, seed=3) == sample


def three_steps(model, batch, fused=False):
    """Logits of three steps after prompts of three tokens, in fp64."""
    prompts = [[1 + r % 40, 2, 3] for r in range(batch)]
    cache = cache_of(model, prompts)
    step = fused_step(model, cache) if fused else GeneralStep(model, cache)
    assert isinstance(step, FusedStep) == fused
    logits = [step(torch.full((batch,), token, device="cuda")) for token in range(3)]
    return torch.stack(logits).double()


@torch.no_grad()
@pytest.mark.parametrize("spec", on_gpu(*FUSED))
@pytest.mark.parametrize("batch", [1, 3, 20, 70])
def test_a_step_in_bf16_is_as_near_to_the_truth(spec, batch):
    """Logits against fp64: at most twice as far as the decoder's own pass in bf16."""
    shape = {"dim": 128, "heads": 4, "kv_heads": 2, "mlp_dim": 192, "qk_norm": True}
    model = model_of(spec, scatter=True, **shape).eval()
    truth = three_steps(model.double().cuda(), batch)
    general = three_steps(model.bfloat16(), batch)
    fused = three_steps(model, batch, fused=True)
    distances = [(logits - truth).norm() / truth.norm() for logits in (general, fused)]
    assert distances[1] <= 2 * distances[0] + 1e-4


@pytest.mark.parametrize("spec", on_gpu("standard", "attnres-block", "mhc"))
def test_steps_are_captured_and_stops_are_met(spec):
    model = model_of(spec, scatter=True).cuda()
    steps = captured_steps(model, PROMPTS)
    with torch.no_grad():
        for _ in range(3):
            steps.run()
    assert steps.replay is not None
    free = generate(model, PROMPTS, 14, temperature=0.0)
    stop = free[0][len(PROMPTS[0]) + 2]
    stopped = generate(model, PROMPTS, 14, temperature=0.0, stop=stop)
    for row, whole, prompt in zip(stopped, free, PROMPTS):
        new = whole[len(prompt) :]
        assert row == prompt + (new[: new.index(stop) + 1] if stop in new else new)
    greedy = Sampling(temperature=0.0)
    tokens = list(stream(model, PROMPTS, 14, greedy, ended=lambda row, new: len(new) > row))
    assert [sum(step[row] is not None for step in tokens) for row in range(ROWS)] == [1, 2, 3]
    assert len(tokens) == 3


@pytest.mark.parametrize("spec", on_gpu("standard", "attnres-block", "mhc"))
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 3, "top_p": 0.8, "repetition_penalty": 1.2},
    ],
)
def test_a_gpu_draws_the_tokens_of_a_cpu(spec, settings):
    """In fp32, token for token: prompts, steps and random numbers."""
    model = model_of(spec, scatter=True, context=128)
    rows = generate(model, PROMPTS, 100, **settings)
    assert generate(model.cuda(), PROMPTS, 100, **settings) == rows


@pytest.mark.parametrize("spec", on_gpu("attnres-block"))
def test_a_gpu_says_that_logits_are_no_numbers(spec):
    model = model_of(spec, scatter=True).cuda()
    token = generate(model, PROMPTS[:1], 3, temperature=0.0)[0][-1]
    model.embedding.weight.data[token] = torch.nan
    with pytest.raises(ValueError, match=r"after [123] new tokens the logits of prompt 0 are not"):
        generate(model, PROMPTS[:1], 20, temperature=0.0)


@pytest.mark.parametrize("spec", on_gpu("standard"))
def test_what_cannot_be_captured_goes_on_step_by_step(spec):
    """A draw that asks the GPU for a number."""
    model = model_of(spec, scatter=True).cuda()
    tokens = generate(model, PROMPTS[:1], 8, temperature=0.0)[0][7:]
    before = torch.cuda.current_stream()

    def draw(logits):
        return torch.full((1,), int(logits.argmax()), device="cuda")

    steps = captured_steps(model, PROMPTS[:1], draw)
    steps.tokens.fill_(tokens[0])
    with torch.no_grad(), pytest.warns(UserWarning, match="not captured as a CUDA graph"):
        sample = [int(steps.run().argmax()) for _ in range(7)]
    assert sample == tokens[1:]
    assert torch.cuda.current_stream() == before
    torch.randn(1, device="cuda")


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=two_gpus) for spec in ("standard", "attnres-block", "mhc")]
)
def test_a_gpu_that_is_not_the_current_one(spec):
    model = model_of(spec, scatter=True).to("cuda:1")
    rows = generate(model, PROMPTS, 20, temperature=0.0, use_cache=False)
    assert generate(model, PROMPTS, 20, temperature=0.0) == rows


@pytest.mark.parametrize("spec", on_gpu("standard", "attnres-block"))
def test_memory_does_not_grow_with_tokens(spec):
    model = model_of(spec, scatter=True, context=2100).cuda()
    steps, sizes = captured_steps(model, PROMPTS, room=2100), []
    with torch.no_grad():
        for number in range(2000):
            steps.run()
            if number in (10, 1999):
                torch.cuda.synchronize()
                sizes.append(torch.cuda.memory_allocated())
    assert sizes[0] == sizes[1]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", on_gpu("attnres-block", "kimi"))
def test_portions_of_a_prompt_see_what_the_whole_sees(kind, dtype):
    """The mask is never written out: tokens look at the past, and at new ones up to themselves."""
    spec, settings = MODELS[kind]
    heads = {"dim": 128, "heads": 4, "kv_heads": 2, "mlp_dim": 64, **settings}
    model = model_of(spec, scatter=True, **heads).to("cuda", dtype).eval()
    tokens = torch.arange(30, device="cuda")[None]
    whole, cache = model.hidden(tokens).float(), model.new_cache()
    portions = [model.hidden(part, cache) for part in tokens.split(11, 1)]
    limit = 0.05 if dtype == torch.bfloat16 else 1e-3
    assert (torch.cat(portions, 1).float() - whole).norm() <= limit * whole.norm()
