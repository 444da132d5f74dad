"""Kimi Delta Attention over one sequence, arXiv 2510.26692: per head a state S (K, V) that decays and is corrected.

    S_t = (I - b_t k_t k_t^T) Diag(exp g_t) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(K)

Chunkwise, with G the running sum of g inside a chunk of C tokens and S the state before it (rows are tokens):

    A_ij = <k_i exp(G_i - G_j), k_j>,  j < i;     P_ij = <q_i exp(G_i - G_j), k_j>,  j <= i
    (I + Diag(b) A) [W, U] = Diag(b) [exp(G) K, V];     N = U - W S;     O = (exp(G) Q) S + P N
    S' = Diag(exp G_C) S + (exp(G_C - G) K)^T N

Both forms take q and k with unit norm and q divided by sqrt(K) (`prepare`). Every exponent is a difference that is not
above zero, so that no decay overflows; the running sum is fp64, or one decay near zero would cost the others around it
their digits. Pairs of tokens are multiplied in rows of 8 channel by channel, and between rows as matrices.
"""

import torch
from torch import Tensor

from headwater.ops.numerics import accumulation_dtype

L2_EPS = 1e-6
ROW = 8  # tokens whose pairs are multiplied channel by channel


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis; a zero stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Bring inputs into the form that both functions below take.

    Heads stand before tokens, all is fp32 (fp64 stays fp64), keys have unit norm, and queries are scaled besides.
    """
    dtype = accumulation_dtype(v.dtype)
    q, k, v, g = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g))  # (B, H, T, K or V)
    beta = beta.to(dtype).transpose(1, 2)  # (B, H, T)
    if state is None:
        state = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])
    return unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, beta, state.to(dtype)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: q, k, g (B, H, T, K), v (B, H, T, V), beta (B, H, T), state (B, H, K, V). Returns o (B, H, T, V)
    and the state after the last token."""
    outputs = []
    decay = g.exp()
    for t in range(q.shape[2]):
        state = state * decay[:, :, t, :, None]
        key = k[:, :, t, :, None]  # (B, H, K, 1)
        change = beta[:, :, t, None] * (v[:, :, t] - (key * state).sum(-2))  # (B, H, V)
        state = state + key * change[..., None, :]
        outputs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outputs, 2), state


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same, `chunk` tokens at a time, a power of two from 8 on. Tokens that fill up the last one change nothing:
    they have no key and no decay."""
    length = q.shape[2]
    size = min(chunk, max(ROW, 1 << (length - 1).bit_length()))
    spare = -length % size
    q, k, v, g, beta = (
        _chunks(x, size, spare) for x in (q, k, v, g, beta[..., None])
    )  # (B, H, N, C, K)
    total = g.double().cumsum(-2)
    inside, across = decayed_products(torch.stack((k, q)), k, g, total)
    decay = total.to(q.dtype).exp()
    rest = (total[..., -1:, :] - total).to(q.dtype).exp()
    system = torch.eye(size, dtype=q.dtype, device=q.device) + beta * inside.tril(-1)
    right = beta * torch.cat((decay * k, v), -1)  # (B, H, N, C, K + V)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    weights, values = solved.split((k.shape[-1], v.shape[-1]), -1)
    q, k = decay * q, rest * k
    outputs = []
    for n in range(q.shape[2]):
        new = values[:, :, n] - weights[:, :, n] @ state  # (B, H, C, V)
        outputs.append(q[:, :, n] @ state + across[:, :, n] @ new)
        state = decay[:, :, n, -1, :, None] * state + k[:, :, n].mT @ new
    return torch.cat(outputs, 2)[:, :, :length], state


def _chunks(x: Tensor, size: int, spare: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, size))


def decayed_products(left: Tensor, right: Tensor, g: Tensor, total: Tensor) -> Tensor:
    """<left_i exp(G_i - G_j), right_j> for j <= i, else 0: left (2, ..., C, K), right and g (..., C, K), and `total`,
    the running sum G of g. Returns (2, ..., C, C)."""
    products = products_in_rows(left, right, g)  # (2, ..., R, 8, 8)
    while products.shape[-3] > 1:  # two neighbours become one of twice the size
        halves = (-1, 2, products.shape[-1])
        later, earlier, sums = (
            x.unflatten(-2, halves) for x in (left, right, total)
        )  # (..., R / 2, 2, S, K)
        between = sums[..., 1, :1, :]  # of the two tokens of every pair: neither factor can grow
        near = later[..., 1, :, :] * (sums[..., 1, :, :] - between).to(left.dtype).exp()
        far = earlier[..., 0, :, :] * (between - sums[..., 0, :, :]).to(left.dtype).exp()
        corner = (torch.cat(tuple(near), -2) @ far.mT).split(halves[-1], -2)  # both in one product
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        rows = (
            torch.cat((first, torch.zeros_like(first)), -1),
            torch.cat((torch.stack(corner), second), -1),
        )
        products = torch.cat(rows, -2)  # (2, ..., R / 2, 2 S, 2 S)
    return products.squeeze(-3)


def products_in_rows(left: Tensor, right: Tensor, g: Tensor) -> Tensor:
    """The same inside each row of 8 tokens, (2, ..., R, 8, 8): one decay after the other, which costs no digits."""
    left, right, decay = (x.unflatten(-2, (-1, ROW)) for x in (left, right, g.exp()))
    decayed, rows = right[..., :0, :], []
    for i in range(ROW):
        decayed = torch.cat(
            (decayed * decay[..., i : i + 1, :], right[..., i : i + 1, :]), -2
        )  # (..., R, i + 1, K)
        products = (left[..., i : i + 1, :] * decayed).sum(-1)  # (2, ..., R, i + 1)
        rows.append(torch.nn.functional.pad(products, (0, ROW - i - 1)))
    return torch.stack(rows, -2)
