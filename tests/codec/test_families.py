"""The keys and values of every family of models, through levels and back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvtool.core.codec import CODECS
from kvtool.core.codec.base import NAMES as DTYPES
from kvtool.core.codec.base import Encoded, LayerKV, shape_of_layer
from tests.fusion.making import BOS, CHUNKS, NAMES, case

LEVELS = ("raw", "lossless", "cachegen-2")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_within_the_error_that_is_stated(name: str, level: str) -> None:
    one = case(name)
    holds(one.kept[one.candidate(CHUNKS[1], BOS).chunk_id].layers, level)


def holds(kvs: Sequence[LayerKV], level: str) -> None:
    payloads = [bytearray().join(bytes(part) for part in parts) for parts in CODECS[level].encode_layers(kvs)]
    items = [
        Encoded(payload, shape_of_layer(kv), DTYPES[kv[0].dtype]) for payload, kv in zip(payloads, kvs, strict=True)
    ]
    for item, kv, made in zip(items, kvs, CODECS[level].decode_layers(items), strict=True):
        for exact, side, stated in zip(kv, made, CODECS[level].stated_error(item.payload), strict=True):
            assert side.shape == exact.shape
            if not stated:
                assert torch.equal(side, exact)
            assert float((side - exact).double().norm() / exact.double().norm()) <= stated * 1.01
