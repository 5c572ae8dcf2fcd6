"""A layer's toll, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.compress.loss import Toll, tolls


def test_by_hand() -> None:
    keys, values = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]])
    one, other = tolls([(keys, values)] * 2, [(keys + 1, values), (keys, values * 3)], [3, 1], keys.shape[1])
    assert one.to_json() == {
        "bits_per_element": 6.0,
        "k_relative_error": pytest.approx((2 / 25) ** 0.5),
        "v_relative_error": 0.0,
    }
    both = Toll() + one + other
    assert (both.bytes, both.elements) == (4, 8)
    assert both.to_json()["k_relative_error"] == pytest.approx((2 / 50) ** 0.5)
    assert both.to_json()["v_relative_error"] == pytest.approx((4 / 2) ** 0.5)


def test_nothing() -> None:
    assert Toll().to_json() == {"bits_per_element": 0.0, "k_relative_error": 0.0, "v_relative_error": 0.0}
