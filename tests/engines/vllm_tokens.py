"""Greedy tokens that vLLM gives to a folder: python vllm_tokens.py FOLDER RANKS EAGER PROMPTS, the last two as JSON."""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
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
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = server.generate(asked, greedy)
    print("RESULT", json.dumps([answer.outputs[0].token_ids for answer in answers]), flush=True)
