"""Gradients of cached keys and values: those of a plain call of the model, with any other chunks in the pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from kvtool.core.compress import fitting as module
from kvtool.core.compress.fitting import CachedPrompt, gradients
from kvtool.core.model.decoder import Decoder
from samples.benchmarks.bench.plain import attention_of_transformers
from tests.families import KINDS, VOCAB, tiny_model
from tests.fusion.making import swapped

SAID = 5
pytestmark = pytest.mark.usefixtures("one_thread")


def decoder_of(family: str) -> Decoder:
    return Decoder(SimpleNamespace(model=tiny_model(family), device="cpu", tokenizer=None))  # type: ignore[arg-type]


def asked(decoder: Decoder, cached: int, rows: int, seed: int) -> CachedPrompt:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows,), generator=draw).tolist()
    layers = [
        (
            torch.randn((shape.heads, cached, shape.key_dim), generator=draw),
            torch.randn((shape.heads, cached, shape.value_dim), generator=draw),
        )
        for shape in decoder.shapes
    ]
    return CachedPrompt(layers, tuple(ids), SAID)


def pull(logits: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return logits.cos()


def plainly(decoder: Decoder, prompt: CachedPrompt) -> torch.Tensor:
    """The same by `transformers`' own attention, rotation included in what is differentiated."""
    layers = range(decoder.stored_layers)
    table = decoder.rotary.table(torch.arange(prompt.cached))
    leaves = [[side[None].clone().requires_grad_() for side in sides] for sides in prompt.layers]
    with attention_of_transformers(decoder), torch.enable_grad():
        cache = DynamicCache()
        for layer, (keys, values) in zip(layers, leaves, strict=True):
            cache.update(*swapped(decoder.model, decoder.rotary.rotate(keys, table, layer), values), layer)
        positions = torch.arange(prompt.cached, prompt.cached + len(prompt.ids))
        out = decoder.model(
            torch.tensor([prompt.ids]),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=SAID + 1,
        )
        logits = out.logits[0]
        wanted = [side for layer in leaves for side in layer]
        found = torch.autograd.grad(logits, wanted, pull(logits.detach(), torch.Generator()))
    rows = [gradient[0].transpose(0, 1).flatten(1) for gradient in found]
    wide = [torch.nn.functional.pad(row, (0, decoder.channels - row.shape[1])) for row in rows]
    return torch.stack(wide).view(len(layers), 2, prompt.cached, -1)


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_those_of_a_plain_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_pull", pull)
    decoder = decoder_of(family)
    prompts = [asked(decoder, 21, 9, 0), asked(decoder, 34, 7, 1)]
    decoder.model.requires_grad_(False)
    together = gradients(decoder, prompts, torch.Generator())
    for prompt, found in zip(prompts, together, strict=True):
        wanted = plainly(decoder, prompt)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4 * float(wanted.abs().max()))
    assert float(together[0].abs().max()) > 0


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """The gradient of the logits is the drawn token's row less the chances."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    chances = torch.softmax(logits[0], -1)
    pulled = module._pull(logits, torch.Generator().manual_seed(0))
    torch.testing.assert_close((pulled + chances).mean(0), chances, atol=0.02, rtol=0)
    fisher = pulled.T @ pulled / len(pulled)
    torch.testing.assert_close(fisher, torch.diag(chances) - torch.outer(chances, chances), atol=0.02, rtol=0)
