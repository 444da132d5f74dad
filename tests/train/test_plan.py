"""The planner against what a real step keeps alive, and on grids nobody here has."""

import weakref

import pytest
import torch
from tinyrun import changed, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater.cli import main
from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import attention
from headwater.runs.settings import Config
from headwater.train.distributed.plan import describe, in_flight, make_plan
from headwater.train.distributed.stages import prune
from headwater.train.loop import accumulate, update
from headwater.train.run import begin

SHAPE = {"vocab_size": 64, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "mlp_dim": 32}
SHAPE["context"] = 8


def plan_of(model: dict, world: int, **settings):
    config = changed(Config(), **settings)
    return make_plan(config, ModelConfig(**SHAPE | model), world, half=False, fused=False)


class Live(TorchDispatchMode):
    """Bytes of all storages that operations inside have made and nobody has freed, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.known.pop, storage._cdata, None)
            self.peak = max(self.peak, sum(self.known.values()))

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out


@pytest.mark.parametrize(
    ("residual", "checkpointing"),
    [
        ("standard", True),
        ("attnres-block:block=4", False),
        ("attnres-full", True),
        ("attnres-full", False),
        ("hyper-connections", True),
    ],
)
def test_the_peak_of_a_real_step_is_within_a_tenth(tmp_path, residual, checkpointing):
    shape = {"residual": residual, "layers": 6, "dim": 64, "mlp_dim": 192}
    config = tiny(tmp_path, batch_size=32, checkpoint_activations=checkpointing, **shape)
    run = begin(config, tmp_path / "run", resume=False)
    with Live() as live:
        for parameter in run.model.parameters():
            live.add(parameter)
        for number in (1, 2):  # the optimizer has its moments from the first on
            update(run, number, accumulate(run, number))
    plan = make_plan(config, run.whole.config, 1, half=False, fused=False).ranks[0]
    assert plan.parameters == run.whole.parameter_count()["total"]
    assert plan.peak(checkpointing) == pytest.approx(live.peak, rel=0.1)


def test_bytes_and_bubble_of_a_grid(monkeypatch):
    # Sources alone are sent, however a stage reads them
    monkeypatch.setattr(attention, "WORTH_TWO_PHASES", 0)
    model = {"layers": 8, "residual": "attnres-block:block=2"}
    layout = {"batch_size": 32, "accumulate": 8, "pipeline": 4, "chunks": 2}
    plan = plan_of(model, 8, **layout)
    unit = 2 * 8 * 16 * 4  # windows of a micro-batch, tokens, channels, bytes
    for sizes, tensors in ((plan.hops, "2343333"), (plan.hops_without_cache, "2345678")):
        assert [size // unit for size in sizes] == list(map(int, tensors))
    assert plan.bubble == pytest.approx(3 / (8 * 2 + 3))
    assert sum(rank.sends for rank in plan.ranks) == 8 * sum(plan.hops)
    assert len(plan.ranks) == 4
    with pytest.raises(UserError, match="must divide the number of processes, 6"):
        plan_of(model, 6, **layout)
    with pytest.raises(UserError, match=r"parallel.shard \(3\) must divide the 2 ranks"):
        plan_of(model, 8, **layout, shard=3)


def test_without_a_row_of_ranks_a_plan_has_neither_chunks_nor_cuts():
    """A run that was begun in a pipeline goes on in one process."""
    plan = plan_of({}, 1, chunks=2, cuts=(3,))
    assert plan == plan_of({}, 1)
    assert "every rank fits" in describe(plan, 80, False)


def test_tensor_parallelism_divides_what_it_should():
    """States by N; weights of bodies by N, of the rest not; a gather and a scatter of (B, T, D) in every sublayer."""
    model = {"residual": "attnres-block:block=2"}
    one = plan_of(model, 1, batch_size=4).ranks[0]
    two = plan_of(model, 2, batch_size=4, tensor=2).ranks[0]
    bodies = 4 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    assert one.parameters - two.parameters == bodies / 2
    assert two.checkpointed == one.checkpointed / 2
    assert one.activations / 2 < two.activations < one.activations  # the gathered inputs are whole
    assert (one.exchanges, two.exchanges) == (0, 2 * (4 * 8 * 16 * 4) / 2)
    # Each rank has the logits of its tokens
    assert two.head == pytest.approx(one.head / 2, rel=0.01)
    for changes, message in (
        ({"context": 9}, "must divide model.context, 9"),
        ({"kv_heads": 1}, "must divide model.kv_heads, 1"),
        ({"value_residual": True}, "value_residual"),
        ({"residual": "ddl:width=2,compress=token"}, "compress=token' looks at earlier tokens"),
    ):
        with pytest.raises(UserError, match=message):
            plan_of(model | changes, 2, batch_size=4, tensor=2)


def test_sharding_divides_the_weights_and_gathers_a_layer_at_a_time():
    """16 bytes a parameter over the shards; then the bodies of a layer, and all the rest with gradients, are whole."""
    layer, rest = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32, 2 * 64 * 16 + 9 * 16
    whole = 4 * layer + rest
    divided = 8 * whole + 8 * rest, 2 * whole
    fetched = 8 * whole + 4 * layer + 8 * rest, 2 * whole
    for world, settings, expected in (
        (1, {}, (16 * whole, 4 * whole)),
        # The second micro-batch finds the gradients of the first.
        (1, {"accumulate": 2}, (16 * whole, 0)),
        (2, {"shard": 1}, (16 * whole, 4 * whole)),
        (2, {}, fetched),
        (4, {"shard": 2}, fetched),
        (2, {"tensor": 2}, divided),  # bodies stay as they are
    ):
        plan = plan_of({}, world, batch_size=8, **settings).ranks[0]
        assert (plan.static, plan.late) == expected, (world, settings)


@pytest.mark.parametrize("residual", ["hyper-attnres", "ddl:width=2,compress=token,expand=token"])
def test_parameters_of_a_residual_in_parts_are_counted_where_they_are(residual):
    model = ModelConfig.named("nano", vocab_size=256, residual=residual, layers=2)
    config = changed(Config(), pipeline=2, batch_size=2, accumulate=2)
    plan = make_plan(config, model, 2, half=True, fused=True)
    for rank, bounds in zip(plan.ranks, ((0, 2), (2, 4)), strict=True):
        stage = prune(Decoder(model), *bounds)
        assert rank.parameters == sum(p.numel() for p in stage.parameters())


@pytest.mark.parametrize(("schedule", "flights"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (8,) * 4)])
def test_activations_are_those_of_the_passes_in_flight(schedule, flights):
    """Four ranks with equal layers: the first waits for four backwards, the last for one."""
    assert tuple(in_flight(schedule, 4, 1, 8, rank) for rank in range(4)) == flights
    layout = {"batch_size": 16, "accumulate": 8, "pipeline": 4, "pipeline_schedule": schedule}
    ranks = plan_of({"layers": 8}, 4, **layout).ranks
    for kept in ("activations", "checkpointed"):
        _, second, third, last = (
            getattr(rank, kept) / flight for rank, flight in zip(ranks, flights, strict=True)
        )
        assert second == third > 0
        assert last == pytest.approx(third, rel=0.2)  # the head is counted apart


def test_passes_in_flight_of_chunks_and_of_few_micro_batches():
    assert [in_flight("1f1b", 4, 2, 8, rank) for rank in range(4)] == [11, 9, 7, 5]
    assert in_flight("1f1b", 4, 1, 2, 0) == 2
    assert in_flight("1f1b", 1, 1, 8, 0) == 1


def test_the_command_warns_before_a_run_that_will_not_fit(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nsize = "nano"\n[train]\nbatch_size = 64\naccumulate = 8\n')
    for layout, words in (
        ("--world 4 --pipeline 2 --chunks 2 --memory 0.001", "WARNING: ranks 0, 1 need more than"),
        ("--world 4 --pipeline 2 --chunks 2", "bubble 5.9%"),
        ("--memory 80", "every rank fits into 80 GiB"),
        ("--world 4 --tensor 2", "tensor parallelism: a rank sends up to"),
    ):
        assert main(["plan", str(file), *layout.split()]) == 0
        assert words in capsys.readouterr().out
