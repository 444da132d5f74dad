"""The command that continues prompts: `headwater generate`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.cli.flags import GenerateFlags, parse
from headwater.cli.models import check_device, is_transformers, load_any, say
from headwater.errors import Interrupted, UserError, user_values
from headwater.models.sampling import check_counts


def generate(argv: list[str]) -> None:
    """Continue a prompt with a trained model."""
    flags = parse(GenerateFlags, argv, generate)
    with user_values():
        flags.sampling.check()
        check_counts(flags.max_new_tokens, flags.prefill_chunk)
    if flags.stream and len(flags.prompt) > 1:
        raise UserError(
            f"--stream shows one text as it comes, and there are {len(flags.prompt)} prompts: leave it out"
        )
    from headwater.models.text import continue_texts

    # Bytes that are no text arrive as surrogates.
    prompts = [
        word.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for word in flags.prompt
    ]
    check_device(flags.device)
    with ready_for_text(flags.folder, flags.device, flags.tensor) as (model, tokenizer):
        steps = continue_texts(
            model,
            tokenizer,
            prompts,
            flags.max_new_tokens,
            flags.sampling,
            stops=flags.stop,
            seed=flags.seed,
            prefill_chunk=flags.prefill_chunk,
        )
        if int(os.environ.get("RANK", "0")):  # of torchrun: the first rank shows what all have
            with user_values():
                list(steps)
        else:
            show_texts(steps, prompts, flags)


def show_texts(steps: Iterator[list[str]], prompts: list[str], flags: GenerateFlags) -> None:
    """The texts, as they come or at the end, and how fast they came."""
    began, count, texts = time.perf_counter(), 0, list(prompts)
    try:
        print(texts[0] if flags.stream else "", end="", flush=True)
        with user_values():
            for new in steps:
                print(new[0] if flags.stream else "", end="", flush=True)
                texts, count = [text + piece for text, piece in zip(texts, new)], count + 1
    except KeyboardInterrupt:
        print(flush=True)
        raise Interrupted(f"stopped by Ctrl-C after {count} tokens", signal.SIGINT) from None
    for prompt, text in zip(prompts, texts):
        say(
            "" if flags.stream else text if len(texts) == 1 else f"[{prompt}] {text[len(prompt) :]}"
        )
    seconds = time.perf_counter() - began
    count = min(
        count, flags.max_new_tokens
    )  # what is left at the end is a step without a token where there are none
    counted = (
        f"{count} tokens" if len(texts) == 1 else f"{count} tokens of each of {len(texts)} texts"
    )
    print(
        f"{counted} in {seconds:.1f} s: {count * len(texts) / seconds:.0f} tokens/s",
        file=sys.stderr,
    )


@contextmanager
def ready_for_text(folder: Path, device: str, tensor: int) -> Iterator[tuple[Any, Any]]:
    """What continues texts, and its tokenizer: of a run, on `tensor` ranks; or of a transformers folder."""
    if tensor != 1 and is_transformers(folder):
        raise UserError(
            f"--tensor divides the models of runs, and {folder} is a transformers model: leave it out"
        )
    if tensor != 1:
        from headwater.train.distributed.generate import divided_run

        with divided_run(folder, device, tensor) as parts:
            yield parts
        return
    model, tokenizer, _ = load_any(folder, device)
    if is_transformers(folder):
        from headwater.hf.generate import TransformersEngine, Words

        model, tokenizer = TransformersEngine(model), Words(tokenizer)
    yield model, tokenizer
