"""The report of what a conversion did, site by site."""

from dataclasses import dataclass

from torch import Size

from headwater.residuals import Residual

from .layers import Site
from .plan import Plan


@dataclass(frozen=True)
class Report:
    """`equal_at_start`: until it is trained, the model computes what it computed before, norms' eps included. That the
    layout fits was measured on `tokens` tokens, with the plain residual where this one starts as something else:
    `difference` is the largest of their hidden states, relative. None: `unchecked` says why not."""

    architecture: str
    residual: str
    equal_at_start: bool
    start_error: float  # of the worst read against the plain residual's stream, relative
    sites: tuple[str, ...]
    added: dict[str, tuple[int, ...]]  # parameter name to shape
    difference: float | None = None
    tokens: int = 0
    dtype: str = ""  # that it was measured in
    unchecked: str | None = None
    loaded: bool = False  # a release's weights, trained with this residual

    def __str__(self) -> str:
        count = sum(Size(shape).numel() for shape in self.added.values())
        head = (
            f"{self.architecture}: residual '{self.residual}' at {len(self.sites)} sites, {count:,} parameters added.\n"
            f"{self._start()}"
        )
        return "\n".join([head, *(f"  {site}" for site in self.sites)])

    def _start(self) -> str:
        if self.difference is None:
            measured = f"NOT CHECKED: {self.unchecked}"
        else:
            measured = (
                f"measured on {self.tokens} tokens in {self.dtype}, some decoded from a cache: hidden states off by "
                f"{self.difference:.1e}, relative"
            )
        sure = self.difference is not None
        # A release was trained with its residual, and has no plain model to equal.
        if self.loaded:
            verb = "computed" if sure else "should compute"
            return (
                "Its weights are the release's, trained with this residual. With the plain one in its place, the body "
                f"{verb} the same as before ({measured})."
            )
        if not self.equal_at_start:
            why = f"reads start off the plain residual's stream by {self.start_error:.2g}"
            # It could be exact, and was asked not to be.
            if self.start_error < 1e-6:
                why = "reads keep the residual's own scale, not that of the plain residual's stream (exact=False)"
            does = "does" if sure else "should"
            return (
                f"The model does NOT compute the same as before: {why}. With the plain residual in its place it {does} "
                f"({measured})."
            )
        verb = "computes" if sure else "should compute"
        return f"The model {verb} the same as before until it is trained ({measured})."


def describe(plan: Plan, residual: Residual, unchecked: str) -> Report:
    """`parts.prefix` is the path of the model that owns the layers, with a trailing dot where it is not the whole."""
    parts, scales = plan.parts, plan.settings["scales"]
    path = f"{parts.prefix}{parts.layout.layers}"
    sites = [
        _line(f"{path}.{index}", site, scales[site.sublayer])
        for index, group in enumerate(plan.groups)
        for site in group
    ]
    sites.append(f"{parts.prefix}{parts.layout.final_norm}: final read{_times(scales[-1])}")
    added = {
        f"{parts.prefix}residual.{name}": tuple(p.shape) for name, p in residual.named_parameters()
    }
    return Report(
        architecture=parts.model_type,
        residual=residual.spec,
        equal_at_start=plan.equal_at_start,
        start_error=plan.start.error,
        sites=tuple(sites),
        added=added,
        unchecked=unchecked,
    )


def _line(layer: str, site: Site, scale: float) -> str:
    bodies = site.body if site.second is None else f"{site.body} and {site.second.body}"
    norm = "no norm" if site.norm is None else site.norm
    if site.separate:
        norm = ", ".join(name for name, _ in site.separate)
    if site.before is not None:
        norm += f", after {site.before} has added to all streams, which a mixing matrix leaves out"
    return f"{layer}.{bodies}: sublayer {site.sublayer} reads through {norm}{_times(scale)}"


def _times(scale: float) -> str:
    return "" if scale == 1.0 else f", times {scale:g}"
