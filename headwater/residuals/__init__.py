"""How depth is connected: every residual behind `begin / read / write / end`."""

from .attention import AttentionResidual
from .base import Norm, Read, Residual, State, Watcher, watched
from .cross import DeepCrossAttentionResidual
from .deepnorm import DeepNormResidual
from .delta import DeepDeltaResidual
from .delta_attention import DeltaAttentionResidual
from .denseformer import DenseFormerResidual
from .elc import EveryLayerCountsResidual, VerticalAttentionResidual
from .highway import HighwayResidual
from .hyper import HyperConnectionsResidual
from .laurel import LaurelResidual
from .mhc import MHCLiteResidual, MHCResidual
from .mudd import MUDDFormerResidual
from .record import Trace, mixing, record
from .registry import build, entry, names, parse, pinned, register, with_options
from .scaled import LayerScaleResidual, ReZeroResidual
from .standard import StandardResidual
from .window import DepthWindowResidual

__all__ = [
    "AttentionResidual",
    "DeepCrossAttentionResidual",
    "DeepDeltaResidual",
    "DeepNormResidual",
    "DeltaAttentionResidual",
    "DenseFormerResidual",
    "DepthWindowResidual",
    "EveryLayerCountsResidual",
    "HighwayResidual",
    "HyperConnectionsResidual",
    "LaurelResidual",
    "LayerScaleResidual",
    "MHCLiteResidual",
    "MHCResidual",
    "MUDDFormerResidual",
    "Norm",
    "ReZeroResidual",
    "Read",
    "Residual",
    "StandardResidual",
    "State",
    "Trace",
    "VerticalAttentionResidual",
    "Watcher",
    "build",
    "entry",
    "mixing",
    "names",
    "parse",
    "pinned",
    "record",
    "register",
    "watched",
    "with_options",
]
