"""Threads that make records: the codec's work is machine code, in which Python serves others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def working() -> ThreadPoolExecutor:
    """As many threads as torch would take for one product."""
    return ThreadPoolExecutor(torch.get_num_threads(), "kvtool-records")
