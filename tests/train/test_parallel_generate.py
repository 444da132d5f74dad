"""Two ranks continue prompts as one does: tokens, logits to 1e-5, the bytes of the formula."""

import copy
from unittest import mock

import pytest
import torch
from ranks import spawn, torchrun
from tinykimi import KIMI
from tinymodels import DIM, LAYERS, model_of, tokens_of
from torch.distributed.device_mesh import init_device_mesh

from headwater._torch import TorchDispatchMode
from headwater.errors import UserError
from headwater.generation.generate import Engine, generate
from headwater.generation.prompt_portions import choose_chunk
from headwater.residuals import names
from headwater.residuals.base import Watcher, watched
from headwater.train.distributed import generate as divided_generate
from headwater.train.distributed.generate import TensorParallelEngine, dividing
from headwater.train.distributed.ranks import connect

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [8], [9, 10, 11, 12], [30, 31, 32, 33]]
MODELS = {
    "attnres-block": ("attnres-block:block=3", {"qk_norm": True, "context": 64}),
    "kimi": ("attnres-block:block=3", KIMI),
}
LONG = 48  # new tokens of Block; of the others fewer
RANKS = 2


def test_two_ranks_continue_as_one():
    spawn(RANKS, continue_as_one)


def continue_as_one():
    connect("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, (spec, settings) in MODELS.items():
        whole = model_of(spec, scatter=True, **settings).eval()
        divided = TensorParallelEngine(copy.deepcopy(whole), mesh)
        ways = [(5, {"temperature": 0.0, "prefill_chunk": 3})]
        if name == "attnres-block":
            ways.append((LONG, {"temperature": 0.0}))
            ways.append((2, {"temperature": 0.0, "use_cache": False}))
            ways.append((5, {"top_p": 0.9, "seed": 3, "repetition_penalty": 1.3}))
        for new, options in ways:
            rows = generate(divided, PROMPTS, new, **options)
            assert rows == generate(whole, PROMPTS, new, **options), (name, options)
        with torch.no_grad():
            logits = shared_reader(divided, PROMPTS).read_prompts()
            expected = reader_of(Engine(whole), PROMPTS).read_prompts()
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    read_long_texts(mesh)
    count_bytes(mesh)
    agree_on_portions(mesh)


def reader_of(engine, prompts, chunk=None):
    return engine.reader(sorted(prompts, key=len), 1, chunk, True, False)


def shared_reader(engine, prompts, chunk=None):
    """The reader of each rank, below the agreement on tokens."""
    return reader_of(engine, prompts, chunk).reader


def agree_on_portions(mesh):
    """One rank has less memory than the other."""
    engine = TensorParallelEngine(model_of("attnres-block:block=3").eval(), mesh)
    least, free = 10**6, 10 ** (6 + mesh.get_local_rank())
    with mock.patch.object(divided_generate, "free_bytes", return_value=free):
        portion = shared_reader(engine, [[1] * 2000], "auto").chunk
    assert portion == choose_chunk(engine.model, 1, 2001, least)
    assert portion != choose_chunk(engine.model, 1, 2001, 10 * least)


@torch.no_grad()
def read_long_texts(mesh):
    """Every residual: logits and likeliest tokens after each of 256 tokens, 128 on a rank."""
    text, rank = tokens_of(batch=1, length=256), mesh.get_local_rank()
    for name in names():
        whole = model_of(name, scatter=True, layers=2, context=256).eval()
        divided = TensorParallelEngine(copy.deepcopy(whole), mesh)
        with dividing(divided.exchange):
            logits = divided.model(text.chunk(RANKS, 1)[rank], divided.model.new_cache())
        expected = whole(text).chunk(RANKS, 1)[rank]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4, msg=name)
        top, second = expected.topk(2).values.unbind(-1)
        clear = top - second > 1e-3
        assert clear.float().mean() > 0.9
        assert torch.equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear]), name


class Sent(TorchDispatchMode):
    """Bytes that a rank sends, of collectives that pass parts around a ring."""

    bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name, share = str(func), (RANKS - 1) / RANKS
        if "all_gather_into_tensor" in name:
            self.bytes += share * result.nbytes
        elif "reduce_scatter_tensor" in name or "all_reduce" in name:
            self.bytes += share * args[0].nbytes * (2 if "all_reduce" in name else 1)
        return result


class Longest(Watcher):
    """The most tokens that a state had, at reads of more than one token."""

    tokens = 0

    def read(self, residual, state, i, norm):
        self.tokens = max(self.tokens, *(tensor.shape[1] for tensor in state))
        return residual._read(state, i, norm)


def count_bytes(mesh):
    engine = TensorParallelEngine(model_of("attnres-block:block=3").eval(), mesh)
    reader, longest = shared_reader(engine, [list(range(12)), list(range(20, 32))]), Longest()
    per_token = 2 * (RANKS - 1) / RANKS * 2 * LAYERS * DIM * 4  # the formula for one row
    with torch.no_grad(), Sent() as sent, watched(engine.model.residual, longest):
        reader.read_prompts()
    assert sent.bytes == 2 * 12 * per_token
    assert longest.tokens == 5  # of 12, the last two are on both ranks
    with torch.no_grad(), Sent() as sent:
        reader.next_logits([[1], [2]])
    assert sent.bytes == 2 * per_token
    with pytest.raises(UserError, match=r"must divide model\.heads, 3"):
        TensorParallelEngine(model_of("standard", dim=24, heads=3, kv_heads=1), mesh)


def test_the_command_needs_as_many_processes(tmp_path):
    from headwater.cli import generate as command

    with pytest.raises(UserError, match="--tensor 3 needs as many processes, and there are 1"):
        command([str(tmp_path), "--tensor", "3"])


def test_the_command_under_torchrun(tmp_path, capsys):
    from headwater.cli import generate as command

    run, log = tmp_path / "run", tmp_path / "log"
    model_of("attnres-block:block=3", scatter=True, vocab_size=257).save(run)
    (run / "tokenizer.json").write_text('{"type": "bytes"}')
    words = [str(run), "--prompt", "def main", "--max-new-tokens", "6", "--temperature", "0"]
    command(words)
    script = tmp_path / "generate.py"
    script.write_text(
        f"from headwater.cli import generate\ngenerate({[*words, '--tensor', '2']!r})\n"
    )
    process = torchrun(log, "--standalone", "--nproc-per-node", "2", str(script))
    process.join(120)
    shown = log.read_text()
    assert process.exitcode == 0, shown
    assert capsys.readouterr().out.strip() in shown
    assert shown.count("tokens/s") == 1
