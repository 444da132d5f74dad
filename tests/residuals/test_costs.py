"""Operations of every residual and of its options, worked out by hand from the formula in its docstring."""

import pytest

from headwater.residuals import build, names

D, L = 8, 4  # width, and sublayers: two layers of attention and MLP
# What every write adds to a stream; an addition counts as a multiply-add, two operations
ADDS = 2 * D * L

# Of Attention Residuals a source of a read costs its norm and its score, 4 per channel of the key, and its share, 2 D.
OPERATIONS = {
    "standard": ADDS,
    "rezero": ADDS,
    "layerscale": ADDS,
    "highway": 2 * D * L + 3 * D * L,  # the gate's product; 1 - g, and two products
    "highway:gate=channel": 2 * D * D * L + 3 * D * L,
    "deepnorm": 7 * D * L,
    "attnres-full": 6 * D * (2 + 3 + 4 + 5) + ADDS,  # reads 1 to 3 and the final one; the first has one source
    "attnres-full:window=1": 6 * D * (2 + 2 + 2 + 2) + ADDS,
    "attnres-full:key_dim=2": (4 * 2 + 2 * D) * (2 + 3 + 4 + 5) + ADDS,
    "attnres-full:query=projected": 6 * D * (2 + 3 + 4 + 5) + 2 * D * D * 4 + ADDS,
    "attnres-full:query=projected,key_dim=2": (4 * 2 + 2 * D) * (2 + 3 + 4 + 5) + 2 * D * 2 * 4 + ADDS,
    "attnres-block": 6 * D * (2 + 2 + 3 + 3) + ADDS,  # blocks of two
    "attnres-block:block=4": 6 * D * (2 + 2 + 2 + 2) + ADDS,
    # Blocks of two: the second attention makes three reads of two sources.
    "attnres-routed": 6 * D * (2 + 3 * 2 + 3 + 3) + ADDS,
    "delta-attnres": 6 * D * (2 + 3 + 4) + 3 * D * L,  # no final read; the read is added to the stream besides
    "denseformer": 2 * D * (2 + 3) + ADDS,
    "denseformer:period=2": 2 * D * 3 + ADDS,
    "elc-bert": 2 * D * 2 + ADDS,
    "elc-bert:variant=weighted-output": 2 * D * (2 + 3) + ADDS,
    "vertical-attention": 4 * D * 2 + ADDS,  # as elc-bert, and the norm of each source
    "deepcrossattention": 5 * D * (3 * 2 + 3) + ADDS,  # three inputs of two sources, and the final read of three
    "deepcrossattention:version=v1": 2 * D * (3 * 2 + 3) + ADDS,
    "deepcrossattention:version=v2": 2 * D * (3 * 2 + 3) + ADDS,
    "deepcrossattention:inputs=shared": 5 * D * (2 + 3) + ADDS,
    # Four ways over two sources: matrices of 8 D and 8 * 8; then the stream's way over three: 3 D and 3 * 3.
    "muddformer": 2 * (8 * D + 64 + 3 * D + 9) + 2 * D * (8 + 3) + ADDS,
    "muddformer:norm=true": 2 * (8 * D + 64 + 3 * D + 9) + 2 * D * (8 + 3) + ADDS + 5 * 5 * D + 2 * D * (4 + 1),
    # Of two streams: a read, a write and the mixing of 2 by 2; every stream makes four coefficients of itself.
    "hyper-connections:streams=2": 2 * D * 2 * (1 + 1 + 2) * L + 2 * 2 * 4 * D * L,
    "hyper-connections:streams=2,form=static": 2 * D * 2 * (1 + 1 + 2) * L,
    # Both of what it consists of, and the sum of the two reads.
    "hyper-attnres:streams=2": 2 * D * 2 * (1 + 1 + 2) * L + 2 * 2 * 4 * D * L + 6 * D * (2 + 2 + 3 + 3) + ADDS + D * L,
    "mhc:streams=2": 2 * D * 2 * (1 + 1 + 2) * L + 2 * (2 + 2 + 4) * 2 * D * L,  # eight coefficients of both at once
    "mhc:streams=2,final=learned": 2 * D * 2 * (1 + 1 + 2) * L + 2 * (2 + 2 + 4) * 2 * D * L + 2 * 2 * 2 * D,
    # A read and a write; four coefficients a sublayer, two of the final read
    "identity-hc:streams=2": 2 * D * 2 * (1 + 1) * L + 2 * (2 + 2) * 2 * D * L + 2 * 2 * 2 * D,
    # Of a read 2 * 3 + 2 rows of 2 D, and norm (3), gate and sum of each channel; the final read writes nothing.
    "gated-hc:streams=2,rank=3": 2 * D * (2 * (2 * 3 + 2) + 5 + 2) * L + 2 * D * (2 * 2 * 3 + 5),
    "mhc-lite:streams=2": 2 * D * 2 * (1 + 1 + 2) * L + 2 * (2 + 2 + 2) * 2 * D * L,
    "ddl": (2 * 2 + 7) * D * L,  # beta and value; norm and length, overlap, and what is erased and written
    "ddl:width=2,compress=channel": (2 * 3 + 7 * 2) * D * L + 2 * 2 * D * (L + 1),
    "ddl:width=2,compress=token": (2 * 3 + 7 * 2) * D * L + 2 * 4 * 2 * D * (L + 1),
    "laurel:rank=2": 2 * ADDS + 2 * 2 * 2 * D * L,
    "laurel:form=weighted": 2 * ADDS,
    "laurel:form=previous,rank=2": 4 * ADDS + 2 * 2 * 2 * D * L,  # and a sum of three states
    # Key, value and output of every read, the query of all but the first; scores and sums over one, then two states.
    "depth-window:window=2,width=2": 2 * 2 * D * (3 * 4 + 3) + 2 * 2 * 2 * (1 + 2 + 2 + 2) + ADDS,
}  # fmt: skip


@pytest.mark.parametrize("spec", OPERATIONS)
def test_operations_are_those_of_the_formula(spec):
    assert build(spec, D, L).flops_per_token() == OPERATIONS[spec]


def test_every_residual_is_counted():
    assert {spec.partition(":")[0] for spec in OPERATIONS} == set(names())
