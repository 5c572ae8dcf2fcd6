"""Models that are loaded by several threads of one process at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.common.collecting import quiet
from tests.families import save_tiny, tiny_model

IDS = torch.arange(5, 60)[None]


def test_two_threads_load_at_once(tmp_path: Path) -> None:
    """Loading sets torch's default dtype for the whole process, and restores what it found."""
    expected = tiny_model("llama", "bfloat16")(IDS).logits
    files, start = resolve(str(save_tiny("llama", tmp_path, dtype="bfloat16"))), threading.Barrier(4)

    def load(number: int) -> torch.Tensor:
        start.wait()
        model = load_model(files, device="cpu", dtype="bfloat16").model
        with torch.inference_mode():
            return model(IDS).logits

    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            assert all(torch.equal(found, expected) for found in threads.map(load, range(4)))
        assert torch.get_default_dtype() == torch.float32


def test_what_is_set_for_a_process_is_one_threads_at_a_time() -> None:
    inside, seen = threading.Event(), []

    def other() -> None:
        with quiet():
            seen.append(inside.is_set())

    with quiet(), quiet():  # a thread may go in again
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        assert not seen
        inside.set()
    thread.join()
    assert seen == [True]
