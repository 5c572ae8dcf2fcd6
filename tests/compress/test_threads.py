"""Threads that make records."""

from __future__ import annotations

import sys

import pytest
import torch

from kvtool.core.records.encode import encoder_threads


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP there")
def test_their_products_take_one_thread_and_nobody_elses() -> None:
    before = torch.get_num_threads()
    with encoder_threads() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
    with encoder_threads() as later:
        assert later._max_workers == before
    assert torch.get_num_threads() == before
