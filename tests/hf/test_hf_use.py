"""A converted model in use: generation, checkpointing, compilation, adapters, the Trainer, saving and loading."""

import copy
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tinyhf import stir, tiny_config, tiny_model, tokens
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import headwater
from headwater.errors import UserError
from headwater.hf import convert, load_delta, reset, revert, save_delta, verify
from headwater.hf.convert.norms import foldable


@pytest.fixture
def model():
    made = tiny_model("llama")
    convert(made, "attnres-block", block=3)
    stir(made)
    return made


def padded():
    rows = tokens(3, 9)
    mask = torch.ones_like(rows)
    for row, length in ((1, 4), (2, 2)):
        rows[row, :length], mask[row, :length] = 0, 0
    return {"input_ids": rows, "attention_mask": mask}


def generate(model, inputs, count=64, **options):
    return model.generate(
        **inputs, do_sample=False, max_new_tokens=count, min_new_tokens=count, **options
    )


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_greedy_generation_is_the_same_with_and_without_a_cache(model_type):
    model = tiny_model(model_type)
    convert(model, "attnres-block", block=3)
    stir(model)
    with_cache = generate(
        model, padded(), count=24, use_cache=True
    )  # a window of eight is long full
    assert torch.equal(with_cache, generate(model, padded(), count=24, use_cache=False))


def test_static_cache_beams_and_padding(model):
    rows = generate(model, padded())
    assert torch.equal(
        rows, generate(model, padded(), cache_implementation="static", disable_compile=True)
    )
    alone = generate(model, {"input_ids": padded()["input_ids"][1:2, 4:]})
    assert torch.equal(rows[1:2, 4:], alone)
    short = {"do_sample": False, "num_beams": 3, "max_new_tokens": 12}
    with_cache, without = (
        model.generate(**padded(), **short, use_cache=use) for use in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize(
    "residual", ["attnres-block:block=3", "attnres-full", "muddformer", "hyper-connections"]
)
def test_drafts_that_leave_after_a_few_layers(residual):
    """Assisted decoding by the model's own first layers: the head sees what the next layer would have read."""
    model = tiny_model("llama")
    convert(model, residual)
    stir(model)
    prompt = {"input_ids": tokens(1)}
    alone = generate(model, prompt, count=12)
    assert torch.equal(alone, generate(model, prompt, count=12, assistant_early_exit=2))
    seen = model(tokens(), output_hidden_states=True).hidden_states[2]
    model.config.num_hidden_layers = 2
    torch.testing.assert_close(model(tokens()).logits, model.lm_head(model.model.norm(seen)))


def test_a_residual_that_looks_back_along_tokens_refuses_a_cache():
    model = tiny_model("llama")
    convert(model, "ddl:width=2,compress=token,expand=token")
    assert not model.config.use_cache
    assert model.generate(tokens(1), do_sample=False, max_new_tokens=3, use_cache=False).shape == (
        1,
        15,
    )
    with pytest.raises(ValueError, match="looks back along the tokens"):
        model.generate(tokens(1), do_sample=False, max_new_tokens=3, use_cache=True)


@pytest.mark.parametrize("residual", ["attnres-block", "muddformer", "hyper-connections"])
def test_gradient_checkpointing_of_both_kinds(residual):
    model = tiny_model("llama")
    convert(model, residual)
    stir(model, 0.1)
    model.train()

    def gradients():
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])

    plain = gradients()
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert torch.cosine_similarity(plain, gradients(), dim=0) > 0.999999
        torch.testing.assert_close(plain, gradients(), rtol=1e-4, atol=1e-7)
        model.gradient_checkpointing_disable()


