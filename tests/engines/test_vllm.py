"""vLLM serves what `headwater convert --remote-code` wrote: the tokens are transformers'. `make test-engines`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from headwater.cli import main
from headwater.hf import convert

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-engines", allow_module_level=True)

TOKENS = Path(__file__).with_name("vllm_tokens.py")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [200, 100, 50]]
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
HOME = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks may share a socket
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A folder whose queries are trained, and the tokens that transformers gives."""
    config, kind = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = kind(config(**SHAPE))
    convert(model, "attnres-block:block=3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than at a start, so that one token is clearly the likeliest.
            spread = 0.5 if "residual." in name else 0.1
            parameter.add_(spread * torch.randn_like(parameter))
    model.eval().save_pretrained(folder / "trained")
    words = ["convert", str(folder / "trained"), "--out", str(folder / "served"), "--remote-code"]
    assert main(words) == 0
    expected = []
    for prompt in PROMPTS:
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, min_new_tokens=12
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    assert len(set(expected[0])) > 3, "a text that repeats one token shows little"
    return folder / "served", expected


@pytest.mark.parametrize(
    ("ranks", "eager"), [(1, True), (1, False), (2, True)], ids=["eager", "compiled", "two ranks"]
)
def test_tokens_are_those_of_transformers(served, tmp_path, ranks, eager):
    folder, expected = served
    words = [str(folder), str(ranks), json.dumps(eager), json.dumps(PROMPTS)]
    environment = {**os.environ, **HOME, "VLLM_CACHE_ROOT": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, TOKENS, *words],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-3000:] + run.stderr[-3000:]
    assert json.loads(lines[0].removeprefix("RESULT ")) == expected
