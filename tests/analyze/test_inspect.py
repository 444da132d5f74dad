"""The inspector agrees with dense Jacobians, and with a loop over depth that is written out here."""

import base64
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tinymodels import inputs_of, model_of, tokens_of
from torch.testing import assert_close

import headwater
from headwater.analyze.inspector import removal
from headwater.analyze.inspector.look import _affordable
from headwater.analyze.inspector.page import ERROR, pack
from headwater.analyze.inspector.serve import InspectorServer
from headwater.analyze.inspector.shares import Shares
from headwater.analyze.inspector.subject import Subject, _scaled_head
from headwater.analyze.prompted import prompted_run
from headwater.cli import main
from headwater.errors import UserError
from headwater.models import Decoder, ModelConfig
from headwater.residuals import names
from headwater.residuals.record import linear_replay
from headwater.train.data.tokenizer import ByteTokenizer

SPECS = ["attnres-full", "attnres-block:block=2", "denseformer", "mhc", "ddl", "muddformer"]
WITHIN = {"atol": 1e-5, "rtol": 0}
LENGTH = 7


def scattered(spec, **settings):
    """A small model whose parameters are off their start, and a prompt."""
    model = model_of(spec, scatter=True, **{"layers": 2} | settings)
    return model, tokens_of(1, LENGTH)


def recorded(model, tokens):
    with torch.no_grad(), headwater.record(model.residual) as trace:
        model(tokens)
    return trace


def forward(model, tokens, without=None):
    """Reads, sources and logits of a pass; read i, the head's last, sees `without(i, x)` for x."""
    without = without or (lambda i, x: x)
    residual, rotary = model.residual, model.rotary(0, tokens.shape[1])
    x = model.embedding(tokens)
    state, reads, sources = residual.begin(x), [], [x]
    for i, sublayer in enumerate(model.sublayers):
        x, state = residual.read(state, i)
        reads.append(x)
        y, _ = sublayer(without(i, x), rotary, None, (), False)
        sources.append(y)
        state = residual.write(state, i, y)
    last = residual.end(state)
    logits = model.head(model.norm(without(len(reads), last)))
    return [*reads, last], sources, logits


def less(x, shares):
    """Each input less its share, and zero where nothing but rounding remains."""
    rests = []
    for part, share in zip(inputs_of(x), shares, strict=True):
        rest = part - share
        size, whole = (x.abs().amax(-1, keepdim=True) for x in (rest, part))
        rests.append(torch.where(size > 1e-5 * whole, rest, 0.0))
    return tuple(rests) if isinstance(x, tuple) else rests[0]


def nats(logits, tokens):
    losses = logits[0, :-1].log_softmax(-1)
    return -losses.gather(-1, tokens[0, 1:, None]).squeeze(-1)


def top_of(logits):
    return logits[0].softmax(-1).topk(3)


def shares_of(model, sources, read, source):
    """J v of each input of a read, J by the dense Jacobian of each token with the weights held."""
    leaves, reads = linear_replay(model.residual, sources)
    shares = []
    for x in inputs_of(reads[read]):
        rows = []
        for channel in range(x.shape[-1]):
            along = torch.zeros_like(x)
            along[..., channel] = 1
            (row,) = torch.autograd.grad(x, leaves[source], along, retain_graph=True)
            rows.append(row[0])
        jacobian = torch.stack(rows, 1)  # (T, D, D)
        shares.append(torch.einsum("tij,tj->ti", jacobian, sources[source][0]))
    return shares


@pytest.mark.parametrize("spec", SPECS)
def test_weights_words_and_effects_are_those_computed_directly(spec):
    model, tokens = scattered(spec)
    inspection = headwater.inspect(model, tokens, top=3)
    with torch.no_grad():
        reads, sources, logits = forward(model, tokens)
    first_inputs = [inputs_of(read)[0] for read in reads]
    assert_close(inspection.loss, nats(logits, tokens), **WITHIN)
    for top, parts in ((inspection.reads, first_inputs), (inspection.sources, sources)):
        for i, part in enumerate(parts):
            likeliest = top_of(model.head(model.norm(part)))
            assert_close(top.probabilities[i], likeliest.values.detach(), **WITHIN)
            assert torch.equal(top.ids[i], likeliest.indices)
    size = first_inputs[3][0].square().mean(-1).sqrt()
    assert_close(inspection.read_size[3], size, **WITHIN)
    shares = {}
    for read, source in inspection.pairs:
        v = sources[source][0]
        share = shares[read, source] = shares_of(model, sources, read, source)
        along, length = (share[0] * v).sum(-1), v.square().sum(-1)
        assert_close(inspection.mixing[read, source], along / length, **WITHIN)
    check_removals(model, tokens, inspection, shares, nats(logits, tokens))


