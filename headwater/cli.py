"""The `headwater` command. Thin: it reads flags, calls one function, and turns a user's error into one message.

Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater import __version__
from headwater.errors import Interrupted, UserError, nearest, user_values
from headwater.flags import (
    DEMO,
    CompareFlags,
    ConvertFlags,
    DemoFlags,
    DoctorFlags,
    EvalFlags,
    ExportFlags,
    GenerateFlags,
    InspectFlags,
    PlanFlags,
    ReportFlags,
    ResidualsFlags,
    RevertFlags,
    ScalingFlags,
    StudyFlags,
    TrainFlags,
    VerifyFlags,
    Where,
    base_config,
    flag_of,
    parse,
    peek,
    sized,
)
from headwater.models.sampling import check_counts
from headwater.train.config import Config, check
from headwater.train.files import read_json, refuse_others, write_json


def train(argv: list[str]) -> None:
    """Train one model."""
    where = peek(argv, Where())
    base = base_config(where, where.out / "config.json")
    flags = parse(TrainFlags, argv, train, TrainFlags(settings=base))
    settings = check(sized(flags.settings, base, argv))
    from headwater.train import train as run

    result = run(settings, flags.out, resume=flags.resume)
    if int(os.environ.get("RANK", "0")) == 0:
        say(f"{flags.out}: {result.bits_per_byte:.4f} bits per byte on held-out text after {result.steps} steps")


def compare(argv: list[str]) -> None:
    """Train several residuals with several seeds on equal tokens, and print one table."""
    where = peek(argv, Where(out=CompareFlags.out))
    base = base_config(where, where.out / "settings.json")
    default = CompareFlags(settings=base)
    if where.resume and (where.out / "compare.json").exists():
        saved = read_json(where.out / "compare.json")
        default = replace(default, residuals=tuple(saved["residuals"]), seeds=tuple(saved["seeds"]))
    flags = parse(CompareFlags, argv, compare, default)
    if (flags.settings.model.residual, flags.settings.train.seed) != (base.model.residual, base.train.seed):
        raise UserError("compare takes --residuals and --seeds, several of each, in place of --residual and --seed")
    settings = check(sized(flags.settings, base, argv))
    from headwater.train import compare as run

    run(settings, flags.out, residuals=flags.residuals, seeds=flags.seeds, jobs=flags.jobs, resume=flags.resume)
    say(f"Runs and table.json are in {flags.out}; look at them with: headwater report {flags.out}")


def report(argv: list[str]) -> None:
    """Write one HTML page about runs: loss curves, the table, who reads whom along the depth."""
    flags = parse(ReportFlags, argv, report)
    runs, models = apart(flags.folders, flags.prompt, flags.device)
    out = flags.out or (flags.folders[0] / "report.html" if models else None)
    say(f"Report: {make_report(runs, out, models)}")


def matrix(argv: list[str]) -> None:
    """Write one HTML page with the depth-mixing maps of runs side by side, and their measures."""
    flags = parse(ReportFlags, argv, matrix)
    runs, models = apart(flags.folders, flags.prompt, flags.device)
    with user_values():
        from headwater.analyze.matrix import write_matrix

        out = flags.out or (flags.folders[0] / "matrix.html" if models else None)
        say(f"Matrices: {write_matrix(runs, out, models=models)}")


def apart(folders: Sequence[Path], prompt: str, device: str) -> tuple[list[Path], list[Any]]:
    """Folders of runs; and each converted transformers model as a run of one forward pass over the prompt."""
    theirs = [folder for folder in folders if is_transformers(folder)]
    if not theirs:
        return list(folders), []
    check_device(device)
    from headwater.analyze.inspector import inspect as look
    from headwater.analyze.prompted import prompted_run

    found = []
    for folder in theirs:
        model, tokenizer, encode = load_any(folder, device)
        inspection = look(model, encode(prompt), tokenizer=tokenizer, name=folder.resolve().name, removals="none")
        text = model.config.get_text_config()
        found.append(prompted_run(inspection, dim=text.hidden_size, layers=text.num_hidden_layers))
    return [folder for folder in folders if folder not in theirs], found


def is_transformers(folder: Path) -> bool:
    return (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json")


def residuals(argv: list[str]) -> None:
    """Print every residual: formula, parameters, stored activations, traffic, start; of named ones the options too."""
    flags = parse(ResidualsFlags, argv, residuals)
    with user_values():
        from headwater.analyze.table import markdown, print_options, print_table, residual_table

        rows = residual_table(flags.residuals or None, dim=flags.dim, layers=flags.layers)
        if flags.markdown:
            say(markdown(rows).rstrip())
        else:
            print_table(rows)
            print_options(flags.residuals)


def generate(argv: list[str]) -> None:
    """Continue a prompt with a trained model."""
    flags = parse(GenerateFlags, argv, generate)
    with user_values():
        flags.sampling.check()
        check_counts(flags.max_new_tokens, flags.prefill_chunk)
    if flags.stream and len(flags.prompt) > 1:
        raise UserError(f"--stream shows one text as it comes, and there are {len(flags.prompt)} prompts: leave it out")
    from headwater.models.text import continue_texts

    # Bytes that are no text arrive as surrogates.
    prompts = [word.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for word in flags.prompt]
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
        say("" if flags.stream else text if len(texts) == 1 else f"[{prompt}] {text[len(prompt) :]}")
    seconds = time.perf_counter() - began
    count = min(count, flags.max_new_tokens)  # what is left at the end is a step without a token where there are none
    counted = f"{count} tokens" if len(texts) == 1 else f"{count} tokens of each of {len(texts)} texts"
    print(f"{counted} in {seconds:.1f} s: {count * len(texts) / seconds:.0f} tokens/s", file=sys.stderr)


@contextmanager
def ready_for_text(folder: Path, device: str, tensor: int) -> Iterator[tuple[Any, Any]]:
    """What continues texts, and its tokenizer: of a run, on `tensor` ranks; or of a transformers folder."""
    if tensor != 1 and is_transformers(folder):
        raise UserError(f"--tensor divides the models of runs, and {folder} is a transformers model: leave it out")
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


def inspect(argv: list[str]) -> None:
    """Look inside a model as it reads a prompt: one HTML page, or --serve it with a prompt box."""
    flags = parse(InspectFlags, argv, inspect)
    if not 1 <= len(flags.models) <= 2 or flags.top < 1:
        raise UserError(f"inspect takes one model or two, and --top at least 1; got {len(flags.models)}, {flags.top}")
    check_device(flags.device)
    from headwater.analyze.inspector import Inspection
    from headwater.analyze.inspector import inspect as run
    from headwater.analyze.inspector.serve import serve

    loaded = [load_any(folder, flags.device) for folder in flags.models]
    short = len({folder.name for folder in flags.models}) == len(flags.models)
    names = [folder.name if short and folder.name else str(folder) for folder in flags.models]

    def look(prompt: str) -> list[Inspection]:
        options: dict[str, Any] = {"top": flags.top, "removals": flags.removals}
        return [
            run(model, encode(prompt), tokenizer=tokenizer, name=name, **options)
            for (model, tokenizer, encode), name in zip(loaded, names)
        ]

    prompt = flags.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # bytes that are no text
    if flags.serve:
        serve(look, prompt, flags.port, say)
        return
    first, *other = look(prompt)
    say(f"Inspector: {first.save(flags.out, *other)}")


def load_any(folder: Path, device: str) -> tuple[Any, Any, Callable[[str], list[int]]]:
    """A model, its tokenizer and how that encodes: of a run, or of a transformers folder."""
    if is_transformers(folder):
        needs("transformers", "hf")
        from headwater.hf.formats.folder import load_with_tokenizer

        model: Any
        model, tokenizer = load_with_tokenizer(folder)
        return model.to(device), tokenizer, lambda text: tokenizer(text)["input_ids"]
    from headwater.train import load_run

    loaded = load_run(folder, device)
    return loaded.model, loaded.tokenizer, lambda text: loaded.tokenizer.encode(text).tolist()


def convert(argv: list[str]) -> None:
    """Swap the residual of a Hugging Face checkpoint, or export a run to that format."""
    flags = parse(ConvertFlags, argv, convert)
    needs("transformers", "hf")
    check_device(flags.device)
    from headwater import hf
    from headwater.hf.formats.convert import convert_folder
    from headwater.hf.formats.folder import check_out, is_transformers, write_model

    if is_transformers(flags.folder):
        report = convert_folder(
            flags.folder,
            flags.out,
            flags.residual,
            layout=None if flags.layout is None else hf.Layout.from_text(flags.layout),
            dtype=flags.dtype,
            device=flags.device,
            check={"auto": None, "yes": True, "no": False}[flags.check],
            remote_code=flags.remote_code,
        )
        say(str(report))
        return
    if flags.layout is not None or flags.dtype is not None or flags.remote_code:
        raise UserError(
            f"--layout, --dtype and --remote-code are for transformers checkpoints, and {flags.folder} is none: "
            "convert it without them, then what was written with them"
        )
    check_out(flags.out)
    model, tokenizer = hf.export_run(flags.folder)
    if flags.residual is not None:
        trained = getattr(model.config, "headwater", None)
        if trained is not None:
            raise UserError(f"{flags.folder} was trained with '{trained['residual']}': leave --residual out")
        say(str(hf.convert(model, flags.residual)))
    write_model(model, tokenizer, flags.out)
    say(f"{flags.out}: a {type(model).__name__} with the weights of {flags.folder}")


def revert(argv: list[str]) -> None:
    """Take a conversion back: write a converted checkpoint as the plain model it came from."""
    flags = parse(RevertFlags, argv, revert)
    needs("transformers", "hf")
    from headwater.hf.formats.convert import revert_folder

    residual = revert_folder(flags.folder, flags.out)
    say(f"{flags.out}: the plain model of {flags.folder}, which had '{residual}'")


def verify(argv: list[str]) -> None:
    """Compare two Hugging Face checkpoints: KL, largest logit difference. Fails if they are not equal."""
    flags = parse(VerifyFlags, argv, verify)
    needs("transformers", "hf")
    from headwater.hf.formats.folder import verify_folders

    check_device(flags.device)
    result = verify_folders(*flags.folders, flags.tokens, flags.seed, flags.dtype, flags.device)
    if not result.equal:
        raise UserError(str(result))
    say(str(result))


def evaluate(argv: list[str]) -> None:
    """Score a checkpoint on tasks of lm-evaluation-harness: a table, and a JSON file beside the checkpoint."""
    flags = parse(EvalFlags, argv, evaluate, name="eval")
    needs("transformers", "hf")
    needs("lm_eval", "eval")
    tasks = [task for word in flags.tasks for task in word.split(",") if task]
    if not tasks:
        raise UserError("--tasks names no task")
    check_device(flags.device)
    from headwater.hf import export_run
    from headwater.hf.evaluate import evaluate as run
    from headwater.hf.evaluate import table
    from headwater.hf.formats.folder import is_transformers, load_with_tokenizer

    model, tokenizer = (load_with_tokenizer if is_transformers(flags.folder) else export_run)(flags.folder)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about how it is called, which is our doing
    options = {name: getattr(flags, name) for name in ("fewshot", "limit", "batch_size", "device")}
    results = run(model, tokenizer, tasks, include_path=flags.include_path, unsafe_code=flags.unsafe_code, **options)
    settings = getattr(model.config, "headwater", {"residual": "standard"})
    about = {"checkpoint": str(flags.folder), "residual": settings["residual"], **options}
    out = flags.out or flags.folder / "eval.json"
    write_json(out, {**about, **results})
    say(f"{table(results)}\n{out}: these results with their settings")


def plan(argv: list[str]) -> None:
    """Say what a run will need on each rank: memory, bytes between stages, bubble. Starts nothing."""
    argv = ["--config", *argv] if argv and not argv[0].startswith("-") else argv
    where = peek(argv, Where())
    flags = parse(PlanFlags, argv, plan, PlanFlags(settings=base_config(where, where.out / "config.json")))
    settings = check(flags.settings)
    from headwater.train.distributed.plan import describe, make_plan
    from headwater.train.run import named_model

    with user_values():
        model = named_model(settings.model, settings.data.bpe_vocab if settings.data.tokenizer == "bpe" else 257)
        made = make_plan(settings, model, flags.world, half=flags.gpu, fused=flags.gpu)
    say(describe(made, flags.memory, settings.train.checkpoint_activations))


def export(argv: list[str]) -> None:
    """Write the model of a run, whatever its layout, as one safetensors file."""
    flags = parse(ExportFlags, argv, export)
    refuse_others(flags.out, "an exported model")
    from headwater.train import load_run

    model, tokenizer, _ = load_run(flags.folder)
    model.save(flags.out)
    tokenizer.save(flags.out)
    say(f"{flags.out}: {model.parameter_count()['total']:,} parameters in model.safetensors")


def study(argv: list[str]) -> None:
    """Run what is missing of the runs that a TOML file describes, as far as time allows."""
    flags = parse(StudyFlags, argv, study)
    from headwater.train.study import study as run

    run(flags.recipe, flags.out, minutes=flags.minutes)


def scaling(argv: list[str]) -> None:
    """Fit loss against compute for each residual, and say how much compute each is worth."""
    flags = parse(ScalingFlags, argv, scaling)
    with user_values():
        from headwater.analyze.scaling import scaling_of, table

        say(table(scaling_of(flags.folders, flags.baseline), flags.baseline))


def doctor(argv: list[str]) -> None:
    """Say what this machine has, and how headwater will run on it; fails if something stands in the way."""
    parse(DoctorFlags, argv, doctor)
    from headwater.doctor import examine

    findings = examine()
    width = max(len(name) for name, _, _ in findings)
    say("\n".join(f"{'!' if problem else ' '} {name:<{width}}  {state}" for name, state, problem in findings))
    if problems := sum(problem for _, _, problem in findings):
        raise UserError(f"{problems} of these must be mended: the lines with an exclamation mark")


def demo(argv: list[str]) -> None:
    """Compare the plain residual with Attention Residuals on this machine in a few minutes."""
    flags = parse(DemoFlags, argv, demo)
    from headwater.train import compare as run

    config = Config(model=DEMO["model"], optim=DEMO["optim"], train=DEMO["train"])
    begun = (flags.out / "compare.json").exists()
    run(config, flags.out, residuals=DEMO["residuals"], seeds=DEMO["seeds"], jobs=flags.jobs, resume=begun)
    say(f"Report: {make_report([flags.out], flags.out / 'report.html').resolve()}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "compare": compare,
    "report": report,
    "matrix": matrix,
    "residuals": residuals,
    "generate": generate,
    "inspect": inspect,
    "convert": convert,
    "revert": revert,
    "verify": verify,
    "eval": evaluate,
    "plan": plan,
    "export": export,
    "study": study,
    "scaling": scaling,
    "demo": demo,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # 25 lines of C++ on a CPU without bf16
    if words[0:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        say(usage())
        return 0
    if words[0] in ("-V", "--version"):
        say(f"headwater {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise UserError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS)}")
        COMMANDS[words[0]](words[1:])
    except UserError as error:
        return fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader has seen enough, as in `headwater residuals | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it on its way out
        return 0
    except KeyboardInterrupt:
        return fail("stopped by Ctrl-C outside of a training step; what was saved before is intact", 130)
    except OSError as error:
        if error.errno not in SYSTEM_ERRORS:
            raise
        advice = SYSTEM_ERRORS[error.errno].format(flag=flag_of(words, error.filename))
        return fail(f"{error.strerror}: {error.filename or 'while writing'}. {advice}", 1)
    return 0


SYSTEM_ERRORS = {
    errno.ENOSPC: "Make room, then run the same command with --resume",
    errno.EDQUOT: "Make room, then run the same command with --resume",
    errno.EACCES: "Choose a folder that you may write to with {flag}",
    errno.EROFS: "Choose a folder that you may write to with {flag}",
    errno.ENOTDIR: "A file stands where a folder is needed: choose another path with {flag}",
    errno.EEXIST: "A file stands where a folder is needed: choose another path with {flag}",
    errno.EISDIR: "A folder stands where a file is needed: choose another path with {flag}",
    errno.ENOENT: "It was there a moment ago, or the path is wrong: run the command again",
}


def needs(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"this command needs the package `{module}`: pip install 'headwater[{extra}]'")


def check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: this machine has no CUDA device that torch can use")


def make_report(folders: list[Path], out: Path | None, models: Sequence[Any] = ()) -> Path:
    from headwater.analyze.report import write_report

    with user_values():
        return write_report(folders, out, models=models)


def usage() -> str:
    lines = [f"  {name:<10} {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()]
    about = "headwater: the residual stream as a part you can swap.\n\nusage: headwater COMMAND [FLAGS]\n"
    more = "\nheadwater COMMAND --help lists the flags of a command; headwater --version says which one this is."
    return "\n".join([about, *lines, more])


def say(text: str) -> None:
    print(text, flush=True)


def fail(message: str, code: int) -> int:
    print(f"headwater: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
