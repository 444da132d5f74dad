"""Ways to connect depth: every residual behind `begin / read / write / end`."""

from .attention import AttentionResidual
from .base import Layout, Norm, Read, Residual, State, Watcher, apply_norm, hold, watched
from .cross import DeepCrossAttentionResidual
from .deepnorm import DeepNormResidual
from .delta import DeepDeltaResidual
from .delta_attention import DeltaAttentionResidual
from .denseformer import DenseFormerResidual
from .elc import EveryLayerCountsResidual, VerticalAttentionResidual
from .gated_hyper import GatedHyperResidual
from .highway import HighwayResidual
from .hyper import HyperConnectionsResidual
from .hyper_attention import HyperAttentionResidual
from .identity_hyper import IdentityHyperResidual
from .laurel import LaurelResidual
from .mhc import MHCLiteResidual, MHCResidual
from .mudd import MUDDFormerResidual
from .plugins import import_plugins
from .record import Trace, mixing, record
from .registry import (
    build,
    entry,
    located,
    names,
    options_of,
    parse,
    pinned,
    plugin_of,
    register,
    with_options,
)
from .routed import RoutedAttentionResidual
from .scaled import LayerScaleResidual, ReZeroResidual
from .standard import StandardResidual, StreamResidual
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
    "GatedHyperResidual",
    "HighwayResidual",
    "HyperAttentionResidual",
    "HyperConnectionsResidual",
    "IdentityHyperResidual",
    "LaurelResidual",
    "LayerScaleResidual",
    "Layout",
    "MHCLiteResidual",
    "MHCResidual",
    "MUDDFormerResidual",
    "Norm",
    "ReZeroResidual",
    "Read",
    "Residual",
    "RoutedAttentionResidual",
    "StandardResidual",
    "State",
    "StreamResidual",
    "Trace",
    "VerticalAttentionResidual",
    "Watcher",
    "apply_norm",
    "build",
    "entry",
    "hold",
    "import_plugins",
    "located",
    "mixing",
    "names",
    "options_of",
    "parse",
    "pinned",
    "plugin_of",
    "record",
    "register",
    "watched",
    "with_options",
]