@torch.no_grad()
def check_removals(model, tokens, inspection, shares, loss):
    for source in range(5):
        sizes = []  # what remains of each read, as a part of it

        def without(i, x, source=source, sizes=sizes):
            rest = less(x, shares[i, source]) if source <= i else x
            for part, whole in zip(inputs_of(rest), inputs_of(x), strict=True):
                size = part.norm(dim=-1) / whole.norm(dim=-1)
                sizes.extend(size.flatten().tolist())
            return rest

        logits = forward(model, tokens, without)[2]
        # Where less than a hundredth of a read remains, its norm enlarges rounding by as much.
        smallest = min((size for size in sizes if size), default=1)
        within = {"atol": 1e-5 * max(1, 0.01 / smallest), "rtol": 0}
        assert_close(inspection.removed.loss[source], nats(logits, tokens) - loss, **within)
        likeliest = top_of(logits)
        assert_close(inspection.removed.top.probabilities[source], likeliest.values, **within)
        assert torch.equal(inspection.removed.top.ids[source], likeliest.indices)
    for place, (read, source) in enumerate(inspection.pairs):

        def without_at(i, x, read=read, source=source):
            return less(x, shares[read, source]) if i == read else x

        logits = forward(model, tokens, without_at)[2]
        effect = inspection.removed_at
        assert_close(effect.loss[place], nats(logits, tokens) - loss, **WITHIN)
        assert torch.equal(effect.top.ids[place, :, 0], logits[0].argmax(-1))


