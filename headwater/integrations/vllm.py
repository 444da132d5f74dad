"""Serving: which servers take a checkpoint folder, and the tokens that vLLM gives to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.errors import UserError, command

# No network, no report of use, a small cache on a CPU, and two ranks may share a socket there.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
TOKENS = 12
MARK = "TOKENS "


def servers(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Say of each server whether it takes a folder.

    Arguments: `folder`, for the commands in the answers; `config`, its config.json.

    Returns the server's name and a sentence that begins with yes or no.
    """
    model_type, auto_map = config.get("model_type"), config.get("auto_map", {})
    if model_type == "headwater-decoder":
        return {"transformers": "yes, where headwater is installed"} | dict.fromkeys(
            ("vLLM", "SGLang", "llama.cpp"), "no: it does not know headwater's own decoder"
        )
    if config.get("attn_res_block_size") is not None:
        return {
            "transformers": "no: its Kimi Linear has no Attention Residuals",
            "vLLM": f"yes, by its own class, on a GPU: vllm serve {folder} --trust-remote-code",
            "SGLang": "no: its Kimi Linear has no Attention Residuals",
            "llama.cpp": "no: its Kimi Linear has no Attention Residuals",
        }
    if "headwater" not in config:
        answer = f"yes, if it knows '{model_type}': the residual is the plain one"
        return dict.fromkeys(("transformers", "vLLM", "SGLang", "llama.cpp"), answer)

    residual = config["headwater"]["residual"]
    other = f"no: it has no residual '{residual}' in '{model_type}'"
    transformers, vllm = "yes, with trust_remote_code=True", other
    if has_remote_code(config):
        vllm = f"yes, without pipeline parallelism: vllm serve {folder} --trust-remote-code"
    elif auto_map:
        vllm = "no: its transformers backend takes language models, and this is a classifier"
    else:
        transformers = "yes, where headwater is installed"
        write = command("convert", folder, "--out", "OUT", "--remote-code")
        vllm = f"no: the folder has no modeling file. Write one: {write}"
    return {"transformers": transformers, "vLLM": vllm, "SGLang": other, "llama.cpp": other}


def has_remote_code(config: Mapping[str, Any]) -> bool:
    """Tell whether a folder has the modeling file that vLLM's transformers backend reads."""
    return "headwater" in config and "AutoModel" in config.get("auto_map", {})


def compare_tokens(folder: Path) -> str:
    """Continue two prompts greedily, by transformers and by vLLM, in fp32. The folder's modeling file is run.

    Returns a sentence. Raises UserError if tokens differ, or if vLLM cannot load the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": True, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (2, 8), generator=generator)
    # A text goes on after the token that ends texts, as in vLLM below.
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(prompts)
    texts = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS)
    expected = texts[:, prompts.shape[1] :].tolist()
    tokens = greedy_tokens(folder, prompts.tolist())
    if tokens != expected:
        raise UserError(f"vLLM's tokens {tokens} are not transformers' {expected}")
    return f"{TOKENS} greedy tokens of vLLM are transformers', for each of {len(prompts)} prompts"


def greedy_tokens(
    folder: Path, prompts: Sequence[Sequence[int]], *, ranks: int = 1, eager: bool = True
) -> list[list[int]]:
    """Ask vLLM, in a process of its own, for the likeliest continuations of some prompts.

    Arguments: `prompts`, tokens of each; `ranks`, of tensor parallelism; `eager`, whether nothing is compiled.
    Raises UserError with vLLM's last lines if it fails.
    """
    words = [str(folder), str(ranks), json.dumps(eager), json.dumps(prompts)]
    run = subprocess.run(
        [sys.executable, "-m", __name__, *words],
        env={**os.environ, **ENVIRONMENT},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    answers = [line for line in run.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        raise UserError(f"vLLM cannot serve {folder}; its last lines:\n{run.stdout[-3000:]}")
    return json.loads(answers[0].removeprefix(MARK))


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, ranks, eager, prompts = sys.argv[1:]
    server = LLM(
        folder,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=json.loads(eager),
        tensor_parallel_size=int(ranks),
    )
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    questions = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = server.generate(questions, greedy)
    print(MARK + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
