"""Swap the residual of a transformers model in place."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headwater.errors import UserError, check_fit, user_values

from .adapters import check_adapters, keep_in_adapters
from .classes import config_class, head_class
from .install import conversion_of, install, revert
from .layouts import PREFIX, Layout
from .plan import Plan, new_plan, opened_plan, saved_plan
from .releases import RELEASES
from .report import Report
from .trial import NotTried, Trial, check_off_start, difference, try_plain


def convert(
    model: nn.Module,
    residual: str = "attnres-block",
    *,
    layout: Layout | None = None,
    exact: bool = True,
    check: bool = True,
    **options: Any,
) -> Report:
    """Replace the plain residual of a transformers model by another, in place.

    No parameter is renamed; the added ones live under `residual.` of the model that owns the layers, on its device
    (also meta) and in its dtype. Nothing is changed where an error is raised.

    Arguments:
        model: a transformers model with decoder layers, or a module that holds one (a PeftModel).
        residual: its name, with options after a colon if you like: "attnres-block:block=4". `headwater residuals`
            lists them.
        layout: what the parts of a decoder layer are called, for an architecture that the table does not know.
        exact: multiply every read so that, until it is trained, the model computes what it did. False leaves reads at
            the residual's own scale, as a model trained from scratch has them, and relies on the norms to cancel it.
        check: run a few random tokens before and after, some of them decoded from a cache, some rows padded; what is
            not the same function is refused. A model that cannot run (on the meta device) is not checked, and the
            report says so.
        options: of the residual, such as block=4.

    Returns: a `Report`; printed, it begins with what was done and measured, then lists every site.

    Raises: `headwater.errors.UserError` for a model, architecture, layout, residual or option that does not fit.

        model = AutoModelForCausalLM.from_pretrained("path/to/a/llama")
        print(headwater.convert(model, "attnres-block", block=4))
    """
    # All that can be refused is refused before anything is changed.
    return _apply(model, new_plan(model, residual, layout, exact, options), check)


def open_residual(model: nn.Module, *, check: bool = True) -> Report:
    """Put the released residual of a transformers model behind `begin`, `read`, `write` and `end`, in place.

    The body stays as it is. The residual becomes headwater's own, with the checkpoint's weights, as `residual` of the
    model that owns the layers. So `headwater.record`, `headwater.mixing` and `headwater.inspect` work on the model,
    and it trains and saves as a converted model does. `headwater.revert` gives transformers' own model back, with the
    weights that the residual has then.

    Arguments:
        model: a transformers model of one of the types that `headwater.hf.RELEASES` lists, or a module that holds one.
        check: run a few random tokens before and after, as `headwater.convert` does.

    Returns: a `Report`.

    Raises: `headwater.errors.UserError` for a model of another type, and one that would compute something else.

        model = AutoModelForCausalLM.from_pretrained("path/to/a/deepseek_v4")
        print(headwater.hf.open_residual(model))
    """
    return _apply(model, opened_plan(model), check)


def is_released(model: nn.Module) -> bool:
    """Tell whether `open_residual` takes a model as it is."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return any(config.model_type in RELEASES for config in configs)


def _apply(model: nn.Module, plan: Plan, check: bool) -> Report:
    check_adapters(model)
    try:
        if not check:
            raise NotTried("it was not asked for")
        plain = try_plain(plan.parts)
    except NotTried as reason:
        _install(plan, unchecked=str(reason))
    else:
        _install_checked(model, plan, plain)
    keep_in_adapters(model)
    return conversion_of(model)[0].report


def _install_checked(model: nn.Module, plan: Plan, plain: Trial) -> None:
    """Convert, and compare with what the plain model gave; undo it if that differs.

    A residual that starts as something else says nothing of the layout, so the plain one is tried in
    its place.
    """
    same = plan.equal_at_start
    _install(plan if same else plan.with_plain_residual())
    # From here on the model is another one: whatever fails, it goes back.
    try:
        distance = difference(plan.parts, plain)
        if not same:
            revert(model)
            _install(plan)
        conversion = conversion_of(model)[0]
        if conversion.depth.residual.token_local:
            check_off_start(plan.parts, plain, conversion.depth.residual)
    except BaseException:  # Ctrl-C too: half of a check is none
        revert(model)
        raise
    conversion.report = replace(
        conversion.report,
        difference=distance,
        tokens=plain.tokens,
        dtype=str(plain.dtype).removeprefix("torch."),
        unchecked=None,
    )


def convert_with(model: nn.Module, settings: Mapping[str, Any]) -> Report:
    """Convert as a saved config or delta file says."""
    return _install(saved_plan(model, settings))


def _install(plan: Plan, unchecked: str = "it was not asked for") -> Report:
    """A model that was reverted after it was loaded has a plain config again."""
    config = type(plan.parts.head.config)
    assert not config.model_type.startswith(PREFIX)
    return install(
        plan,
        head=head_class(type(plan.parts.head)),
        config=config_class(config),
        unchecked=unchecked,
    )


def load_added(
    model: nn.Module, module: nn.Module, weights: Mapping[str, Tensor], what: str
) -> None:
    """Load `module` of a model just converted; weights that do not fit leave the model as it was before."""
    try:
        check_weights(module, weights, what)
    except UserError:
        revert(model)
        raise
    module.load_state_dict(weights)


def check_weights(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Check that every tensor of `module` is among `weights` in its shape, and nothing else is."""
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    with user_values():
        check_fit(expected, {name: tensor.shape for name, tensor in weights.items()}, what)