def test_a_prompt_in_place_of_a_run_has_sizes_over_tokens_and_channels():
    """The report draws them beside those of runs, which are root mean squares of all numbers."""
    model, tokens = scattered("attnres-full")
    inspection = headwater.inspect(model, tokens, removals="none")
    run = prompted_run(inspection, dim=32, layers=2)
    with torch.no_grad():
        reads, sources, _ = forward(model, tokens)
    (record,) = run.depth
    for name, parts in (("read_norm", reads), ("output_norm", sources[1:])):
        sizes = [part.square().mean().sqrt() for part in parts]
        assert_close(torch.tensor(record[name]), torch.stack(sizes), **WITHIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_read_whose_only_source_goes_not_even_rounding_is_left(dtype):
    x = torch.randn(4, 32).to(dtype)
    rounded = torch.nextafter(x, torch.full_like(x, 9.0))
    assert not removal.less(x, rounded).any()
    assert torch.equal(removal.less(x, 0.5 * x), x - 0.5 * x)


@pytest.mark.parametrize("spec", [*names(), "ddl:width=2,compress=token", "attnres-full:heads=4"])
def test_shares_of_all_sources_sum_to_the_read(spec):
    """Whatever mixes: taking everything away at the output head leaves nothing of what it reads."""
    model, tokens = scattered(spec)
    trace = recorded(model, tokens)
    shares = Shares(model.residual, trace.sources, trace.reads)
    for i, read in enumerate(trace.reads):
        for stream, part in enumerate(inputs_of(read)):
            total = sum(shares.of(i, source, stream) for source in range(i + 1))
            assert_close(total, part[0], atol=1e-4, rtol=1e-4)
    inspection = headwater.inspect(model, tokens, removals="none")
    assert (inspection.residual, len(inspection.mixing)) == (model.residual.spec, 5)


def test_heads_and_inputs_have_weights_of_their_own():
    model, tokens = scattered("attnres-full:heads=4")
    inspection = headwater.inspect(model, tokens, removals="none")
    assert list(inspection.parts) == ["head 1", "head 2", "head 3", "head 4"]
    for i, weights in enumerate(recorded(model, tokens).weights):
        for head, part in enumerate(inspection.parts.values()):
            assert_close(part[i, : i + 1], weights[:, 0, :, head], **WITHIN)
    assert inspection.removed is inspection.removed_at is None
    inspection = headwater.inspect(*scattered("muddformer"), removals="sources")
    assert list(inspection.parts) == ["query", "key", "value"]
    query, _, value = inspection.parts.values()
    assert (query - value).abs().max() > 1e-2
    assert torch.equal(query, inspection.mixing)
    assert inspection.removed.loss.shape == (5, LENGTH - 1)


def test_experts_are_those_that_the_routers_chose():
    """The decoder has KDA, MLA and mixtures of experts."""
    mixture = {"pattern": "kda:mla", "experts": 4, "expert_dim": 8}
    model, tokens = scattered("attnres-full", **mixture)
    model.eval()
    inspection = headwater.inspect(model, tokens, removals="none")
    assert inspection.kinds == ("kda", "moe", "mla", "moe")
    assert list(inspection.experts) == [1, 3]
    trace = recorded(model, tokens)
    for i in (1, 3):
        sublayer = model.sublayers[i]
        routes = sublayer.body.router(sublayer.norm(trace.reads[i][0]))
        weights, order = routes.weights.sort(-1, descending=True)
        assert_close(inspection.experts[i].probabilities, weights.detach(), **WITHIN)
        assert torch.equal(inspection.experts[i].ids, routes.experts.gather(-1, order))
    listed = json.loads(inspection.to_json())["experts"]["3"]["ids"]
    assert listed == inspection.experts[3].ids.tolist()


def test_an_untrained_model_says_so_and_a_trained_one_does_not():
    for spec in ("attnres-block:block=2", "mhc", "ddl", "standard"):
        for scatter in (False, True):
            model = model_of(spec, layers=2, scatter=scatter)
            notes = headwater.inspect(model, tokens_of(1, 4), removals="none").notes
            untrained = spec != "standard" and not scatter
            assert [note.partition(":")[0] for note in notes] == ["Not trained"] * untrained


def test_as_json_everything_is_there_in_plain_numbers():
    model = model_of("attnres-full:heads=2", scatter=True, layers=1)

    class Letters:
        def decode(self, ids):
            return "" if ids[0] == 3 else f"<{ids[0]}>"

    inspection = headwater.inspect(model, [3, 4, 5], tokenizer=Letters(), name="mine")
    data = json.loads(inspection.to_json())
    assert data["tokens"] == ["#3", "<4>", "<5>"]
    assert (data["name"], data["residual"]) == ("mine", "attnres-full:heads=2")
    assert data["kinds"] == ["attention", "mlp"]
    data["removed_loss"] = data["removed_at"]["loss"]
    expected = {"removed_loss": inspection.removed_at.loss}
    for name in ("mixing", "loss", "read_size", "source_size"):
        expected[name] = getattr(inspection, name)
    for name, values in expected.items():
        assert_close(torch.tensor(data[name]), values, atol=1e-6, rtol=1e-6)
    assert data["reads"]["ids"] == inspection.reads.ids.tolist()
    assert set(data["parts"]) == {"head 1", "head 2"}
    # It prints as one line.
    line = "<Inspection of mine: 3 tokens, 3 reads; .save('inspect.html') writes its page>"
    assert repr(inspection) == line


def test_the_model_is_left_as_it_was():
    model = model_of("attnres-block:block=2", scatter=True, layers=2).train()
    model.sublayers[1].eval()  # which its owner has frozen
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    headwater.inspect(model, tokens_of(1, 4))
    assert [module.training for module in model.modules()] == modes
    for name, p in model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[name])


