"""Continuing prompts with models of transformers: by every way the tokens are those of their own `generate`."""

from types import SimpleNamespace

import pytest
import torch
from tinyhf import stir, tiny_model
from tinymodels import model_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import headwater
from benchmarks import converted as converted_llama
from benchmarks import generate as benchmark
from headwater import cli, hf
from headwater.errors import UserError
from headwater.hf import generate as ways
from headwater.hf.formats.decoder import export_decoder
from headwater.hf.formats.folder import fast_tokenizer, write_model
from headwater.models.sampling import Sampling
from headwater.models.step import ReplayedSteps
from headwater.models.text import continue_texts

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
GPU = torch.cuda.is_available()


def converted(spec="attnres-block", model_type="llama", **settings):
    model = tiny_model(model_type, **settings)
    headwater.convert(model, spec, check=False)
    stir(model)
    return model


def own_tokens(model, prompts=PROMPTS, new=9):
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows = (torch.tensor([row], device=model.device) for row in prompts)
    return [model.generate(row, **options)[0].tolist() for row in rows]


def greedy(model, **ways):
    return headwater.generate(hf.TransformersEngine(model), PROMPTS, 9, temperature=0.0, **ways)


@pytest.mark.parametrize("model_type", ["kimi_linear", "bamba", "jamba", "bloom"])
def test_padding_does_not_reach_layers_that_keep_a_state(model_type):
    """Prompts are padded with token 0, whose embedding a new model has as zeros, and a trained one has not. Bloom
    has no such layers: it counts positions by the mask, which must be as long as its cache."""
    model, drawn = converted(model_type=model_type), [20, 21]
    engine = hf.TransformersEngine(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0].normal_()
        texts = [[torch.tensor([prompt + drawn[:n]]) for prompt in PROMPTS] for n in range(3)]
        own = [torch.cat([model(text).logits[:, -1] for text in some]) for some in texts]
        for chunk in (None, "auto") if model_type == "jamba" else (None, 1, 2, 3):
            reader = engine.reader(PROMPTS, 4, chunk, True, True)
            found = [reader.next_logits([drawn[:n]] * 3) for n in range(3)]
            torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def test_a_model_that_begins_anew_with_every_portion_reads_prompts_at_once():
    engine = hf.TransformersEngine(converted(model_type="jamba"))
    assert engine.reader([[5] * 300] * 64, 4, "auto", True, True).chunk == 300
    with pytest.raises(
        ValueError, match="prefill_chunk is 3, and jamba of transformers reads prompts at once"
    ):
        engine.reader(PROMPTS, 4, 3, True, True)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_rows_of_any_lengths_are_continued_as_each_alone(model_type):
    model = converted(model_type=model_type)
    own = own_tokens(model)
    assert greedy(model) == own
    assert greedy(model, prefill_chunk=2) == own
    assert greedy(model, use_cache=False) == own
    assert len({tuple(row[-9:]) for row in own}) > 1


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("gemma2", {}), ("gpt_oss", {}), ("llama4_text", {"attention_chunk_size": 6})],
)
def test_a_recorded_step_keeps_what_a_window_would_lose(model_type, settings, monkeypatch):
    """A CUDA graph does what its first step did, so no layer may change its way when a window is full."""
    model = converted(model_type=model_type, **settings)
    lengths = []

    def recorded(model, length, _, make=ways._fixed_cache):
        cache = make(model, length, recorded=True)
        lengths.extend(layer.max_cache_len for layer in cache.layers)
        return cache

    monkeypatch.setattr(ways, "_fixed_cache", recorded)
    assert greedy(model) == own_tokens(model)
    assert set(lengths) == {7 + 9}
    windows = ways.StaticCache(config=model.config, max_cache_len=16).layers
    assert min(layer.max_cache_len for layer in windows) < 16, "the test has no window to lose"


def test_models_without_a_static_cache_and_residuals_that_look_back(monkeypatch):
    model = converted()
    own = own_tokens(model)
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    assert greedy(model) == greedy(model, prefill_chunk=3) == own
    back = converted("ddl:width=2,compress=token")
    assert not back.model.residual.token_local
    assert isinstance(
        hf.TransformersEngine(back).reader(PROMPTS, 4, "auto", True, True), ways._Anew
    )
    assert greedy(back) == greedy(back, use_cache=False)


def test_headwaters_own_decoder_and_models_that_keep_a_state_elsewhere():
    decoder = model_of("attnres-block", scatter=True, shortswa=3)
    model = export_decoder(decoder.config.to_dict(), decoder.weights(), None)
    assert greedy(model) == headwater.generate(decoder, PROMPTS, 9, temperature=0.0)
    mamba = tiny_model("mamba2")
    assert greedy(mamba) == own_tokens(mamba)


