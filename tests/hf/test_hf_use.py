"""A converted model in use: generation, checkpointing, compilation, the Trainer, copies, saving and loading."""

import copy
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from tinyhf import (
    agree,
    converted,
    greedy,
    load,
    logits,
    same,
    stir,
    tiny_config,
    tiny_model,
    tokens,
    training,
)
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import headwater
from headwater.errors import UserError
from headwater.hf import convert, load_delta, reset, revert, save_delta, verify
from headwater.hf.convert.norms import foldable

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(
    GPU, reason="the interpreter is off where there is a GPU: test_hf_gpu.py"
)
FAMILY = ["attnres-block", "muddformer", "hyper-connections"]


@pytest.fixture
def model():
    return converted()


def padded():
    rows = tokens(3, 9)
    mask = torch.ones_like(rows)
    for row, length in ((1, 4), (2, 2)):
        rows[row, :length], mask[row, :length] = 0, 0
    return {"input_ids": rows, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox"])
def test_greedy_generation_is_the_same_with_and_without_a_cache(kind):
    """A window of eight is long full."""
    model = converted(kind=kind)
    assert torch.equal(*(greedy(model, padded(), 24, use_cache=use) for use in (True, False)))


def test_static_cache_beams_and_padding(model):
    rows = greedy(model, padded(), 24)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(rows, greedy(model, padded(), 24, **static))
    assert torch.equal(rows[1:2, 4:], greedy(model, padded()["input_ids"][1:2, 4:], 24))
    beams = [greedy(model, padded(), num_beams=3, use_cache=use) for use in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("residual", ["attnres-block:block=3", "attnres-full", *FAMILY[1:]])
def test_drafts_that_leave_after_a_few_layers(residual):
    """Assisted decoding by the model's own first layers: the head sees what the next layer would have read."""
    model = converted(residual)
    assert torch.equal(greedy(model, tokens(1)), greedy(model, tokens(1), assistant_early_exit=2))
    hidden = model(tokens(), output_hidden_states=True).hidden_states[2]
    model.config.num_hidden_layers = 2
    torch.testing.assert_close(model(tokens()).logits, model.lm_head(model.model.norm(hidden)))


def test_a_residual_that_looks_back_along_tokens_refuses_a_cache():
    model = converted("ddl:width=2,compress=token,expand=token")
    assert not model.config.use_cache
    assert greedy(model, tokens(1), 3, use_cache=False).shape == (1, 15)
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(model, tokens(1), 3, use_cache=True)


@pytest.mark.parametrize("residual", FAMILY)
def test_gradient_checkpointing_of_both_kinds(residual):
    model = converted(residual, amount=0.1).train()
    plain = training(model)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        gradients = training(model)
        assert torch.cosine_similarity(plain, gradients, dim=0) > 0.999999
        torch.testing.assert_close(plain, gradients, rtol=1e-4, atol=1e-7)
        model.gradient_checkpointing_disable()


RECORDS = {"output_depth_weights": True, "output_hidden_states": True}


def test_depth_weights_and_hidden_states(model):
    model.set_attn_implementation("eager")  # the others return no attention weights
    out = model(tokens(), **RECORDS, output_attentions=True)
    assert [len(weights) for weights in out.depth_weights] == [1, 2, 2, 2, 3, 3, 3, 4, 4]
    for weights in out.depth_weights:
        torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    assert (len(out.hidden_states), len(out.attentions)) == (5, 4)
    assert "depth_weights" not in model(tokens())
    assert torch.equal(out.logits, model(tokens()).logits)
    models = tiny_model("llama"), converted(amount=0.0)
    states = [m(tokens(), output_hidden_states=True).hidden_states for m in models]
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    again = model(tokens(), labels=tokens(), output_depth_weights=True)
    again.loss.backward()
    for one, other in zip(again.depth_weights, out.depth_weights, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("config", [True, False])
def test_hidden_states_in_a_tuple(model, config):
    """The model inside is asked: a whole one asks it for names."""
    expected = model.model(tokens(), output_hidden_states=True).hidden_states
    model.config.return_dict = config
    outputs = model.model(
        tokens(), output_hidden_states=True, return_dict=False if config else None
    )
    assert isinstance(outputs, tuple)
    assert all(torch.equal(one, other) for one, other in zip(outputs[-1], expected, strict=True))


def test_passes_at_the_same_time_keep_their_records_apart(model):
    """Three threads meet inside a layer and again before the head; two record, and the first runs two passes more from
    within its own."""
    rows = [tokens(2, 12, seed=seed) for seed in (1, 2, 3)]
    expected = [model(row, **RECORDS) for row in rows]
    barrier, met, inside, outputs = threading.Barrier(3, timeout=60), set(), [], {}

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
            outputs[i] = model(rows[i], **watched)

    for module in (model.model.layers[2].mlp, model.lm_head):
        module.register_forward_pre_hook(meet)
    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "depth_weights" not in outputs[2]
    assert "depth_weights" not in inside[1]
    for out, i in ((outputs[0], 0), (outputs[1], 1), (inside[0], 2)):
        assert all(map(torch.equal, out.depth_weights, expected[i].depth_weights))
    assert all(map(torch.equal, outputs[1].hidden_states, expected[1].hidden_states))
    assert all(torch.equal(outputs[i].logits, expected[i].logits) for i in range(3))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_folded_norm_is_the_norm_of_the_scaled_input(kind):
    """The input is so small that eps shows: a kernel takes weight and eps, and knows of no scale."""
    norm = tiny_model(kind).model.norm
    folded, x = foldable(norm, 3.0), 1e-3 * torch.randn(4, 32)
    for y in (folded(x), torch.nn.functional.rms_norm(x, (32,), folded.weight, folded.eps)):
        torch.testing.assert_close(y, norm(3.0 * x))


@interpreted
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_kernels_fold_scale_and_norm_into_the_read(kind):
    """On a GPU they are the default; here they run under the interpreter. Gemma's norm multiplies by 1 + weight."""
    fused = converted("attnres-block:block=3,backend=triton", kind, 0.0, num_hidden_layers=2)
    plain = tiny_model(kind, num_hidden_layers=2)
    calls, hooked = [], []
    # The first may read the embedding as it is.
    norms = [layer.input_layernorm for layer in fused.model.layers[1:]]
    for norm in norms:
        norm.forward = lambda x, forward=norm.forward: calls.append(1) or forward(x)
    assert verify(fused, plain, tokens(1, 4)).equal
    convert(plain, "attnres-block", block=3)
    stir(fused)
    stir(plain)
    assert verify(fused, plain, tokens(1, 4)).equal
    assert not calls  # the norms ran inside the kernels
    for norm in norms:
        norm.register_forward_hook(lambda *_: hooked.append(1))
    assert verify(fused, plain, tokens(1, 4)).equal
    assert len(hooked) == len(calls) > 0  # with hooks they do not


@interpreted
def test_depth_weights_and_hidden_states_of_the_kernels_with_gradients():
    """A layer that is watched reads twice from one state: the kernels' gradients must still add up."""
    from headwater.ops.triton.launch import launches

    results = []
    for backend in ("reference", "triton"):
        model = converted("attnres-block:block=2", backend=backend, num_hidden_layers=2)
        launches.clear()
        out = model(tokens(1, 4), labels=tokens(1, 4), **RECORDS)
        (out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)).backward()
        assert (launches["mix"] > 0) == (backend == "triton")
        results.append((out.depth_weights, [parameter.grad for parameter in model.parameters()]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", pytest.param("triton", marks=interpreted)])
def test_compiles_to_one_graph(backend):
    """Also without gradients, where dynamo treats the kernels' functions in another way."""
    model = converted("attnres-block:block=2", backend=backend, num_hidden_layers=1)
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


def test_bf16_is_as_near_to_fp32_as_the_plain_model_s():
    """Trained off the start: at most twice the plain model's distance, in the root mean square of logits."""
    distances = []
    for model in (tiny_model("llama"), converted("attnres-block", amount=0.1)):
        half = logits(copy.deepcopy(model).bfloat16())
        assert half.dtype == torch.bfloat16
        distances.append((half.float() - logits(model)).norm() / logits(model).norm())
    assert distances[1] <= 2 * distances[0]


@pytest.mark.parametrize("residual", ["attnres-block", "mhc"])
def test_what_is_added_has_the_dtype_of_the_model(residual):
    half = tiny_model("llama").bfloat16()
    convert(half, residual)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert logits(half).dtype == torch.bfloat16


@pytest.mark.parametrize("residual", ["attnres-block", "muddformer"])
@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copied_or_pickled_model_is_a_model_of_its_own(residual, again):
    model, plain = converted(residual, amount=0.1), tiny_model("llama")
    other, before = again(model), logits(model)
    assert (type(other), type(other.config)) == (type(model), type(model.config))
    assert torch.equal(logits(other), before)
    stir(other)
    revert(other)
    assert type(other) is type(plain)
    assert agree(other, plain)
    assert torch.equal(logits(model), before)


def test_an_8b_shape_converts_on_the_meta_device_in_seconds():
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        big = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
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
    assert agree(type(model).from_pretrained(tmp_path, config=model.config), plain)
    model.to_empty(device="cpu")
    missing, surplus = model.load_state_dict(plain.state_dict(), strict=False)
    assert (set(missing), surplus) == (set(report.added), [])
    model.model.rotary_emb = plain.model.rotary_emb  # buffers that no checkpoint holds
    reset(model)
    assert agree(model, plain)


def test_a_plain_checkpoint_folder_loads_into_the_converted_class(tmp_path):
    plain = tiny_model("qwen3_moe")  # whose experts are stored one by one and held as one tensor
    plain.save_pretrained(tmp_path)
    model = copy.deepcopy(plain)
    report = convert(model, "mhc-lite")  # which has a buffer that is not saved
    loaded, info = type(model).from_pretrained(
        tmp_path, config=model.config, output_loading_info=True
    )
    assert set(info["missing_keys"]) == set(report.added)
    assert not info["unexpected_keys"]
    assert agree(loaded, plain)


@pytest.mark.parametrize("kind", ["llama", "olmo2", "gpt_neox", "qwen3_moe", "gemma3_text"])
def test_saved_and_loaded_is_bit_equal(kind, tmp_path):
    model = converted("attnres-block:block=2", kind)
    model.save_pretrained(tmp_path)
    loaded, body = load(tmp_path), AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.model_type == f"headwater-{kind}"
    assert same(loaded, model)
    expected = model.base_model(tokens()).last_hidden_state
    assert torch.equal(body(tokens()).last_hidden_state, expected)
    revert(loaded)
    assert loaded.config.model_type == kind
    assert type(loaded).__module__.startswith("transformers.")


def test_what_is_saved_keeps_its_block_where_the_default_changes(tmp_path, monkeypatch):
    model = converted("attnres-block")
    assert model.config.headwater["residual"] == "attnres-block:block=2"
    model.save_pretrained(tmp_path)
    save_delta(model, tmp_path / "delta.safetensors")
    monkeypatch.setattr("headwater.residuals.attention.default_block", lambda sublayers: 4)
    loaded, other = load(tmp_path), tiny_model("llama")
    load_delta(other, tmp_path / "delta.safetensors")
    for again in (loaded, other):
        assert again.model.residual.block == 2
        assert same(again, model)


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
    words = [sys.executable, "-c", LOAD, str(tmp_path), *WAYS]
    process = subprocess.run(words, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for number in range(len(WAYS)):
        assert torch.equal(torch.load(tmp_path / f"logits{number}.pt"), logits(model))


def test_the_delta_file_holds_the_added_parameters_alone(model, tmp_path):
    path = tmp_path / "delta.safetensors"
    save_delta(model.requires_grad_(False), path)
    other = tiny_model("llama")
    load_delta(other, path)
    assert same(other, model)
    added = sum(p.numel() for name, p in model.named_parameters() if "residual." in name)
    assert path.stat().st_size < 4 * added + 4096
    for wrong, message in (
        (tiny_model("qwen3"), "made for the architecture 'llama'"),
        (tiny_model("llama", num_hidden_layers=2), "made for 8 sublayers"),
    ):
        before = type(wrong)
        with pytest.raises(UserError, match=message):
            load_delta(wrong, path)
        assert type(wrong) is before


def test_the_trainer_trains_saves_and_resumes_the_format(tmp_path):
    model = converted("attnres-block", amount=0.0)
    queries = {name: p for name, p in model.named_parameters() if name.endswith("query")}
    start = {name: parameter.detach().clone() for name, parameter in queries.items()}
    settings = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, gradient_checkpointing=True,
        save_steps=3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens(16)]
    Trainer(model, settings, train_dataset=data).train()
    assert all(not torch.equal(parameter, start[name]) for name, parameter in queries.items())
    assert same(load(tmp_path / "checkpoint-3"), model.eval())


def test_the_schedule_of_the_trainer_keeps_the_rate_of_the_queries(tmp_path):
    model = converted("attnres-block", amount=0.0)
    optimizer = torch.optim.AdamW(headwater.param_groups(model, lr=1e-2, weight_decay=0.1))
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, warmup_steps=4
    )
    data = [{"input_ids": row, "labels": row} for row in tokens(16)]
    Trainer(model=model, args=settings, train_dataset=data, optimizers=(optimizer, None)).train()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"matrices": 5e-3, "rest": 5e-3, "queries": 5e-4})


def test_the_command_line_converts_and_verifies(tmp_path, command):
    plain, out, different = (tmp_path / name for name in ("plain", "out", "different"))
    tiny_model("llama").save_pretrained(plain)
    printed = command("convert", plain, "--out", out, "--residual", "attnres-block:block=2")
    assert "model.layers.3.mlp: sublayer 7" in printed
    assert command("verify", plain, out).startswith("equal: KL")
    command("convert", plain, "--out", different, "--residual", "ddl")
    assert "NOT equal" in command("verify", plain, different, code=1)
    assert "--tokens must be at least 2" in command("verify", plain, out, "--tokens", 0, code=1)
    assert "not an empty folder" in command("convert", plain, "--out", out, code=1)
    assert "no checkpoint in" in command("convert", tmp_path, "--out", tmp_path / "new", code=1)
