"""Commands about checkpoints of transformers."""

from __future__ import annotations

import importlib.util
import logging

from headwater.cli.flags import ConvertFlags, EvalFlags, RevertFlags, ServeCheckFlags, VerifyFlags
from headwater.cli.models import check_device, is_transformers, say
from headwater.cli.parser import parse
from headwater.errors import UserError, command
from headwater.runs.files import read_json
from headwater.runs.tables import Table, plain
from headwater.train.files import require, write_json


def convert(argv: list[str]) -> None:
    """Swap the residual of a Hugging Face checkpoint, or export a run to that format."""
    flags = parse(ConvertFlags, argv, convert)
    require("transformers", "hf")
    check_device(flags.device)

    if not flags.folder.exists():
        raise UserError(
            f"{flags.folder} is not a folder: give that of a model, or of a run. For a model of the Hub, first: "
            "hf download NAME --local-dir FOLDER"
        )
    if is_transformers(flags.folder):
        convert_checkpoint(flags)
    else:
        convert_run(flags)


def convert_checkpoint(flags: ConvertFlags) -> None:
    from headwater.hf import Layout
    from headwater.hf.formats.convert import add_remote_code, convert_folder, is_converted

    unchanged = (flags.residual, flags.layout, flags.dtype) == (None, None, None)
    if flags.remote_code and unchanged and is_converted(flags.folder):
        add_remote_code(flags.folder, flags.out)
        loads = "trust_remote_code=True loads it without headwater"
        say(f"{flags.out}: {flags.folder} with a modeling file. {loads}")
        return
    report = convert_folder(
        flags.folder,
        flags.out,
        flags.residual,
        layout=None if flags.layout is None else Layout.from_text(flags.layout),
        dtype=flags.dtype,
        device=flags.device,
        check={"auto": None, "yes": True, "no": False}[flags.check],
        remote_code=flags.remote_code,
    )
    compare = command("verify", flags.folder, flags.out)
    say(f"{report}\n{flags.out}: the converted model. To compare: {compare}")


def convert_run(flags: ConvertFlags) -> None:
    import torch

    from headwater import hf
    from headwater.hf.formats.folder import check_out, write_model
    from headwater.train import load_run

    if flags.layout is not None or flags.remote_code:
        raise UserError(
            f"--layout and --remote-code are for transformers checkpoints, and {flags.folder} is none: convert it "
            "without them, then what was written with --remote-code, unless it is of headwater's own decoder"
        )
    check_out(flags.out)
    model, tokenizer = hf.export_run(load_run(flags.folder))
    if flags.residual is not None:
        trained = getattr(model.config, "headwater", None)
        if trained is not None:
            spec = trained["residual"]
            raise UserError(f"{flags.folder} was trained with '{spec}': leave --residual out")
        say(str(hf.convert(model, flags.residual)))
    if flags.dtype is not None:
        model.to(getattr(torch, flags.dtype))
    write_model(model, tokenizer, flags.out)
    say(f"{flags.out}: a {type(model).__name__} with the weights of {flags.folder}")


def revert(argv: list[str]) -> None:
    """Take a conversion back: write a converted checkpoint as the plain model it came from."""
    flags = parse(RevertFlags, argv, revert)
    require("transformers", "hf")
    from headwater.hf.formats.convert import revert_folder

    residual = revert_folder(flags.folder, flags.out)
    say(
        f"{flags.out}: the plain model of {flags.folder}, without '{residual}' and what that has learned"
    )


def verify(argv: list[str]) -> None:
    """Compare two Hugging Face checkpoints: KL, largest logit difference. Fails if they are not equal."""
    flags = parse(VerifyFlags, argv, verify)
    require("transformers", "hf")
    from headwater.hf.formats.folder import verify_folders

    check_device(flags.device)
    result = verify_folders(*flags.folders, flags.tokens, flags.seed, flags.dtype, flags.device)
    if not result.equal:
        raise UserError(str(result))
    say(str(result))


def serve_check(argv: list[str]) -> None:
    """Say which servers take a checkpoint folder. Where vLLM is installed, compare its tokens."""
    flags = parse(ServeCheckFlags, argv, serve_check, name="serve-check")
    from headwater.integrations.vllm import compare_tokens, has_remote_code, servers

    if not is_transformers(flags.folder):
        write = command("convert", flags.folder, "--out", "OUT")
        raise UserError(f"{flags.folder} is no checkpoint of transformers. Write one: {write}")
    config = read_json(flags.folder / "config.json")
    say(plain(Table(["", ""], [[*row] for row in servers(flags.folder, config).items()])))
    if has_remote_code(config) and importlib.util.find_spec("vllm"):
        say(compare_tokens(flags.folder))


def evaluate(argv: list[str]) -> None:
    """Score a checkpoint on tasks of lm-evaluation-harness: a table, and a JSON file beside the checkpoint."""
    flags = parse(EvalFlags, argv, evaluate, name="eval")
    require("transformers", "hf")
    require("lm_eval", "eval")
    tasks = [task for word in flags.tasks for task in word.split(",") if task]
    check_device(flags.device)
    from headwater.hf import export_run
    from headwater.hf.evaluate import evaluate as run
    from headwater.hf.evaluate import table
    from headwater.hf.formats.folder import load_with_tokenizer
    from headwater.train import load_run

    if is_transformers(flags.folder):
        model, tokenizer = load_with_tokenizer(flags.folder)
    else:
        model, tokenizer = export_run(load_run(flags.folder))
    # It warns about how it is called, which is our doing.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    options = {name: getattr(flags, name) for name in ("fewshot", "limit", "batch_size", "device")}
    results = run(
        model,
        tokenizer,
        tasks,
        include_path=flags.include_path,
        unsafe_code=flags.unsafe_code,
        **options,
    )
    settings = getattr(model.config, "headwater", {"residual": "standard"})
    about = {"checkpoint": str(flags.folder), "residual": settings["residual"], **options}
    out = flags.out or flags.folder / "eval.json"
    write_json(out, {**about, **results})
    say(f"{table(results)}\n{out}: these results with their settings")
