"""An arm that headwater has no name for:

PYTHONPATH=studies/attention-residuals headwater study RECIPE --plugin rivals --plugin examples.new_residual
"""

from torch import Tensor

from headwater.residuals import State, register
from headwater.residuals.standard import StreamResidual


@register("completep")
class CompletePResidual(StreamResidual):
    """h_{i+1} = h_i + f_i(h_i) / L for L layers: what branches give does not grow with depth.

    At initialisation: different from the plain residual. Output projections are to start as wide as others
    (`depth_start = false`), since the branch is scaled already. Cost: none. CompleteP, arXiv 2505.01618.
    """

    at_start = "different"

    def _write(self, state: State, i: int, y: Tensor) -> State:
        return (state[0] + y * (2 / self.sublayers),)
