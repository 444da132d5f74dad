"""Block Attention Residuals as released elsewhere: parameter names and block sizes, both ways.

A release keeps, for each sublayer and for the output, a projection of shape (1, D) and the weight of a norm, (D,).
Here they are the query and the key weight of a read. The first read has one source, so here it has no parameters;
releases carry a pair that nothing depends on, written back as the zeros and ones it began with.

fla counts `attnres_block_size` in sublayers, as headwater does; Kimi K3 counts `attn_res_block_size` in decoder layers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import UserError
from headwater.hf.convert.conversion import convert, load_added
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.layouts import Layout
from headwater.hf.convert.report import Report


@dataclass(frozen=True)
class Release:
    """Names of a release: `<attention>_proj` and `<attention>_norm` in each layer, and so on."""

    attention: str
    mlp: str
    output: str
    block_field: str  # of its config
    block_unit: int  # sublayers in one unit of that field
    eps_fields: tuple[str, ...]
    renames: Mapping[str, str] = field(
        default_factory=dict
    )  # parts of the other names, theirs to transformers'

    def block(self, config: Mapping[str, Any]) -> int:
        """Sublayers in a block."""
        return self.block_unit * int(config[self.block_field])

    def eps(self, config: Mapping[str, Any]) -> float:
        return float(next(config[name] for name in self.eps_fields if name in config))


FLA = Release(
    "attn_res", "mlp_res", "res", "attnres_block_size", 1, ("norm_eps",),
    {".embeddings.": ".embed_tokens.", ".attn.": ".self_attn.", ".attn_norm.": ".input_layernorm.",
     ".mlp_norm.": ".post_attention_layernorm."},
)  # fmt: skip
KIMI_K3 = Release(
    "self_attention_res",
    "mlp_res",
    "output_attn_res",
    "attn_res_block_size",
    2,
    ("rms_norm_eps", "norm_eps"),
)


def release_of(config: Mapping[str, Any]) -> Release:
    for release in (FLA, KIMI_K3):
        if config.get(release.block_field) is not None:
            return release
    raise UserError(f"the config has neither '{FLA.block_field}' nor '{KIMI_K3.block_field}'")


def from_release(
    weights: Mapping[str, Tensor], release: Release, prefix: str = "model."
) -> dict[str, Tensor]:
    """Returns the `weights` of a `release`, which says their names, under ours; `prefix` is the body's in the model."""
    ours: dict[str, Tensor] = {}
    reads = _read_numbers(weights, release, prefix)
    for name, tensor in weights.items():
        if name in reads:
            read, part = reads[name]
            if read > 0:
                ours[f"{prefix}residual.reads.{read}.{part}"] = tensor.reshape(-1)
            continue
        for theirs, plain in release.renames.items():
            name = name.replace(theirs, plain)
        ours[name] = tensor
    return ours


def to_release(
    weights: Mapping[str, Tensor], release: Release, prefix: str = "model."
) -> dict[str, Tensor]:
    """Returns our `weights` under the names of a `release`; `prefix` is the body's in the model.

    Queries are taken as they are, which is right for `scale=one`, the default: a release has no other.

    Raises `headwater.errors.UserError` if there are none of Attention Residuals among them.
    """
    theirs: dict[str, Tensor] = {}
    pattern = re.compile(re.escape(f"{prefix}residual.reads.") + r"(\d+)\.(query|key_weight)")
    numbers = [int(match[1]) for name in weights if (match := pattern.fullmatch(name))]
    if not numbers:
        raise UserError(
            f"no parameters '{prefix}residual.reads.*' of Attention Residuals among the weights"
        )
    last = max(numbers)
    for name, tensor in weights.items():
        if match := pattern.fullmatch(name):
            theirs[_their_name(int(match[1]), match[2], last, release, prefix)] = _their_shape(
                tensor, match[2]
            )
            continue
        for their_part, plain in release.renames.items():
            name = name.replace(plain, their_part)
        theirs[name] = tensor
    like = weights[f"{prefix}residual.reads.{last}.query"]
    for part, start in (("query", torch.zeros_like(like)), ("key_weight", torch.ones_like(like))):
        theirs[_their_name(0, part, last, release, prefix)] = _their_shape(start, part)
    return theirs


def load_released(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    layout: Layout | None = None,
) -> Report:
    """Convert a plain `model` as a release's config says, and load the release's weights, all of them.

    Arguments:
        model: of the release's body, such as a transformers `kimi_linear` for Kimi K3's, or fla's own class built
            without `attnres_block_size`; it is changed in place.
        weights: all tensors of the release by name, the body's under the model's names (of a `transformer` of fla, also
            where the model is a Llama).
        config: of the release; it says the size of a block, and the eps of the depth norms.
        layout: for a body that the table of architectures does not know.

    Returns: the report of the conversion.

    Raises: `headwater.errors.UserError` for a config without a block size, and weights that do not fit.

        load_released(AutoModelForCausalLM.from_config(body), load_file("model.safetensors"), config)
    """
    release = release_of(config)
    block, eps = release.block(config), release.eps(config)
    prefix = _prefix(weights, release)
    own = model.state_dict().keys() & weights.keys()
    if any(
        part in name for name in own for part in release.renames
    ):  # its own class, with its own names
        release = replace(release, renames={})
    ours = from_release(weights, release, prefix)
    sublayers = len(_read_numbers(weights, release, prefix)) // 2 - 1
    report = convert(
        model, "attnres-block", layout=layout, exact=False, block=min(block, sublayers), eps=eps
    )
    load_added(model, model, ours, f"the weights do not fit {report.architecture}")
    conversion = conversion_of(model)[0]
    conversion.report = replace(report, loaded=True)
    return conversion.report


def _prefix(weights: Mapping[str, Tensor], release: Release) -> str:
    """The prefix of the body in the model, by the parameters of the final read."""
    last = f"{release.output}_proj.weight"
    found = (
        name.removesuffix(last) for name in weights if name == last or name.endswith(f".{last}")
    )
    return next(found, "model.")


def _read_numbers(
    weights: Mapping[str, Tensor], release: Release, prefix: str
) -> dict[str, tuple[int, str]]:
    """Their name to the number of the read, and which of its two parameters."""
    site = re.compile(
        re.escape(f"{prefix}layers.")
        + rf"(\d+)\.({release.attention}|{release.mlp})_(proj|norm)\.weight"
    )
    matches = {name: match for name in weights if (match := site.fullmatch(name))}
    numbers = {name: 2 * int(m[1]) + (m[2] == release.mlp) for name, m in matches.items()}
    last = max(numbers.values(), default=-1) + 1
    found = {name: (numbers[name], _part(m[3])) for name, m in matches.items()}
    for kind in ("proj", "norm"):
        name = f"{prefix}{release.output}_{kind}.weight"
        if name not in weights:
            raise UserError(
                f"the weights have no '{name}': without the final read a model of this kind is broken"
            )
        found[name] = (last, _part(kind))
    return found


def _part(kind: str) -> str:
    return "query" if kind == "proj" else "key_weight"


def _their_name(read: int, part: str, last: int, release: Release, prefix: str) -> str:
    kind = "proj" if part == "query" else "norm"
    if read == last:
        return f"{prefix}{release.output}_{kind}.weight"
    return (
        f"{prefix}layers.{read // 2}.{release.mlp if read % 2 else release.attention}_{kind}.weight"
    )


def _their_shape(tensor: Tensor, part: str) -> Tensor:
    return tensor.unsqueeze(0) if part == "query" else tensor