def test_a_host_that_is_behind_sees_the_same_tokens(monkeypatch):
    """On a CPU by the steps of a GPU: what is recorded runs again, and tokens are there at once."""
    model = converted()
    own, real = own_tokens(model), ways._Cached.__init__

    def as_on_a_gpu(self, *words):
        real(self, *words)
        self.graph = True

    monkeypatch.setattr(ways._Cached, "__init__", as_on_a_gpu)
    monkeypatch.setattr(ReplayedSteps, "_capture", lambda self: setattr(self, "replay", self._once))
    monkeypatch.setattr(
        ReplayedSteps, "_send", lambda self: (self.drawn.clone(), SimpleNamespace(synchronize=int))
    )
    assert greedy(model) == own


def test_a_converted_folder_from_the_command_line(tmp_path, capsys, monkeypatch):
    model, text = converted(vocab_size=257), '{"type": "bytes"}'
    tokenizer = fast_tokenizer(text, 64)
    write_model(model, tokenizer, tmp_path / "folder")
    flags = ["--prompt", "def ", "class A", "--max-new-tokens", "5", "--temperature", "0"]
    cli.generate([str(tmp_path / "folder"), *flags])
    shown = capsys.readouterr()
    for prompt in ("def ", "class A"):
        (row,) = own_tokens(model, [tokenizer(prompt)["input_ids"]], 5)
        assert f"[{prompt}] {tokenizer.decode(row)[len(prompt) :]}" in shown.out
    assert "5 tokens of each of 2 texts" in shown.err
    with pytest.raises(
        UserError, match=r"--tensor divides the models of runs, and .* is a transformers model"
    ):
        cli.generate([str(tmp_path / "folder"), "--prompt", "def ", "--tensor", "2"])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match="exceed the context of 128"):
            cli.generate([str(tmp_path / "folder"), "--prompt", "def ", "--max-new-tokens", "500"])


def test_other_tokens_that_end_a_text_are_the_configurations():
    model, words = converted(vocab_size=257), ways.Words(fast_tokenizer('{"type": "bytes"}', 64))
    (row,) = own_tokens(model, [[100]], 9)
    end = row.index(row[5], 1)
    for told in ([256, row[5]], row[5]):
        model.generation_config.eos_token_id = told
        pieces = continue_texts(
            hf.TransformersEngine(model), words, ["d"], 9, Sampling(temperature=0.0)
        )
        assert "".join(piece for (piece,) in pieces) == words.decode(row[1:end])


def test_the_space_in_front_of_a_continuation_is_kept():
    """Tokenizers of SentencePiece's kind drop that of the first word."""
    inner = Tokenizer(models.WordLevel({"?": 0, "▁is": 1, "▁Paris": 2, ".": 3}, unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    words = ways.Words(tokenizer)
    assert tokenizer.decode([2, 3]) == "Paris."
    assert words.decode([2, 3]) == " Paris."
    assert words.encode("is") == [1]
    with pytest.raises(UserError, match="no token that begins a text"):
        words.encode("")
    tokenizer.bos_token = "."
    assert words.encode("") == [3]


def test_caches_of_fixed_size_are_for_models_that_can_use_them():
    model = tiny_model("llama")
    engine = hf.TransformersEngine(model)
    assert engine.reader(PROMPTS, 4, "auto", True, True).static
    with torch.autocast("cpu", torch.float16):
        assert not engine.reader(PROMPTS, 4, "auto", True, True).static
        assert [len(row) for row in greedy(model)] == [len(row) + 9 for row in PROMPTS]
    model.config._attn_implementation = (
        "flash_attention_2"  # would take zeros at the cache's end for the last tokens
    )
    assert not engine.reader(PROMPTS, 4, "auto", True, True).static
    for gemma in (tiny_model("recurrent_gemma"), converted(model_type="recurrent_gemma")):
        reader = hf.TransformersEngine(gemma).reader(PROMPTS, 4, "auto", True, True)
        assert type(reader) is ways._Anew, "its modules keep the states of the text before"


def test_a_model_without_its_engine_is_refused():
    with pytest.raises(
        TypeError, match=r"got a LlamaForCausalLM: of a model of transformers, headwater\.hf\.Trans"
    ):
        headwater.generate(tiny_model("llama"), PROMPTS, 4)


def test_a_prompt_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="exceed the context of 128: lower max_new_tokens to 28"):
        headwater.generate(hf.TransformersEngine(tiny_model("llama")), [[1] * 100], 40)


def test_the_benchmark_times_what_generate_does(monkeypatch):
    bench = benchmark.Bench("tiny", "cpu", 600, 1)
    bench.sizes = bench.sizes | {"hf": ("llama",), "batches": (2,)}
    assert "ms" in dict(benchmark.hf(bench))["llama, batch 2"]
    monkeypatch.setattr(converted_llama, "continued", lambda *words, graph=True: graph)
    assert "other tokens" in dict(benchmark.hf(bench))["llama, batch 2"]["refused"]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_recorded_step_draws_the_same_tokens(model_type, recwarn):
    model = converted(model_type=model_type).cuda()
    assert greedy(model) == greedy(model, graph=False) == own_tokens(model)
    assert not [str(one.message) for one in recwarn if "not captured" in str(one.message)]
