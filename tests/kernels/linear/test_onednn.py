"""Packed weights give the same numbers, bit for bit, and are said to be what they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.kernels.linear.modules import KERNELS_KEPT, can_pack, pack_weights
from tests.families import KINDS, save_tiny, tiny_model

IDS = torch.arange(5, 60)[None]
needed = pytest.mark.skipif(not can_pack(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bfloat16 layout here")


@needed
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 55])
def test_the_same_bits(name: str, rows: int) -> None:
    plain, packed = tiny_model(name, "bfloat16"), tiny_model(name, "bfloat16")
    assert pack_weights(packed) > 0
    with torch.inference_mode():
        assert torch.equal(plain(IDS[:, :rows]).logits, packed(IDS[:, :rows]).logits)


@needed
def test_shapes_stay_known_and_memory_does_not() -> None:
    model = tiny_model("llama", "bfloat16")
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    pack_weights(model)
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == shapes
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert not model.get_input_embeddings().weight.is_meta


def test_other_dtypes_are_left_alone() -> None:
    model = tiny_model("llama", "float32")
    assert pack_weights(model) == 0
    assert not any(weight.is_meta for weight in model.parameters())


@pytest.mark.slow
@needed
def test_kernels_of_many_prompt_lengths_do_not_pile_up() -> None:
    """800 numbers of rows: all of their kernels would be 500 MB."""
    script = """
import torch
from kvtool.core.kernels.linear.modules import keep_few_kernels

resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4 // 1024
keep_few_kernels()
torch.set_num_threads(1)
rows, weight = torch.randn(820, 64).bfloat16(), torch.randn(64, 64).bfloat16()
torch.nn.functional.linear(rows, weight)
before = resident()
for count in range(10, 810):
    torch.nn.functional.linear(rows[:count], weight)
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=free())
    assert int(done.stdout) < 250


def free() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in KERNELS_KEPT}


def test_who_sets_the_number_of_kernels_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = KERNELS_KEPT
    monkeypatch.setenv(first, "7")
    monkeypatch.setenv(second, "placeholder")  # it is put back afterwards
    monkeypatch.delenv(second)
    load_model(resolve(str(save_tiny("llama", tmp_path))), device="cpu")
    assert os.environ[first] == "7"
    assert int(os.environ[second]) < 1024
