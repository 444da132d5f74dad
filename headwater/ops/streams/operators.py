"""n parallel streams X of a token, for callers: a kernel or its reference runs.

    z = weight (r X),  r = 1 / rms(X), over all n D numbers of a token or over each stream's D
    h = sum_j pre_j X_j;   X'_i = sum_j res_ij X_j + post_i y,   where pre, post and res come from z
    dX_j = sum_i res_ij dX'_i + pre_j dh
           + (r sum_q dz_q weight_q - r^2 (sum_q dz_q z_q / count) X)_j

X is (..., n, D), h and y are (..., D). In passes over a (tokens x D) tensor, with n = 4 as an
example:

    forward    project  n            4      backward    write    3 n + 2    14    X, dX', y; dX, dy
               read     n + 1        5                  read     n + 1       5    X, dh; only sums
               write    2 n + 1      9                  project  3 n + 1    13    X, dX, dh; dX
               in all   4 n + 2     18                  in all   7 n + 4    32

X has three consumers. Left to autograd, each would write a gradient of its own and two sums would
follow, 13 n + 3. Instead `project_streams` returns the streams again, for the write to take, so
that the write's gradient reaches it; and what the read leaves, pre_j dh, reaches it as these two
factors (see `autograd`). Its backward then makes the whole.

mHC makes its coefficients of z = (a, b, C), with three scales and a bias for every number, in one
launch each way and a second for the sums over tokens (see `gates`):

    pre = sigmoid(s_a a + bias_a);   post = 2 sigmoid(s_b b + bias_b)
    res = Sinkhorn(exp(s_C C + bias_C)),   C (n, n)
"""

from torch import Tensor

from headwater.ops.routing import DTYPES, Backend, use_triton
from headwater.ops.sinkhorn.operators import MAX_SIZE

from . import reference

MAX_STREAMS = 8  # a program of the kernels has a tile of each in registers


# Stand-ins whose gradients are dh (..., D) and pre (..., n): see `autograd`.
Factors = tuple[Tensor, Tensor]


def takes_streams(x: Tensor, backend: Backend) -> bool:
    """Return whether kernels take these streams (..., n, D).

    Raises ValueError if they are asked for and cannot.
    """
    fits = x.shape[-2] <= MAX_STREAMS
    if backend == "triton" and not fits:
        shape = tuple(x.shape)
        raise ValueError(f"backend='triton' takes up to {MAX_STREAMS} streams, got {shape}")
    return fits and use_triton(backend, x)


def project_streams(
    x: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Factors | None]:
    """Multiply normed streams by a few rows of weights, from which coefficients are made.

    Arguments:
        x: (..., n, D).
        weight: (Q, n D), for all numbers of a token, normed together; or (Q, D), for each stream,
            normed by itself.
        eps: of the norm.
        backend: as in `depth_attention`; kernels take up to 8 streams.

    Returns the products, (..., Q) or (..., n, Q) in fp32 (fp64 of fp64); the streams again, which
    `read_streams` and `write_streams` are to take in their place; and the factors, which
    `read_streams` is to be given with them, once.
    """
    if takes_streams(x, backend):
        from . import autograd

        return autograd.project_streams(x, weight, eps)
    return reference.project_streams(x, weight, eps), x, None


def gate_streams(
    z: Tensor, bias: Tensor, scale: Tensor, iterations: int, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mHC's coefficients: to read, to write, and to mix the streams.

    Arguments:
        z: (..., n^2 + 2 n), of `project_streams`: n of pre, n of post, n n of res.
        bias: (n^2 + 2 n,).
        scale: (3,), of pre, post and res.
        iterations: of `sinkhorn`.
        backend: as in `depth_attention`; above 4 streams all of it is PyTorch's.

    Returns pre (..., n), post (..., n) and res (..., n, n), doubly stochastic, in fp32 (fp64 of
    fp64). Raises ValueError for sizes that do not fit together, no iteration, or a backend that
    does not run here.
    """
    n = reference.streams_of(bias)
    # The kernel takes all of them by address.
    if z.shape[-1] != len(bias) or len(bias) != n * n + 2 * n or iterations < 1:
        sizes = f"{z.shape[-1]} and {len(bias)}"
        raise ValueError(
            f"z and bias take n^2 + 2 n numbers, and iterations at least 1; got {sizes}, "
            f"{iterations}"
        )
    if n <= MAX_SIZE and use_triton(backend, z):
        from . import autograd

        return autograd.gate_streams(z, bias, scale, iterations)
    return reference.gate_streams(z, bias, scale, iterations)


def read_streams(
    x: Tensor, pre: Tensor, factors: Factors | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """Compute h = sum_j pre_j X_j, (..., D) in the dtype of `x` (..., n, D).

    Arguments: `pre` (..., n) in fp32; `factors` of the projection that gave these streams, or None
    if there was none; `backend` as above.
    """
    if factors is not None or takes_streams(x, backend):
        from . import autograd

        return autograd.read_streams(x, pre, factors)
    return reference.read_streams(x, pre)


def write_streams(
    x: Tensor, y: Tensor, post: Tensor, res: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """Compute X'_i = sum_j res_ij X_j + post_i y, (..., n, D) in the dtype of `x`.

    Arguments: `x` (..., n, D), `y` (..., D), `post` (..., n) and `res` (..., n, n) in fp32;
    `backend` as above.
    """
    if y.dtype in DTYPES and takes_streams(x, backend):
        from . import autograd

        return autograd.write_streams(x, y, post, res)
    return reference.write_streams(x, y, post, res)