def test_depth_weights_and_hidden_states(model):
    model.set_attn_implementation("eager")  # the others return no attention weights
    out = model(
        tokens(), output_depth_weights=True, output_hidden_states=True, output_attentions=True
    )
    assert [len(weights) for weights in out.depth_weights] == [1, 2, 2, 2, 3, 3, 3, 4, 4]
    for weights in out.depth_weights:
        torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    assert len(out.hidden_states) == 5
    assert len(out.attentions) == 4
    assert "depth_weights" not in model(tokens())
    assert torch.equal(out.logits, model(tokens()).logits)
    plain = tiny_model("llama")
    fresh = tiny_model("llama")
    convert(fresh)
    ours, theirs = (m(tokens(), output_hidden_states=True).hidden_states for m in (fresh, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [True, False])
def test_hidden_states_in_a_tuple(model, config):
    """Of the model inside: of a whole one transformers asks it for names."""
    expected = model.model(tokens(), output_hidden_states=True).hidden_states
    model.config.return_dict = config
    found = model.model(tokens(), output_hidden_states=True, return_dict=False if config else None)
    assert isinstance(found, tuple)
    assert all(torch.equal(one, other) for one, other in zip(found[-1], expected, strict=True))


def test_passes_at_the_same_time_keep_their_records_apart(model):
    """Three threads meet inside a layer and again before the head; two record, and the first runs two passes more from
    within its own."""
    rows = [tokens(2, 12, seed=seed) for seed in (1, 2, 3)]
    expected = [model(row, output_depth_weights=True, output_hidden_states=True) for row in rows]
    barrier, met, inside, found = threading.Barrier(3, timeout=60), set(), [], {}

    def meet(module, *_):
        place = threading.current_thread().name, module
        if place not in met:
            met.add(place)
            barrier.wait()
            if place == ("0", model.lm_head):
                inside.extend((model(rows[2], output_depth_weights=True), model(rows[2])))

    def run(i):
        watched = {"output_depth_weights": True, "output_hidden_states": i == 1} if i < 2 else {}
        with torch.no_grad():
            found[i] = model(rows[i], **watched)

    for module in (model.model.layers[2].mlp, model.lm_head):
        module.register_forward_pre_hook(meet)
    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "depth_weights" not in found[2]
    assert "depth_weights" not in inside[1]
    for out, i in ((found[0], 0), (found[1], 1), (inside[0], 2)):
        for one, other in zip(out.depth_weights, expected[i].depth_weights, strict=True):
            assert torch.equal(one, other)
    assert all(map(torch.equal, found[1].hidden_states, expected[1].hidden_states))
    assert all(torch.equal(found[i].logits, expected[i].logits) for i in range(3))


def test_depth_weights_under_gradient_checkpointing(model):
    expected = model(tokens(), output_depth_weights=True).depth_weights
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    out = model(tokens(), labels=tokens(), output_depth_weights=True)
    out.loss.backward()
    for one, other in zip(out.depth_weights, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_folded_norm_is_the_norm_of_the_scaled_input(model_type):
    """Of an input so small that eps shows: a kernel takes weight and eps, and knows of no scale."""
    norm = tiny_model(model_type).model.norm
    folded, x = foldable(norm, 3.0), 1e-3 * torch.randn(4, 32)
    expected = norm(3.0 * x)
    torch.testing.assert_close(
        torch.nn.functional.rms_norm(x, (32,), folded.weight, folded.eps), expected
    )
    torch.testing.assert_close(folded(x), expected)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_kernels_fold_scale_and_norm_into_the_read(model_type):
    """On a GPU they are the default; here they run under the interpreter. Gemma's norm multiplies by 1 + weight."""
    if torch.cuda.is_available():
        pytest.skip(
            "the interpreter is off where there is a GPU; tests/ops/test_kernels_gpu.py covers the kernels there"
        )
    fused, plain = (tiny_model(model_type, num_hidden_layers=2) for _ in range(2))
    convert(
        fused, "attnres-block", block=3, backend="triton", check=False
    )  # `verify` does, on fewer tokens
    called = []
    norms = [
        layer.input_layernorm for layer in fused.model.layers[1:]
    ]  # the first may read the embedding as it is
    for norm in norms:
        norm.forward = lambda x, forward=norm.forward: called.append(1) or forward(x)
    assert verify(fused, plain, tokens(1, 4)).equal
    convert(plain, "attnres-block", block=3)
    stir(fused)
    stir(plain)
    assert verify(fused, plain, tokens(1, 4)).equal
    assert not called  # the norms ran inside the kernels
    seen = []
    for norm in norms:
        norm.register_forward_hook(lambda *_: seen.append(1))
    assert verify(fused, plain, tokens(1, 4)).equal
    assert len(seen) == len(called) > 0  # with hooks they do not


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/hf/test_hf_gpu.py has it for a GPU")
def test_depth_weights_and_hidden_states_of_the_kernels_with_gradients():
    """A layer that is watched reads twice from one state: the kernels' gradients must still add up."""
    from headwater.ops.triton.launch import launches

    results = []
    for backend in ("reference", "triton"):
        model = tiny_model("llama", num_hidden_layers=2)
        convert(model, "attnres-block", block=2, backend=backend, check=False)
        stir(model)
        launches.clear()
        out = model(
            tokens(1, 4), labels=tokens(1, 4), output_depth_weights=True, output_hidden_states=True
        )
        (out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)).backward()
        assert (launches["mix"] > 0) == (backend == "triton")
        results.append((out.depth_weights, [parameter.grad for parameter in model.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiles_to_one_graph(backend):
    """Also without gradients, where dynamo treats the kernels' functions in another way."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip(
            "the interpreter is off where there is a GPU; tests/hf/test_hf_gpu.py compiles there"
        )
    model = tiny_model("llama", num_hidden_layers=1)
    convert(model, "attnres-block", block=2, backend=backend, check=False)
    stir(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for gradients in (True, False) if backend == "triton" else (True,):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(compiled(tokens(1, 4)).logits, model(tokens(1, 4)).logits)
    torch._dynamo.reset()


def test_the_residual_can_be_recorded(model):
    with headwater.record(model.model.residual) as trace:
        model(tokens())
    matrix = headwater.mixing(model.model.residual, trace.sources)
    reads = torch.einsum("lsbt,sbtd->lbtd", matrix, torch.stack(trace.sources))
    torch.testing.assert_close(reads, torch.stack(trace.reads), rtol=1e-4, atol=1e-5)


def test_heads_other_than_the_language_model_convert_in_place():
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("qwen3")).eval()
    plain = copy.deepcopy(classifier)
    convert(classifier)
    torch.testing.assert_close(classifier(tokens()).logits, plain(tokens()).logits)


def test_bf16_is_as_near_to_fp32_as_the_plain_model_s():
    """Trained off the start: at most twice the plain model's distance, in the root mean square of logits."""
    distances = []
    for converted in (False, True):
        model = tiny_model("llama")
        if converted:
            convert(model)
            stir(model, 0.1)
        half = copy.deepcopy(model).bfloat16()
        with torch.no_grad():
            logits = half(tokens()).logits
            expected = model(tokens()).logits
        assert logits.dtype == torch.bfloat16
        distances.append((logits.float() - expected).norm() / expected.norm())
    assert distances[1] <= 2 * distances[0]


@pytest.mark.parametrize("residual", ["attnres-block", "mhc"])
def test_what_is_added_has_the_dtype_of_the_model(residual):
    half = tiny_model("llama").bfloat16()
    convert(half, residual)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half(tokens()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("residual", ["attnres-block", "muddformer"])
@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copied_or_pickled_model_is_a_model_of_its_own(residual, again):
    model, plain = tiny_model("llama"), tiny_model("llama")
    convert(model, residual)
    stir(model, 0.1)
    other = again(model)
    assert type(other) is type(model)
    assert type(other.config) is type(model.config)
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)
    before = model(tokens()).logits
    stir(other)
    assert torch.equal(model(tokens()).logits, before)
    revert(other)
    assert type(other) is type(plain)
    assert verify(other, plain, tokens()).equal
    assert torch.equal(model(tokens()).logits, before)


def test_an_8b_shape_converts_on_the_meta_device_in_seconds():
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
    with torch.device("meta"):
        big = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8))
    begin = time.perf_counter()
    report = convert(big)
    assert time.perf_counter() - begin < 5
    assert len(report.sites) == 65
    assert all(parameter.is_meta for parameter in big.parameters())


def test_a_plain_checkpoint_loads_into_a_model_converted_on_the_meta_device(tmp_path):
    plain = tiny_model("llama")
    plain.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama"))
    report = convert(model)
    assert verify(type(model).from_pretrained(tmp_path, config=model.config), plain, tokens()).equal
    model.to_empty(device="cpu")
    missing, surplus = model.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == set(report.added)
    assert not surplus
    model.model.rotary_emb = plain.model.rotary_emb  # buffers that no checkpoint holds
    reset(model)
    assert verify(model, plain, tokens()).equal


def test_a_plain_checkpoint_folder_loads_into_the_converted_class(model, tmp_path):
    plain = tiny_model("qwen3_moe")  # whose experts are stored one by one and held as one tensor
    plain.save_pretrained(tmp_path)
    converted = copy.deepcopy(plain)
    report = convert(converted, "mhc-lite")  # which has a buffer that is not saved
    loaded, info = type(converted).from_pretrained(
        tmp_path, config=converted.config, output_loading_info=True
    )
    assert set(info["missing_keys"]) == set(report.added)
    assert not info["unexpected_keys"]
    assert verify(loaded, plain, tokens()).equal


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gpt_neox", "qwen3_moe", "gemma3_text"])
def test_saved_and_loaded_is_bit_equal(model_type, tmp_path):
    model = tiny_model(model_type)
    convert(model, "attnres-block", block=2)
    stir(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.model_type == f"headwater-{model_type}"
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    body = AutoModel.from_pretrained(tmp_path)
    expected = model.base_model(tokens()).last_hidden_state
    assert torch.equal(body(tokens()).last_hidden_state, expected)
    revert(loaded)
    assert loaded.config.model_type == model_type
    assert type(loaded).__module__.startswith("transformers.")


def test_what_is_saved_keeps_its_block_where_the_default_changes(tmp_path, monkeypatch):
    model = tiny_model("llama")
    assert convert(model).residual == "attnres-block:block=2"
    stir(model)
    model.save_pretrained(tmp_path)
    save_delta(model, tmp_path / "delta.safetensors")
    older = copy.deepcopy(model.config)
    older.headwater["residual"] = (
        "attnres-block"  # as nothing is saved any more: today's default is written down
    )
    assert type(model)(older).config.headwater == model.config.headwater
    monkeypatch.setattr("headwater.residuals.attention.default_block", lambda sublayers: 4)
    loaded, other = AutoModelForCausalLM.from_pretrained(tmp_path), tiny_model("llama")
    load_delta(other, tmp_path / "delta.safetensors")
    for each in (loaded, other):
        assert each.model.residual.block == 2
        assert torch.equal(each(tokens()).logits, model(tokens()).logits)


LOAD = """
import gc, os, socket, sys
gc.disable()  # nothing that is imported is garbage
def refuse(*args, **kwargs): raise OSError("the network is blocked")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import torch._dynamo, torch.distributed.tensor  # most of what transformers imports, once for all ways
folder = sys.argv[1]
for number, imports in enumerate(sys.argv[2:]):
    if os.fork():
        assert os.wait()[1] == 0, imports
        continue
    assert not {"headwater", "transformers"} & set(sys.modules)
    exec(imports)
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.load(folder + "/tokens.pt")).logits.detach()
    torch.save(logits, f"{folder}/logits{number}.pt")
    whole = torch.load(folder + "/whole.pt", weights_only=False)
    assert torch.equal(whole(torch.load(folder + "/tokens.pt")).logits, logits)
    break
os._exit(0)  # taking all that is imported apart takes a second
"""
WAYS = (  # of making converted models known; a bare `import headwater` leaves the import machinery as it is
    "finders = list(sys.meta_path)\nimport headwater\nassert sys.meta_path == finders\n"
    "from transformers import AutoModelForCausalLM\nimport headwater.hf",
    "from transformers import AutoModelForCausalLM\nimport headwater",
)


def test_a_new_process_without_a_network_loads_it_bit_equal(model, tmp_path):
    model.save_pretrained(tmp_path)
    torch.save(tokens(), tmp_path / "tokens.pt")
    torch.save(model, tmp_path / "whole.pt")  # the whole model, pickled
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), *WAYS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for number in range(len(WAYS)):
        assert torch.equal(torch.load(tmp_path / f"logits{number}.pt"), model(tokens()).logits)


def test_a_model_loaded_from_a_plain_folder_converts_and_saves_under_the_new_type(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    convert(model)
    model.save_pretrained(tmp_path / "converted")
    assert '"model_type": "headwater-llama"' in (tmp_path / "converted" / "config.json").read_text()


def test_the_delta_file_holds_the_added_parameters_alone(model, tmp_path):
    path = tmp_path / "delta.safetensors"
    save_delta(model, path)
    other = tiny_model("llama")
    load_delta(other, path)
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)
    added = sum(p.numel() for name, p in model.named_parameters() if "residual." in name)
    assert path.stat().st_size < 4 * added + 4096
    frozen = copy.deepcopy(model).requires_grad_(False)
    save_delta(frozen, tmp_path / "frozen.safetensors")
    again = tiny_model("llama")
    load_delta(again, tmp_path / "frozen.safetensors")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    wrong = tiny_model("qwen3")
    with pytest.raises(UserError, match="made for the architecture 'llama'"):
        load_delta(wrong, path)
    with pytest.raises(
        UserError, match=r"'attnres-block.*made for 8 sublayers, .* To change the number"
    ):
        load_delta(tiny_model("llama", num_hidden_layers=2), path)
    assert type(wrong).__name__ == "Qwen3ForCausalLM"


def test_hooks_of_accelerate_from_before_the_conversion(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, plain = tiny_model("llama"), tiny_model("llama")
    places = {f"model.layers.{i}": "cpu" for i in range(4)} | {"model.layers.1": "disk"}
    places |= dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"
    )
    accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    convert(model)
    stir(model)
    reference = copy.deepcopy(plain)
    convert(reference)
    stir(reference)
    assert verify(model, reference, tokens()).equal
    revert(model)
    assert verify(model, plain, tokens()).equal


def test_the_trainer_trains_saves_and_resumes_the_format(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = tiny_model("llama")
    convert(model)
    start = {
        name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("query")
    }
    settings = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, gradient_checkpointing=True,
        save_steps=3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(
        model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in tokens(16)]
    ).train()
    assert all(
        not torch.equal(p, start[name]) for name, p in model.named_parameters() if name in start
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert torch.equal(loaded(tokens()).logits, model.eval()(tokens()).logits)


def test_the_schedule_of_the_trainer_keeps_the_rate_of_the_queries(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = tiny_model("llama")
    convert(model)
    optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=1e-2, weight_decay=0.1))
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, warmup_steps=4
    )
    data = [{"input_ids": row, "labels": row} for row in tokens(16)]
    Trainer(model=model, args=settings, train_dataset=data, optimizers=(optimizer, None)).train()
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"matrices": 5e-3, "rest": 5e-3, "queries": 5e-4}
    )


