"""The pass of few operations: the model's own logits and cache, in torch and in Triton's interpreter; what it costs."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from kvtool.core.kernels.placing_triton import HeadNorm
from kvtool.core.kernels.rope import CosSin, rotate_halves_torch
from kvtool.core.model.cuda_layer import cuda_forward
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import Forward, Pass, QueryRows
from kvtool.core.model.hf.adapter import HfForward
from kvtool.core.model.prompt_cache import BufferLayer, KVShape, PromptCache
from kvtool.core.model.rope import Rotary
from tests.codec.processes import needs_triton
from tests.families import NATIVE, tiny_model
from tests.fusion.making import MOE, decoder_of, rms, tokens
from tests.pretended import pretended
from tests.wording import refused

PROMPT = tokens(40, 1)
SCATTERED = torch.tensor([0, 3, 4, 17, 30, 38, 39])


def prefilled(decoder: Decoder) -> PromptCache:
    return decoder.prefill(PROMPT, 5)[1]


@torch.inference_mode()
def both(decoder: Decoder, keep: int) -> list[tuple[torch.Tensor, PromptCache]]:
    """Rows in the midst of a prompt, fused and by the model's own forward: with other tokens than before."""
    ids = [(PROMPT[at] + 1) % 500 for at in SCATTERED.tolist()]
    rows = QueryRows.of(SCATTERED, "cpu")
    ours, theirs = prefilled(decoder), prefilled(decoder)
    return [
        (cuda_forward(decoder, decoder.spec).logits(Pass(torch.tensor(ids), rows, rows.places, ours), keep), ours),
        (HfForward(decoder, "").logits(Pass(torch.tensor(ids), rows, rows.places, theirs), keep), theirs),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [1, 3, len(SCATTERED)])
@pytest.mark.parametrize("name", [*NATIVE, "mixtral", "qwen3-moe"])
def test_what_the_model_computes(name: str, keep: int, dtype: str) -> None:
    (found, ours), (wanted, theirs) = both(decoder_of(tiny_model(name, dtype), "cpu"), keep)
    # bfloat16: rounded otherwise; of logits whose standard deviation is 3, experts are now and then others.
    rounding = 1e-4 if dtype == "float32" else 0.9 if name in MOE else 0.2
    assert found.shape == wanted.shape == (keep, 512)
    assert rms(found - wanted) <= rounding
    for one, other in zip(ours.buffers, theirs.buffers, strict=True):
        for side, right in zip(one.view(), other.view(), strict=True):
            assert rms(side.float() - right.float()) <= rounding


@pytest.mark.slow
def test_a_model_that_computes_something_else_has_none() -> None:
    with pretended():
        assert isinstance(decoder_of(tiny_model("llama"), "cuda").forward, Forward)
        model = tiny_model("llama")
        model.model.layers[1].mlp.act_fn = torch.nn.Tanh()
        assert isinstance(decoder_of(model, "cuda").forward, Forward)  # whatever function it is, it is called
        strange = tiny_model("llama")
        strange.model.layers[2].add_module("more", torch.nn.Identity())
        declined = decoder_of(strange, "cuda")
        assert not isinstance(declined.forward, Forward)
        assert "has more" in declined.forward.why


def test_heads_that_are_not_rotated_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(tiny_model("llama"), "cpu")
    monkeypatch.setattr(Rotary, "in_pairs", True)
    assert "halves" in decoder.forward.why


def _kernel_and_torch(
    heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, rows: int, fused: bool
) -> list[list[torch.Tensor]]:
    from kvtool.core.kernels.placing_triton import place_heads

    draw = torch.Generator().manual_seed(rows)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    parts = [torch.randn((rows, size), generator=draw) for size in sizes]
    if fused:  # rows of one matrix's product
        parts = list(torch.cat(parts, 1).split(sizes, -1))
    angle = torch.randn((1, rows, rotary // 2), generator=draw)
    table = CosSin(angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)) if rotary else None
    weights = torch.randn((2, dim), generator=draw)
    norms = (HeadNorm(weights[0], 1e-6), HeadNorm(weights[1], 1e-5)) if normed else None
    at = torch.randperm(rows + 9, generator=draw)[:rows].sort().values
    buffers = [BufferLayer(KVShape(kv_heads, dim, dim), rows + 9, torch.float32, "cpu") for _ in range(2)]
    for buffer in buffers:
        buffer.keys.fill_(7.0)
        buffer.values.fill_(7.0)
    ours = place_heads(*parts, norms, table, at, buffers[0].keys, buffers[0].values)
    query, key, value = (part.reshape(1, rows, -1, dim).transpose(1, 2) for part in parts)
    if norms is not None:
        query, key = norms[0].normed(query), norms[1].normed(key)
    if table is not None:
        query, key = rotate_halves_torch(query, table), rotate_halves_torch(key, table)
    buffers[1].scatter(at, key, value)
    return [[ours, buffers[0].keys, buffers[0].values], [query, buffers[1].keys, buffers[1].values]]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    "shape",
    [
        (4, 2, 16, 16, False, 1, False),
        (9, 3, 64, 64, False, 37, False),
        (4, 2, 80, 80, True, 20, False),
        (6, 2, 96, 32, False, 17, True),
        (2, 1, 128, 0, True, 5, False),
        (2, 2, 32, 0, False, 33, True),
    ],
)
def test_the_kernel_places_heads(interpreter: ProcessPoolExecutor, shape: tuple[int | bool, ...]) -> None:
    ours, wanted = interpreter.submit(_kernel_and_torch, *shape).result()
    for one, other in zip(ours, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.some(2)
@pytest.mark.parametrize("wrong", ["keys", "at", "table", "buffer"])
def test_what_would_leave_its_arrays_is_refused(wrong: str) -> None:
    from kvtool.core.kernels.placing_triton import place_heads

    parts = {"queries": torch.zeros(3, 64), "keys": torch.zeros(3, 32), "values": torch.zeros(3, 32)}
    table = CosSin(torch.ones(1, 3, 16), torch.ones(1, 3, 16))
    at, buffers = torch.arange(3), [torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16)]
    if wrong == "keys":
        parts["keys"] = torch.zeros(2, 32)
    if wrong == "at":
        at = torch.arange(6)[::2]
    if wrong == "table":
        table = CosSin(torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    if wrong == "buffer":
        buffers[1] = torch.zeros(1, 2, 8, 16)
    with refused(ValueError):
        place_heads(*parts.values(), None, table, at, *buffers)
