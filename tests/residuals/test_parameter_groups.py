"""Every parameter is in one group, and in the right one, whatever the model."""

import inspect

import pytest
import torch
from tinyhf import tiny_model
from torch import nn

import headwater
from headwater import Decoder, ModelConfig, param_groups
from headwater.residuals import names
from headwater.runs.settings import OptimSettings

HAVE_QUERIES = {
    "attnres-block",
    "attnres-full",
    "attnres-routed",
    "delta-attnres",
    "deepcrossattention",
    "depth-window",
    "hyper-attnres",
}


SHAPE = {"vocab_size": 32, "dim": 16, "layers": 2, "heads": 2, "mlp_dim": 32}


def members(model: nn.Module, **settings) -> dict[str, set[str]]:
    """The names of the parameters in each group; each parameter must be in one."""
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {"matrices": set(), "rest": set(), "queries": set()}
    count = 0
    for group in param_groups(model, lr=1.0, **settings):
        names_in_group = [names_by_id[id(p)] for p in group["params"]]
        count += len(names_in_group)
        groups[group["name"]].update(names_in_group)
    assert set().union(*groups.values()) == set(names_by_id.values()), "a parameter is missing"
    assert count == len(names_by_id), "a parameter is there twice"
    return groups


@pytest.mark.parametrize("residual", names())
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder(residual, tied):
    switches = {"qk_norm": True, "shortswa": 4, "value_residual": True, "tie_embeddings": tied}
    model = Decoder(ModelConfig(**SHAPE, **switches, residual=residual))
    actual = members(model)
    linears = [name for name, p in model.named_parameters() if p.ndim == 2]
    hidden = {name for name in linears if name.startswith("sublayers.")}
    assert actual["matrices"] == hidden
    assert len(hidden) == 22
    connections = [name for name, _ in model.residual.named_parameters("residual")]
    assert actual["queries"] == {name for name in connections if "query" in name}
    assert bool(actual["queries"]) == (residual in HAVE_QUERIES)


def test_rates_decay_and_names_reach_the_optimizer():
    model = Decoder(ModelConfig(**SHAPE, residual="attnres-block"))
    groups = param_groups(model, lr=0.5, weight_decay=0.2, query_lr=0.1)
    rows = []
    for group in torch.optim.AdamW(groups).param_groups:
        rows.append(tuple(group[key] for key in ("name", "lr", "weight_decay", "lr_factor")))
    assert rows == [
        ("matrices", 0.5, 0.2, 1.0),
        ("rest", 0.5, 0.0, 1.0),
        ("queries", 0.05, 0.0, 0.1),
    ]


class HeadNorm(nn.Module):
    """One row of weights a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))


class Own(nn.Module):
    """A model as somebody else would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        layer = {"linear": nn.Linear(8, 8), "norm": HeadNorm(), "positions": nn.Embedding(4, 8)}
        self.layers = nn.ModuleDict({"0": nn.ModuleDict(layer)})
        self.experts = nn.ModuleList([nn.Module()])
        self.experts[0].up = nn.Parameter(torch.zeros(3, 8, 8))
        self.experts[0].up_bias = nn.Parameter(torch.zeros(3, 8))
        self.mixer = headwater.build("attnres-full:query=projected", dim=8, sublayers=2)
        self.output = nn.Linear(8, 10)


def test_a_model_of_ones_own():
    actual = members(Own(), query_lr=0.1)
    assert actual["matrices"] == {"layers.0.linear.weight", "experts.0.up"}
    assert actual["queries"] == {"mixer.reads.1.query", "mixer.reads.2.query"}
    embeddings = {"words.weight", "output.weight", "layers.0.positions.weight"}
    assert embeddings <= actual["rest"]
    vectors = {"experts.0.up_bias", "layers.0.norm.weight", "mixer.reads.1.key_weight"}
    assert vectors <= actual["rest"]


def test_a_stack_in_a_dictionary_may_have_names_that_end_in_numbers():
    """Else only the MLPs of these layers would decay, which nn.Sequential numbers, and nothing else."""
    mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    layer = nn.ModuleDict({"attention": nn.Linear(8, 8), "mlp": mlp})
    layers = nn.ModuleDict({"layer0": layer})
    around = {"words": nn.Embedding(10, 8), "layers": layers, "output": nn.Linear(8, 10)}
    whole = members(nn.ModuleDict(around))
    matrices = {"layer0.attention.weight", "layer0.mlp.0.weight", "layer0.mlp.2.weight"}
    assert members(layers)["matrices"] == matrices
    assert whole["matrices"] == {f"layers.{name}" for name in matrices}


def test_attributes_that_differ_in_a_number_are_a_stack():
    """But a model in a model is none by its name: of this one the head would decay."""
    module = nn.Module()
    module.gpt2 = Own()
    expected = {f"gpt2.{name}" for name in members(module.gpt2)["matrices"]}
    for name in ("layer9", "layer10"):
        layer = nn.ModuleDict({"attention": nn.Linear(8, 8), "norm": HeadNorm()})
        setattr(module, name, layer)
        expected.add(f"{name}.attention.weight")
    assert members(module)["matrices"] == expected


@pytest.mark.parametrize(
    ("model_type", "matrix"), [("llama", "self_attn.q_proj"), ("gpt2", "attn.c_attn")]
)
def test_a_converted_model(model_type, matrix):
    model = tiny_model(model_type)
    plain = members(model)
    headwater.convert(model, "attnres-block", block=2)
    actual = members(model)
    assert actual["matrices"] == plain["matrices"]
    assert any(matrix in name for name in actual["matrices"])
    for part in ("norm", "ln_", "emb", "head"):
        assert not any(part in name for name in actual["matrices"])
    added = {name for name, _ in model.named_parameters() if ".residual." in name}
    queries = {name for name in added if name.endswith(".query")}
    assert actual["queries"] == queries != set()
    assert actual["rest"] == plain["rest"] | (added - queries)


def test_a_model_without_layers_is_refused_unless_nothing_decays():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"no parameter of this Linear is a matrix in a numbered"):
        param_groups(model, lr=1.0)
    (group,) = param_groups(model, lr=1.0, weight_decay=0.0)
    assert [p.ndim for p in group["params"]] == [2, 1]


def test_the_trainer_and_a_loop_of_ones_own_have_the_same_factor_by_default():
    parameters = inspect.signature(param_groups).parameters
    for name in ("query_lr", "weight_decay"):
        assert parameters[name].default == getattr(OptimSettings(), name)
