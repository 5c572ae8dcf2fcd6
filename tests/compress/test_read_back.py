"""What was stored is compared with what it was made of."""

from __future__ import annotations

import torch

from kvtool.core.compress.level_writer import _within


def test_only_what_is_within_its_stated_error_and_of_the_same_shape() -> None:
    one, other = torch.ones(2, 5, 8), torch.full((2, 9, 8), 2.0)
    exact = [(one, one), (other, other)]
    made = [(one * 1.01, one), (other, other * 1.1)]
    assert _within(made, exact, [(0.0101, 0.0), (0.0, 0.11)]) == [True, True]
    assert _within(made, exact, [(0.0, 0.0), (0.0, 0.11)]) == [False, True]
    assert _within(made, exact, [(0.0101, 0.0), (0.0, 0.09)]) == [True, False]
    for wrong in (one[:, :4], one[:, :, :4], one.double()):
        assert _within([(wrong, one), made[1]], exact, [(9.0, 9.0)] * 2) == [False, True]
