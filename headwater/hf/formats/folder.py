"""Checkpoint folders: convert one, compare two, and write a model with its tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, __version__

from headwater.errors import UserError
from headwater.hf.convert.conversion import convert
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.report import Report
from headwater.hf.verify import Verification, verify

from .fla import is_fla, load_fla

# What a checkpoint folder holds besides weights, and a converted model needs unchanged.
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")


def is_transformers(folder: Path) -> bool:
    """Whether a folder is a transformers checkpoint; what headwater writes elsewhere names no model_type."""
    return (folder / "config.json").is_file() and "model_type" in read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a model's folder: it holds no config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def load(folder: Path) -> PreTrainedModel:
    config = read_config(folder)
    if "model_type" not in config:
        raise UserError(
            f"{folder / 'config.json'} names no model_type, so it is not a transformers model. "
            "If headwater made the folder, convert it first: headwater convert FOLDER --out OTHER"
        )
    if is_fla(config):
        return load_fla(folder, config)
    if config["model_type"] not in CONFIG_MAPPING:
        raise UserError(f"{folder}: transformers {__version__} has no architecture '{config['model_type']}'")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"transformers cannot load {folder}: {error}") from None


def load_with_tokenizer(folder: Path) -> tuple[PreTrainedModel, Any]:
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab.*")):
        raise UserError(f"{folder} holds no tokenizer: copy its files (tokenizer.json, tokenizer_config.json) there")
    return load(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def convert_folder(source: Path, out: Path, residual: str | None) -> Report:
    """Write `source` converted to `residual`, attnres-block if None. A model of fla keeps the one it has."""
    check_out(out)
    model = load(source)
    if is_fla(read_config(source)):
        report = conversion_of(model)[0].report
        if residual is not None:
            raise UserError(f"{source} has Attention Residuals already, '{report.residual}': leave --residual out")
    else:
        report = convert(model, residual or "attnres-block")
    model.save_pretrained(out)
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            shutil.copy2(path, out / path.name)
    return report


def verify_folders(first: Path, second: Path, tokens: int, seed: int) -> Verification:
    """Both models on the same random tokens, four rows of them."""
    if tokens < 2:
        raise UserError(f"--tokens must be at least 2, got {tokens}: the last ones of a row are decoded from a cache")
    one, two = load(first), load(second)
    vocabulary = min(one.config.vocab_size, two.config.vocab_size)
    rows = torch.randint(0, vocabulary, (4, tokens), generator=torch.Generator().manual_seed(seed))
    converted, reference = (one, two) if hasattr(one.config, "headwater") else (two, one)
    return verify(converted, reference, rows)


def write_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    check_out(out)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another --out")


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
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token=end, model_max_length=context)


def _byte_letter(byte: int) -> str:
    """How byte-level BPE writes a byte: printable Latin-1 as itself, the others as letters from 256 on, in order."""

    def printable(value: int) -> bool:
        return 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255

    return chr(byte) if printable(byte) else chr(256 + sum(not printable(value) for value in range(byte)))