def test_the_command_line_converts_and_verifies(tmp_path, capsys):
    from headwater.cli import main

    plain, out = tmp_path / "plain", tmp_path / "out"
    tiny_model("llama").save_pretrained(plain)
    (plain / "tokenizer.json").write_text("{}")
    assert (
        main(["convert", str(plain), "--out", str(out), "--residual", "attnres-block:block=2"]) == 0
    )
    assert "model.layers.3.mlp: sublayer 7" in capsys.readouterr().out
    assert (out / "tokenizer.json").is_file()
    assert main(["verify", str(plain), str(out)]) == 0
    assert capsys.readouterr().out.startswith("equal: KL")
    different = tmp_path / "different"
    assert main(["convert", str(plain), "--out", str(different), "--residual", "ddl"]) == 0
    assert main(["verify", str(plain), str(different)]) == 1
    assert "NOT equal" in capsys.readouterr().err
    assert main(["verify", str(plain), str(out), "--tokens", "0"]) == 1
    assert "--tokens must be at least 2, got 0" in capsys.readouterr().err
    assert main(["convert", str(plain), "--out", str(out)]) == 1
    assert main(["convert", str(tmp_path), "--out", str(tmp_path / "new")]) == 1
    assert "no checkpoint in" in capsys.readouterr().err


def test_the_same_from_the_top_level_names():
    assert headwater.convert is convert
    assert headwater.verify is verify
    assert headwater.revert is revert
    assert Path(headwater.__file__).parent.name == "headwater"
