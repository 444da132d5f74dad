"""Score a model on the tasks of lm-evaluation-harness, an optional package: `pip install 'headwater[eval]'`."""

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwater.errors import UserError

ALLOW = "HF_ALLOW_CODE_EVAL"
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

    Raises: `UserError` for numbers out of range, tasks that lm-eval does not have, that run code unasked, or whose data
        cannot be had.

        results = evaluate(*headwater.hf.export_run("runs/first"), ["hellaswag"], limit=100)
    """
    for name, value, least in (
        ("limit", limit, 1),
        ("fewshot", fewshot, 0),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = _task_manager(tasks, include_path)
    if not unsafe_code and (unsafe := unsafe_among(manager, tasks)):
        raise UserError(
            f"{', '.join(unsafe)}: scored by running the code that the model writes, on this machine and with your "
            "rights. If that is what you want, best in a container, pass --unsafe-code"
        )
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers wraps nn.Module.to without its types
    scored = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    options = {
        "num_fewshot": fewshot,
        "limit": limit,
        "log_samples": False,
        "confirm_run_unsafe_code": unsafe_code,
    }
    try:
        with _permission(unsafe_code):
            results = simple_evaluate(scored, tasks=list(tasks), task_manager=manager, **options)
    except (
        ConnectionError,
        FileNotFoundError,
    ) as error:  # the latter for what is not in a cache either
        names = ", ".join(tasks)
        raise UserError(
            f"the data of {names} is not on this machine and cannot be fetched: {error}"
        ) from None
    assert results is not None  # None on ranks other than the first, and there is one
    kept = {name: results[name] for name in KEPT if name in results}
    return json.loads(
        json.dumps(kept, default=float), parse_constant=lambda _: None
    )  # JSON has no NaN


def unsafe_among(manager: Any, names: Sequence[str]) -> list[str]:
    """The tasks that run code which a model writes, among some and those that groups and tags of these names have."""
    found: list[str] = []
    for name in names:
        entry = manager.task_index.get(name)
        if entry is None:
            continue
        settings = entry.cfg or {}
        inside = settings.get("task", []) if isinstance(settings.get("task"), list) else []
        inside = [item for item in inside if isinstance(item, str)]
        inside += [
            other.name
            for other in manager.task_index.values()
            if name in other.tags and other.name != name
        ]
        found += [name] if settings.get("unsafe_code") else unsafe_among(manager, inside)
    return list(dict.fromkeys(found))


@contextmanager
def _permission(granted: bool) -> Iterator[None]:
    """The metric that runs code asks for a variable of the environment, besides lm-eval's own argument."""
    before = os.environ.get(ALLOW)
    if granted:
        os.environ[ALLOW] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ[ALLOW] = before
        elif granted:
            del os.environ[ALLOW]


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
