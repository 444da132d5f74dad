"""Load a release of Block Attention Residuals into a model of transformers; names.py has the names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headwater.errors import UserError
from headwater.hf.convert.conversion import convert, load_added
from headwater.hf.convert.install import conversion_of
from headwater.hf.convert.layouts import Layout
from headwater.hf.convert.report import Report

from .names import FLA, KIMI_K3, from_release, sublayers_in


def load_released(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    layout: Layout | None = None,
) -> Report:
    """Convert a plain `model` as a release's config says, and load the release's weights, all of them.

    Arguments:
        model: of the release's body, such as a transformers `kimi_linear` for Kimi K3's, or fla's own
            class built without `attnres_block_size`; it is changed in place.
        weights: all tensors of the release by name, the body's under the model's names (of a
            `transformer` of fla, also where the model is a Llama).
        config: of the release; it says the size of a block, and the eps of the depth norms.
        layout: for a body that the table of architectures does not know.

    Returns: the report of the conversion.

    Raises: `headwater.errors.UserError` for a config without a block size, and weights that do not fit.

        load_released(AutoModelForCausalLM.from_config(body), load_file("model.safetensors"), config)
    """
    releases = [one for one in (FLA, KIMI_K3) if config.get(one.block_field) is not None]
    if not releases:
        raise UserError(f"the config has neither '{FLA.block_field}' nor '{KIMI_K3.block_field}'")
    release = releases[0]
    # The body's path in the model, by the parameters of the final read
    last = f"{release.output}_proj.weight"
    bodies = [name.removesuffix(last) for name in weights if f".{name}".endswith(f".{last}")]
    prefix = bodies[0] if bodies else "model."
    shared = model.state_dict().keys() & weights.keys()
    # fla's own class has fla's names.
    if any(part in name for name in shared for part, _ in release.renames):
        release = replace(release, renames=())
    # The body's other weights are under the model's own names.
    tensors = from_release(weights, release, prefix)
    # A block may be longer than the network.
    block = min(release.block(config), sublayers_in(weights, release, prefix))
    eps = release.eps(config)
    report = convert(model, "attnres-block", layout=layout, exact=False, block=block, eps=eps)
    load_added(model, model, tensors, f"the weights do not fit {report.architecture}")
    conversion = conversion_of(model)[0]
    conversion.report = replace(report, loaded=True)
    return conversion.report
