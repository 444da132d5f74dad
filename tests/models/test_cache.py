"""The cache's lengths: where new tokens are written, and where they may look."""

import pytest
import torch

from headwater.models.cache import Lengths


def visible(lengths, count, window=None):
    """The keys at which each new token of each row may look."""
    mask = lengths.mask(count, window)[:, 0]
    return [[row.nonzero().flatten().tolist() for row in rows] for rows in mask]


def test_rows_of_any_length_look_at_what_they_have_up_to_the_token_itself():
    lengths = Lengths(torch.tensor([0, 2]), room=5)
    assert visible(lengths, 2) == [[[0], [0, 1]], [[0, 1, 2], [0, 1, 2, 3]]]
    assert visible(lengths, 2, window=2) == [[[0], [0, 1]], [[1, 2], [2, 3]]]


def test_rows_of_one_length_need_a_mask_only_for_several_tokens_after_others():
    lengths = Lengths(torch.tensor([2, 2]), room=5, even=2)
    assert lengths.mask(2, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert lengths.mask(1, None) is None
    assert lengths.mask(2, 3) is None  # a window has an attention of its own
    assert Lengths(torch.tensor([0, 0]), room=5, even=0).mask(2, None) is None


@pytest.mark.parametrize("even", [True, False])
def test_new_tokens_are_written_behind_the_row_s_last_one(even):
    start = [2, 2] if even else [1, 3]
    lengths = Lengths(torch.tensor(start), room=5, even=2 if even else None)
    stored, new = lengths.zeros(1, dtype=torch.float32), torch.tensor([[[5.0], [6]], [[7], [8]]])
    view = lengths.write(stored, new)
    for row, first in enumerate(start):
        expected = [0.0] * 5
        expected[first : first + 2] = new[row].flatten().tolist()
        assert stored[row].flatten().tolist() == expected
    assert torch.equal(view, stored[:, :4] if even else stored)
    lengths.advance(2)
    assert lengths.tokens.tolist() == [length + 2 for length in start]
    assert lengths.even == (4 if even else None)
