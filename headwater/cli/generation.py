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

from headwater.cli.flags import GenerateFlags
from headwater.cli.models import check_device, is_transformers, load_any, say
from headwater.cli.parser import parse
from headwater.errors import Interrupted, UserError, user_values
from headwater.generation.sampling import check_counts


def generate(argv: list[str]) -> None:
    """Continue a prompt with a trained model."""
    flags = parse(GenerateFlags, argv, generate)
    # What is wrong with the flags is said before anything heavy is imported.
    with user_values():
        flags.sampling.check()
        check_counts(flags.max_new_tokens, flags.prefill_chunk)
    if flags.stream and len(flags.prompt) > 1:
        raise UserError(
            f"--stream shows one text as it comes, and there are {len(flags.prompt)} prompts: "
            "leave it out"
        )
    check_device(flags.device)
    # A folder of transformers is continued by transformers, a run by headwater.
    prompts = [_as_text(word) for word in flags.prompt]
    if is_transformers(flags.folder):
        continue_with_transformers(flags, prompts)
        return
    with ready_run(flags.folder, flags.device, flags.tensor) as (model, tokenizer):
        from headwater.generation.text_pieces import continue_texts

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


def _as_text(word: str) -> str:
    """Replace bytes that are no text, which arrive as surrogates."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextmanager
def ready_run(folder: Path, device: str, tensor: int) -> Iterator[tuple[Any, Any]]:
    """Load a run's decoder, on `tensor` ranks if there are several, and its tokenizer."""
    if tensor == 1:
        model, tokenizer, _ = load_any(folder, device)
        yield model, tokenizer
        return
    from headwater.train.distributed.generate import divided_run

    with divided_run(folder, device, tensor) as parts:
        yield parts


def show_texts(steps: Iterator[list[str]], prompts: list[str], flags: GenerateFlags) -> None:
    """Print the texts, as they come or at the end, and how fast they came."""
    began = time.perf_counter()
    texts, count = list(prompts), 0
    try:
        if flags.stream:
            say(texts[0], end="")
        with user_values():
            # A step brings a piece of each text.
            for pieces in steps:
                if flags.stream:
                    say(pieces[0], end="")
                texts = [text + piece for text, piece in zip(texts, pieces)]
                count += 1
    except KeyboardInterrupt:
        say("")
        raise Interrupted(f"stopped by Ctrl-C after {count} tokens", signal.SIGINT) from None
    # A stream has shown its text already.
    for prompt, text in zip(prompts, texts):
        show_text(prompt, text, flags)
    # The last step may bring only text that was held back, and no token.
    count = min(count, flags.max_new_tokens)
    counted = f"{count} tokens"
    if len(texts) > 1:
        counted = f"{count} tokens of each of {len(texts)} texts"
    show_speed(counted, count * len(texts), began)


def show_text(prompt: str, text: str, flags: GenerateFlags) -> None:
    """Print a whole text: behind its prompt if there are several, and not twice after a stream."""
    if flags.stream:
        say("")
    elif len(flags.prompt) == 1:
        say(text)
    else:
        say(f"[{prompt}] {text[len(prompt) :]}")


def show_speed(counted: str, tokens: int, began: float) -> None:
    seconds = time.perf_counter() - began
    print(f"{counted} in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s", file=sys.stderr)


def continue_with_transformers(flags: GenerateFlags, prompts: list[str]) -> None:
    """Show what the model's own `generate` makes of the prompts, one after the other."""
    if flags.tensor != 1:
        raise UserError(
            f"--tensor divides the models of runs, and {flags.folder} is a transformers model: "
            "leave it out"
        )
    model, tokenizer, _ = load_any(flags.folder, flags.device)
    from transformers import TextStreamer, set_seed

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            say(text, end="\n" if stream_end else "")

    # Prompts are continued one after the other, each with a seed of its own.
    began, count = time.perf_counter(), 0
    options = transformers_options(flags)
    if flags.stream:
        options["streamer"] = Streamer(tokenizer, skip_special_tokens=True)
    for number, prompt in enumerate(prompts):
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(flags.device)
        read = tokens.shape[1]
        # Without tokens the model begins a text by itself.
        inputs = tokens if read else None
        set_seed(flags.seed + number)
        with user_values():
            (row,) = model.generate(inputs, **options, tokenizer=tokenizer)
        count += len(row) - read
        # The prompt is decoded with what follows: alone, a first word would lose its space.
        before = tokenizer.decode(row[:read], skip_special_tokens=True)
        text = tokenizer.decode(row, skip_special_tokens=True)
        continuation = text[len(before) :]
        for stop in flags.stop:
            continuation = continuation.partition(stop)[0]
        if not flags.stream:  # the streamer has shown it
            show_text(prompt, prompt + continuation, flags)
    show_speed(f"{count} tokens", count, began)


def transformers_options(flags: GenerateFlags) -> dict[str, Any]:
    """Say in transformers' words what the flags ask for; unlike there, top_k is off by default."""
    sampling = flags.sampling
    options: dict[str, Any] = {
        "max_new_tokens": flags.max_new_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        # transformers draws among 50 tokens unless it is told otherwise.
        options["temperature"] = sampling.temperature
        options["top_k"] = sampling.top_k or 0
        options["top_p"] = sampling.top_p or 1.0
        options["min_p"] = sampling.min_p
    if flags.stop:
        options["stop_strings"] = list(flags.stop)
    if flags.prefill_chunk != "auto":
        options["prefill_chunk_size"] = flags.prefill_chunk
    return options