def test_what_does_not_fit_is_refused():
    model = model_of("attnres-full", layers=1)
    for tokens, words in (
        ([1], "two tokens at least, .* got 1"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, r"give ...\['input_ids'\]"),
        ([[1, 2], [3, 4]], "one prompt"),
        ([1, 48], "0 and 47"),
        ([1] * 33, "context of 32"),
        ("a text", r"give tokenizer.encode\(text\)"),
    ):
        with pytest.raises(UserError, match=words):
            headwater.inspect(model, tokens)
    linear = torch.nn.Linear(4, 4)
    network = torch.nn.Sequential(headwater.build("attnres-full", 4, 2), linear)
    for other, words in ((linear, "convert it first"), (network, "converted; got a Sequential")):
        with pytest.raises(UserError, match=words):
            headwater.inspect(other, [1, 2])


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, lambda y: y),
        ({"logits_scaling": 4.0}, lambda y: y / 4),
        ({"logits_mup_width_multiplier": 2.0}, lambda y: y / 2),
        ({"logit_scale": 0.5}, lambda y: y / 2),
        ({"final_logit_softcapping": 3.0}, lambda y: 3 * torch.tanh(y / 3)),
        ({"logits_soft_cap": 2.0}, lambda y: 2 * torch.tanh(y / 2)),
        ({"unpadded_vocab_size": 5}, lambda y: y[..., :5]),
    ],
)
def test_logits_are_scaled_capped_and_cut_as_a_config_says(settings, change):
    """Architectures of transformers each have some of these settings."""
    head, x = torch.nn.Linear(4, 7), torch.randn(2, 4)
    logits = _scaled_head(head, SimpleNamespace(**settings))(x)
    assert_close(logits, change(head(x)))


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([0, 255], 1),
        ([3, 300], 2),  # two bytes, though half of the span would fit in one
        ([-1, 2**16], 3),
        ([0, 2**24], 4),
        ([0.0, 200 * 2 * ERROR], 1),
        ([-0.5, 0.1, 0.5], 2),
        ([0.0, 100.0], 3),
    ],
)
def test_numbers_travel_in_as_few_bytes_as_keep_them(values, size):
    packed = pack(np.array(values))
    data = base64.b64decode(packed["data"])
    assert len(data) == size * len(values)
    assert packed["bytes"] == size
    for number, value in enumerate(values):
        integer = int.from_bytes(data[number * size : (number + 1) * size], "little")
        restored = packed["low"] + packed["step"] * integer
        assert abs(restored - value) <= (ERROR if isinstance(value, float) else 0)


def test_pairs_are_left_out_where_they_would_take_long():
    with torch.device("meta"):
        shape = {"layers": 12, "vocab_size": 500000, "residual": "attnres-block"}
        large = Decoder(ModelConfig.named("large", **shape))
    assert _affordable(Subject(large), 128) == "sources"
    assert _affordable(Subject(model_of("attnres-block")), 32) == "pairs"


def saved(folder, spec="attnres-full"):
    """A decoder as `headwater export` writes it."""
    folder.mkdir()
    model_of(spec, scatter=True, layers=1, vocab_size=257).save(folder)
    ByteTokenizer().save(folder)
    return folder


def test_the_command_writes_one_page_of_one_model_or_of_two(tmp_path, capsys):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two", "standard")
    page = tmp_path / "pages" / "inspect.html"
    words = ["--prompt", "a river", "--out", str(page)]
    assert main(["inspect", str(one), *words]) == 0
    assert str(page) in capsys.readouterr().out
    assert "<title>Inside one ·" in page.read_text()
    words += ["--top", "2", "--removals", "sources"]
    assert main(["inspect", str(one), str(two), *words]) == 0
    text = page.read_text()
    assert "<title>Inside one and two ·" in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    for model in json.loads(data)["models"]:
        assert model["reads"]["count"] == 2
        assert model["removedAt"] is None


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    one = saved(tmp_path / "one")
    notes = tmp_path / "mine.txt"
    notes.write_text("my notes")
    for words, message in (
        ([one, one, one], "one model or two"),
        ([one, "--top", "0"], "--top must be at least 1"),
        ([one, "--prompt", "def f(", "--serve", "--port", "99999"], "port 99999"),
        ([tmp_path / "none"], "no checkpoint in"),
        ([one, "--prompt", "def f(", "--out", notes], "is no web page"),
        ([one, "--device", "cuda:99"], "--device must be"),
    ):
        assert main(["inspect", *map(str, words)]) == 1
        assert message in capsys.readouterr().err
    assert notes.read_text() == "my notes"


def test_the_command_serves_until_it_is_stopped(tmp_path, capsys, monkeypatch):
    def stop(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(InspectorServer, "serve_forever", stop)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(saved(tmp_path / "one")), "--serve", "--prompt", "def f("]) == 0
    address, how, stopped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    assert "Ctrl-C stops it" in how
    assert stopped == "stopped"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
