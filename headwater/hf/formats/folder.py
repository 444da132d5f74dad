"""Checkpoint folders: load one, compare two, and write a model with its tokenizer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headwater.errors import SettingError, UserError, spell
from headwater.folders import check_hashes, whole_folder
from headwater.hf.convert.classes import class_of
from headwater.hf.convert.refusals import layout_of
from headwater.hf.verify import Verification, verify

from .fla import is_fla, load_fla


def is_transformers(folder: Path) -> bool:
    """Tell whether a folder is a transformers checkpoint; what headwater writes elsewhere names no model_type."""
    return (folder / "config.json").is_file() and "model_type" in read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Turn what transformers raises about a file into a UserError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"transformers cannot load {what}: {error}") from None


def load(folder: Path, dtype: str = "auto", device: str = "cpu") -> PreTrainedModel:
    """The model of a folder, by the class that its config names where transformers has one."""
    config = read_config(folder)
    check_hashes(folder)
    # Its folder names a class that is not transformers' own.
    if is_fla(config):
        model: Any = load_fla(folder, config)
        return model.to(device, None if dtype == "auto" else getattr(torch, dtype))
    settings = load_config(folder)
    model_class = class_of(settings)
    unknown = type(settings) not in AutoModelForCausalLM._model_mapping
    # Else transformers would answer with a list of all its classes.
    if model_class is AutoModelForCausalLM and unknown:
        layout_of(settings.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # says why not, in a line
    with reading(folder):
        model = model_class.from_pretrained(
            folder, config=settings, dtype=dtype, local_files_only=True
        )
    return model.to(torch.device(device)).eval()


def load_config(folder: Path) -> PreTrainedConfig:
    with reading(folder / "config.json"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_with_tokenizer(folder: Path) -> tuple[PreTrainedModel, Any]:
    # Said before the weights are read, which may take minutes.
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        raise UserError(f"{folder} holds no tokenizer: copy its files (tokenizer.json, ...) there")
    model = _runnable(load(folder), folder)
    with reading(f"the tokenizer of {folder}"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return model, tokenizer


def _runnable(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Raises UserError for a model whose mixers are kernels for a GPU, on a CPU."""
    if type(model).__module__.startswith("fla.") and model.device.type == "cpu":
        raise UserError(
            f"{folder} is a model of flash-linear-attention, which runs on a GPU alone, and this is a CPU"
        )
    return model


def verify_folders(
    first: Path, second: Path, tokens: int, seed: int, dtype: str = "auto", device: str = "cpu"
) -> Verification:
    """Compare two models on the same random tokens, four rows of them."""
    if tokens < 2:
        raise SettingError(
            "tokens", "must be at least 2: the last ones of a row are decoded from a cache", tokens
        )
    one, other = (_runnable(load(folder, dtype, device), folder) for folder in (first, second))
    # Tokens that both models have.
    vocabulary = min(model.config.get_text_config().vocab_size for model in (one, other))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (4, tokens), generator=generator)
    # The plain one is the reference, whichever was named first.
    if hasattr(one.config, "headwater"):
        return verify(one, other, rows)
    return verify(other, one, rows)


def write_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    check_out(out)
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_out(out: Path) -> None:
    """Refuse a folder that holds files; hidden ones may be there, of a process that was killed."""
    files = [out]
    if out.is_dir():
        files = [path for path in out.iterdir() if not path.name.startswith(".")]
    if out.exists() and files:
        raise UserError(f"{out} exists and is not an empty folder: choose another {spell('out')}")


def fast_tokenizer(text: str, context: int) -> Any:
    """The tokenizer of a run for transformers. Bytes become a BPE without merges whose ids are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # headwater's own tokenizers end a text with this token.
    end = "<|endoftext|>"
    # Bytes are a vocabulary of 256 letters without merges.
    if json.loads(text).get("type") == "bytes":
        vocabulary = {_byte_letter(byte): byte for byte in range(256)} | {end: 256}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    else:
        inner = Tokenizer.from_str(text)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token=end, model_max_length=context
    )


def _byte_letter(byte: int) -> str:
    """The letter for a byte in byte-level BPE: printable Latin-1 as itself, others as letters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + byte - sum(other < byte for other in printable))
