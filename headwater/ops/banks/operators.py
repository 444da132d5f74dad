"""A bank of N layer outputs X_j, summed in C ways by weights: a kernel or its reference runs.

    X^c = sum_j A^c_j X_j      X_j, X^c (..., D); A (..., C, N), of each token, or (C, N), for all
    dA^c_j = <g^c, X_j>, summed over tokens if A is for all;   dX_j = sum_c A^c_j g^c

In passes over a (tokens x D) tensor: forward N reads and C writes, backward 3 N + C: X_j, the
gradient G_j that later layers have gathered for it, g^c; G_j + dX_j. Left to autograd, N additions
would follow a backward that writes dX_j, 5 N + C in all. Instead `mix_bank` returns the bank again
for the next layer to take, so that what later layers gathered reaches its backward, which adds to
it. `project_source` does the same to the newest tensor, which weights are made of: one pass forward
and three backward.
"""

from collections.abc import Sequence

from torch import Tensor

from headwater.ops.depth.operators import check_shapes
from headwater.ops.numerics import project_normed
from headwater.ops.routing import Backend, use_triton

from . import reference


def mix_bank(
    bank: Sequence[Tensor], weights: Tensor, *, thread: bool = True, backend: Backend = "auto"
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute C weighted sums of N tensors, fp32 inside.

    Arguments:
        bank: N tensors (..., D) of one shape.
        weights: (..., C, N), for each token, or (C, N), for all.
        thread: False if no later read takes the bank: compiled, its gradients would be zeros that
            are written.
        backend: as in `depth_attention`.

    Returns the C sums, (..., D) in the dtype of the first tensor; and the bank again, which is to
    be read in its place. Raises ValueError if shapes or devices do not agree.
    """
    check_shapes(bank)
    tokens, count = bank[0].shape[:-1], len(bank)
    device = bank[0].device
    by_shape = weights.dim() >= 2 and weights.shape[-1] == count
    by_shape = by_shape and weights.shape[:-2] in ((), tokens)
    if not by_shape or weights.device != device:
        raise ValueError(
            f"weights of {count} tensors {tuple(bank[0].shape)} are (ways, {count}), or "
            f"{(*tokens, 'ways', count)}, on {device}; got {tuple(weights.shape)} on "
            f"{weights.device}"
        )
    if use_triton(backend, *bank):
        from . import autograd

        return autograd.mix_bank(bank, weights, thread)
    return reference.mix_bank(bank, weights), tuple(bank)


def project_source(
    source: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Return weight RMSNorm(source), and the source again.

    Arguments: `source` (..., D), `weight` (Q, D), the norm's `eps`, and `backend` as in
    `depth_attention`.

    Returns the products, (..., Q) in fp32 (fp64 of fp64); and the source again, which is to be read
    in its place.
    """
    if use_triton(backend, source):
        from headwater.ops.depth.autograd import score

        queries = weight.float().contiguous()
        source, _, (z,) = score(source.contiguous(), queries, eps)
        return z.squeeze(-2), source
    return project_normed(source, weight, eps), source
