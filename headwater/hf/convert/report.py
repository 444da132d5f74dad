"""What a conversion did, site by site."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Size

from headwater.residuals import Residual

from .find import Found
from .layers import Site
from .start import Start


@dataclass(frozen=True)
class Report:
    """`equal_at_start`: until it is trained, the model computes what it computed before, norms' eps included."""

    architecture: str
    residual: str
    equal_at_start: bool
    start_error: float  # of the worst read against the plain residual's stream, relative
    sites: tuple[str, ...]
    added: dict[str, tuple[int, ...]]  # parameter name to shape

    def __str__(self) -> str:
        count = sum(Size(shape).numel() for shape in self.added.values())
        start = (
            "the model computes the same as before until it is trained"
            if self.equal_at_start
            else f"the model does NOT compute the same as before: reads start off the plain residual's stream by "
            f"{self.start_error:.2g}"
        )
        head = f"{self.architecture}: residual '{self.residual}', {count:,} parameters added; {start}."
        return "\n".join([head, *(f"  {site}" for site in self.sites)])


def describe(
    found: Found, groups: Sequence[tuple[Site, ...]], residual: Residual, start: Start, scales: Sequence[float]
) -> Report:
    """`found.prefix` is the path of the model that owns the layers, with a trailing dot where it is not the whole."""
    path = f"{found.prefix}{found.layout.layers}"
    sites = [
        _line(f"{path}.{index}", site, scales[site.sublayer]) for index, group in enumerate(groups) for site in group
    ]
    sites.append(f"{found.prefix}{found.layout.final_norm}: final read{_times(scales[-1])}")
    added = {f"{found.prefix}residual.{name}": tuple(p.shape) for name, p in residual.named_parameters()}
    equal = start.plain and tuple(scales) == start.scales
    return Report(found.model_type, residual.spec, equal, start.error, tuple(sites), added)


def _line(layer: str, site: Site, scale: float) -> str:
    bodies = site.body if site.second is None else f"{site.body} and {site.second.body}"
    norm = "no norm" if site.norm is None else site.norm
    return f"{layer}.{bodies}: sublayer {site.sublayer} reads through {norm}{_times(scale)}"


def _times(scale: float) -> str:
    return "" if scale == 1.0 else f", times {scale:g}"
