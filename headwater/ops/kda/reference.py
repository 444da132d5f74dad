"""Kimi Delta Attention over one sequence, arXiv 2510.26692.

Each head has a state S (K, V) that decays and is corrected:

    S_t = (I - b_t k_t k_t^T) Diag(exp g_t) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(K)

Chunkwise, with G the running sum of g inside a chunk of C tokens and S the state before the chunk
(rows are tokens):

    A_ij = <k_i exp(G_i - G_j), k_j>,  j < i;     P_ij = <q_i exp(G_i - G_j), k_j>,  j <= i
    (I + Diag(b) A) [W, U] = Diag(b) [exp(G) K, V];     N = U - W S
    O = (exp(G) Q) S + P N;     S' = Diag(exp G_C) S + (exp(G_C - G) K)^T N

Both forms take q and k with unit norm and q divided by sqrt(K) (`prepare`). Every exponent is a
difference that is not above zero, so that no decay overflows. The running sum is fp64: in fp32 one
large decay would cost the small ones around it their digits. Pairs of tokens in a row of 8 are
multiplied channel by channel, pairs of rows as matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.ops.numerics import accumulation_dtype

L2_EPS = 1e-6
ROW = 8  # tokens whose pairs are multiplied channel by channel


def unit(x: Tensor) -> Tensor:
    """Return x / |x| over the last axis; a zero stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring inputs into the form that `recurrent` and `chunkwise` take.

    Heads stand before tokens, everything is fp32 (fp64 stays fp64), queries and keys have unit
    norm, and queries are divided by sqrt(K) besides.
    """
    dtype = accumulation_dtype(v.dtype)
    q, k, v, g = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g))  # (B, H, T, K or V)
    beta = beta.to(dtype).transpose(1, 2)  # (B, H, T)
    if state is None:
        state = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5
    return unit(q) * scale, unit(k), v, g, beta, state.to(dtype)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run token by token.

    Arguments: q, k, g (B, H, T, K); v (B, H, T, V); beta (B, H, T); state (B, H, K, V).

    Returns o (B, H, T, V) and the state after the last token.
    """
    outputs = []
    decay = g.exp()
    columns = [x.unsqueeze(-1).unbind(2) for x in (q, k, decay)]  # (B, H, K, 1) each
    for query, key, keep, value, rate in zip(*columns, v.unbind(2), beta[..., None].unbind(2)):
        # The state decays, and its value at this key moves towards v.
        state = state * keep
        value_at_key = (key * state).sum(-2)  # (B, H, V)
        change = rate * (value - value_at_key)
        state = state + key * change.unsqueeze(-2)
        outputs.append((query * state).sum(-2))
    return torch.stack(outputs, 2), state


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `recurrent`, `chunk` tokens at a time: a power of two from 8 on."""
    length, width = q.shape[2], k.shape[-1]
    size = min(chunk, max(ROW, 1 << (length - 1).bit_length()))
    # The tokens that fill up the last chunk change nothing: they have no key and no decay.
    spare = -length % size
    beta = beta[..., None]
    inputs = (q, k, v, g, beta)
    q, k, v, g, beta = (_chunks(x, size, spare) for x in inputs)  # (B, H, N, C, ...)

    # All chunks at once: A and P, and the system for W and U.
    total = g.double().cumsum(-2)
    inside, across = decayed_products(torch.stack((k, q)), k, g, total)
    decay = total.to(q.dtype).exp()
    sum_to_end = total[..., -1:, :] - total
    decay_to_end = sum_to_end.to(q.dtype).exp()
    identity = torch.eye(size, dtype=q.dtype, device=q.device)
    system = identity + beta * inside.tril(-1)
    right = beta * torch.cat((decay * k, v), -1)  # (B, H, N, C, K + V)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    weights, values = solved.split((width, v.shape[-1]), -1)
    q = decay * q
    k = decay_to_end * k

    # One chunk after the other: the state goes through all of them.
    decay_of_chunk = decay[..., -1, :].unsqueeze(-1)  # (B, H, N, K, 1)
    chunks = (q, k.mT, values, weights, across, decay_of_chunk)
    outputs = []
    for query, key, value, weight, product, keep in zip(*[x.unbind(2) for x in chunks]):
        new = value - weight @ state  # (B, H, C, V)
        outputs.append(query @ state + product @ new)
        state = keep * state + key @ new
    return torch.cat(outputs, 2)[:, :, :length], state


def _chunks(x: Tensor, size: int, spare: int) -> Tensor:
    """Fill the tokens of x (B, H, T, K) up with zeros, and cut them into chunks."""
    return F.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, size))


def decayed_products(left: Tensor, right: Tensor, g: Tensor, total: Tensor) -> Tensor:
    """Return <left_i exp(G_i - G_j), right_j> for j <= i, else 0: (2, ..., C, C).

    Arguments: left (2, ..., C, K); right and g (..., C, K); `total`, the running sum G of g.
    """
    products = products_in_rows(left, right, g)  # (2, ..., R, 8, 8)
    # Two neighbouring blocks of S tokens become one of 2 S, until one is left.
    while products.shape[-3] > 1:
        size = products.shape[-1]
        halves = (-1, 2, size)
        later = left.unflatten(-2, halves)[..., 1, :, :]  # (2, ..., R / 2, S, K)
        earlier = right.unflatten(-2, halves)[..., 0, :, :]
        sums_before, sums_after = total.unflatten(-2, halves).unbind(-3)
        # Exponents are split at the later half's first token, so that neither factor can grow.
        between = sums_after[..., :1, :]
        near = later * (sums_after - between).to(left.dtype).exp()
        far = earlier * (between - sums_before).to(left.dtype).exp()
        # The corner below the diagonal: both kinds of left rows in one product.
        corner = torch.cat(tuple(near), -2) @ far.mT
        corner = torch.stack(corner.split(size, -2))  # (2, ..., R / 2, S, S)
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        lower = torch.cat((corner, second), -1)
        products = torch.cat((upper, lower), -2)  # (2, ..., R / 2, 2 S, 2 S)
    return products.squeeze(-3)


def products_in_rows(left: Tensor, right: Tensor, g: Tensor) -> Tensor:
    """Return `decayed_products` inside each row of 8 tokens, (2, ..., R, 8, 8).

    The decays are multiplied one after the other, which costs no digits.
    """
    left, right, decay = (x.unflatten(-2, (-1, ROW)) for x in (left, right, g.exp()))
    decayed = right[..., :0, :]
    rows = []
    for i in range(ROW):
        token = slice(i, i + 1)
        # Keys up to token i, each decayed until then.
        decayed = decayed * decay[..., token, :]
        decayed = torch.cat((decayed, right[..., token, :]), -2)  # (..., R, i + 1, K)
        products = (left[..., token, :] * decayed).sum(-1)  # (2, ..., R, i + 1)
        rows.append(F.pad(products, (0, ROW - i - 1)))
    return torch.stack(rows, -2)
