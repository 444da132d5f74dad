# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Cross entropy of rows of logits in one launch; the gradient takes the logits' place.

    d = log sum_{v != target} exp(z_v) - z_target;   loss = log(1 + exp d)                  z (M, V)
    z_v <- scale exp(z_v - z_target - loss)
    z_target <- -scale sigmoid(d), which is softmax - 1 without a difference

A program owns a row: one read for the running maximum and sum, one more (from cache) and one write
for the gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.ops.triton.launch import launch, launches
from headwater.ops.triton.tiles import power_of_2

BLOCK = 4096  # numbers of a row at once


@triton.jit(do_not_specialize=["scale"])
def _cross_entropy(
    z,  # (M, V)
    targets,  # (M,)
    losses,  # (M,)
    V,
    scale,
    GRADIENT: tl.constexpr,  # it takes the logits' place
    BV: tl.constexpr,  # numbers of a row at once
):
    row = tl.program_id(0).to(tl.int64)
    p_z = z + row * V
    target = tl.load(targets + row)
    o_v = tl.arange(0, BV)

    # The running maximum and sum of all logits but the target's, for each place of a block.
    top = tl.full([BV], float("-inf"), tl.float32)
    total = tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        others = (start + o_v < V) & (start + o_v != target)
        b_z = tl.load(p_z + start + o_v, mask=others, other=float("-inf")).to(tl.float32)
        new = tl.maximum(tl.maximum(top, b_z), -1e30)
        total = total * tl.exp(top - new) + tl.exp(b_z - new)
        top = new
    highest = tl.max(top, 0)
    total_all = tl.sum(total * tl.exp(top - highest), 0)
    target_logit = tl.load(p_z + target).to(tl.float32)
    behind = highest + tl.log(total_all) - target_logit

    # loss = log(1 + exp(behind)), by log(1 + ratio) of a ratio that is at most one. log(one) alone
    # would have the digits of a ratio that was rounded beside 1.
    ratio = tl.exp(-tl.abs(behind))
    one = 1.0 + ratio
    corrected = tl.log(one) * (ratio / tl.maximum(one - 1.0, 1e-8))
    loss = tl.maximum(behind, 0.0) + tl.where(one == 1.0, ratio, corrected)
    # A target's logit that has overflowed is no certainty: its loss is NaN, not zero.
    loss = tl.where(target_logit < float("inf"), loss, float("nan"))
    tl.store(losses + row, loss)

    if GRADIENT:
        tl.debug_barrier()
        for start in range(0, V, BV):
            m = start + o_v < V
            b_z = tl.load(p_z + start + o_v, mask=m, other=float("-inf")).to(tl.float32)
            of_others = tl.exp(b_z - (target_logit + loss))
            b_g = tl.where(start + o_v == target, -tl.sigmoid(behind), of_others) * scale
            tl.store(p_z + start + o_v, b_g, mask=m)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: float | None) -> Tensor:
    """Compute the same as the reference, of logits (M, V) and targets (M,), both contiguous."""
    launches["cross_entropy"] += 1
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    constants = {"GRADIENT": scale is not None, "BV": min(BLOCK, power_of_2(vocabulary))}
    numbers = (vocabulary, 0.0 if scale is None else scale)
    launch(_cross_entropy, (rows,), (logits, targets, losses), numbers, constants, num_warps=8)
    return losses
