"""Score a model on the tasks of lm-evaluation-harness, an optional package: `pip install 'headwater[eval]'`."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwater.errors import UserError

KEPT = ("results", "groups", "n-shot", "n-samples", "higher_is_better", "versions")


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
) -> dict[str, Any]:
    """Results by task as lm-eval gives them, without samples. `include_path`: a folder with tasks of your own."""
    for name, value, least in (("limit", limit, 1), ("fewshot", fewshot, 0), ("batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(tasks, include_path)
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers wraps nn.Module.to without its types
    scored = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    try:
        results = simple_evaluate(
            scored, tasks=list(tasks), task_manager=manager, num_fewshot=fewshot, limit=limit, log_samples=False
        )
    except ConnectionError as error:
        names = ", ".join(tasks)
        raise UserError(f"the data of {names} is not on this machine and cannot be fetched: {error}") from None
    assert results is not None  # None on ranks other than the first, and there is one
    kept = {name: results[name] for name in KEPT if name in results}
    return json.loads(json.dumps(kept, default=float), parse_constant=lambda _: None)  # JSON has no NaN


def table(results: dict[str, Any]) -> str:
    from lm_eval.utils import make_table

    return make_table(results).rstrip()


def _task_manager(tasks: Sequence[str], include_path: Path | None) -> Any:
    """Reading the thousands of tasks that lm-eval ships takes seconds, so the user's own are tried alone first."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not include_path.is_dir():
            raise UserError(f"--include-path {include_path} is not a folder")
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        if task not in manager.all_tasks:
            close = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise UserError(
                f"lm-eval has no task '{task}'.{hint} `lm-eval ls tasks` lists them; tasks of your own are YAML files "
                "in the folder that --include-path names"
            )
    return manager
