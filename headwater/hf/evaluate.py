"""Score a model on the tasks of lm-evaluation-harness, an optional package: `pip install 'headwater[eval]'`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwater.errors import UserError

FIELDS = ("results", "groups", "n-shot", "n-samples", "higher_is_better", "versions")


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    unsafe_code: bool = False,
) -> dict[str, Any]:
    """Score a model on tasks of lm-evaluation-harness.

    Arguments:
        model, tokenizer: as transformers loads them, or as `headwater.hf.export_run` gives them.
        tasks: names of lm-eval's tasks, groups or tags.
        include_path: a folder with YAML files of tasks of your own.
        fewshot: solved examples before each question; None is what the task says.
        limit: questions of each task; None is all.
        batch_size, device: of the forward passes.
        unsafe_code: run the code that the model writes, which tasks such as humaneval ask for: on this machine, with
            your rights and nothing around it.

    Returns: results by task as lm-eval gives them, without samples, fit for JSON.

    Raises: `UserError` for tasks that lm-eval does not have, that run code unasked, or whose data cannot be had.

        model, tokenizer = headwater.hf.export_run(headwater.train.load_run("runs/first"))
        results = evaluate(model, tokenizer, ["hellaswag"], limit=100)
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers wraps nn.Module.to without its types
    # lm-eval's own wrapper runs the model.
    harness = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    options = {
        "task_manager": _task_manager(tasks, include_path),
        "num_fewshot": fewshot,
        "limit": limit,
        "log_samples": False,
        "confirm_run_unsafe_code": unsafe_code,
    }
    # Besides lm-eval's own argument, the metric that runs code asks for a variable of the environment.
    permission = {"HF_ALLOW_CODE_EVAL": "1"} if unsafe_code else {}
    try:
        with mock.patch.dict(os.environ, permission):
            results = simple_evaluate(harness, tasks=list(tasks), **options)
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"the data of {', '.join(tasks)} cannot be fetched: {error}") from None
    except ValueError as error:
        if "confirm_run_unsafe_code" not in str(error):
            raise
        raise UserError(
            "these tasks are scored by running the code that the model writes, on this machine and with your rights. "
            f"If that is what you want, best in a container, pass --unsafe-code ({error})"
        ) from None
    assert results is not None  # None on ranks other than the first, and there is one
    chosen = {name: results[name] for name in FIELDS if name in results}
    # Types of numpy and NaN become what a file can hold.
    text = json.dumps(chosen, default=float)
    return json.loads(text, parse_constant=lambda _: None)  # JSON has no NaN


def table(results: dict[str, Any]) -> str:
    from lm_eval.utils import make_table

    return make_table(results).rstrip()


def _task_manager(tasks: Sequence[str], include_path: Path | None) -> Any:
    """Reading the thousands of tasks that lm-eval ships takes seconds, so the user's own are tried alone first."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise UserError(
            f"lm-eval has no task {', '.join(unknown)}: `lm-eval ls tasks` lists them; tasks of your own are YAML "
            "files in the folder that --include-path names"
        )
    return manager
