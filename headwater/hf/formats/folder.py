"""Checkpoint folders: load one, compare two, and write a model with its tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headwater.errors import UserError, spell
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
    if not path.is_file():
        raise UserError(f"{folder} is not a model's folder: it holds no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold an object, and holds a {type(config).__name__}")
    return config


def load(folder: Path, dtype: str = "auto", device: str = "cpu") -> PreTrainedModel:
    """The model of a folder, by the class that its config names where transformers has one."""
    config = read_config(folder)
    check_hashes(folder)
    if "model_type" not in config:
        raise UserError(
            f"{folder / 'config.json'} names no model_type, so it is not a transformers model. "
            "If headwater made the folder, convert it first: headwater convert FOLDER --out OTHER"
        )
    if is_fla(config):
        model: Any = load_fla(folder, config)
        return model.to(device, None if dtype == "auto" else getattr(torch, dtype))
    settings = load_config(folder)
    model_class = class_of(settings)
    unknown = type(settings) not in AutoModelForCausalLM._model_mapping
    if model_class is AutoModelForCausalLM and unknown:
        layout_of(settings.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # says why not, in a line
    try:
        loaded = model_class.from_pretrained(
            folder, config=settings, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"transformers cannot load {folder}: {error}") from None
    return loaded.to(torch.device(device)).eval()


def load_config(folder: Path) -> PreTrainedConfig:
    config = read_config(folder)
    if config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"{folder}: transformers {__version__} has no architecture '{config.get('model_type')}'"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"transformers cannot read {folder / 'config.json'}: {error}") from None


def load_with_tokenizer(folder: Path) -> tuple[PreTrainedModel, Any]:
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        raise UserError(
            f"{folder} holds no tokenizer: copy its files (tokenizer.json, tokenizer_config.json) there"
        )
    model = _runnable(load(folder), folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load the tokenizer of {folder}: {error}") from None
    return model, tokenizer


def _runnable(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Raises UserError for a model whose mixers are kernels for a GPU, on a CPU."""
    kernels = type(model).__module__.partition(".")[0] == "fla"
    if kernels and model.device.type == "cpu":
        raise UserError(
            f"{folder} is a model of flash-linear-attention, which runs on a GPU alone, and this is a CPU"
        )
    return model


def verify_folders(
    first: Path, second: Path, tokens: int, seed: int, dtype: str = "auto", device: str = "cpu"
) -> Verification:
    """Both models on the same random tokens, four rows of them."""
    if tokens < 2:
        raise UserError(
            f"{spell('tokens')} must be at least 2, got {tokens}: the last ones of a row are "
            "decoded from a cache"
        )
    one, two = (_runnable(load(folder, dtype, device), folder) for folder in (first, second))
    vocabulary = min(model.config.get_text_config().vocab_size for model in (one, two))
    rows = torch.randint(0, vocabulary, (4, tokens), generator=torch.Generator().manual_seed(seed))
    converted, reference = (one, two) if hasattr(one.config, "headwater") else (two, one)
    return verify(converted, reference, rows)


def write_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    check_out(out)
    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_out(out: Path) -> None:
    """Refuse a folder that holds files; hidden ones may be there, of a process that was killed."""
    if out.exists() and not (out.is_dir() and all(p.name.startswith(".") for p in out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another {spell('out')}")


def fast_tokenizer(text: str, context: int) -> Any:
    """The tokenizer of a run for transformers. Bytes become a BPE without merges whose ids are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
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

    def printable(value: int) -> bool:
        return 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255

    return (
        chr(byte)
        if printable(byte)
        else chr(256 + sum(not printable(value) for value in range(byte)))
    )
