"""What number formats cost and lose: a model's prefill of some texts, and its next tokens against those of float32.

    python samples/tools/arithmetics.py MODEL TEXT... [--dtypes int8,bfloat16] [--tokens 500] [--threads 1]

For each format the tokens that a second of processor time prefills; over all tokens the mean KL divergence (nats) of
the next token's distribution from float32's, its 99th percentile, and how often the likeliest token is the same.
Texts are cut to `--tokens`. With one thread the figures hold on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.tokens import encode

REFERENCE = "float32"


@torch.inference_mode()
def prefilled(model: str, dtype: str, texts: list[str], tokens: int) -> tuple[torch.Tensor, float]:
    """Return the log probabilities after each token `[tokens, vocabulary]`, and tokens a second of processor time."""
    loaded = load_model(resolve(model), device="cpu", dtype=dtype, packed=True)
    prompts = [encode(loaded.tokenizer, text)[:tokens] for text in texts]
    decoder = Decoder(loaded, kv_dtype=torch.bfloat16)
    found = [decoder.extend(ids, decoder.new_cache(len(ids))) for ids in prompts]
    decoder.prefill(prompts[0][:64])  # compiles
    started = time.process_time()
    for ids in prompts:
        decoder.prefill(ids)
    seconds = time.process_time() - started
    return torch.cat(found).float().log_softmax(-1), sum(map(len, prompts)) / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--dtypes", default="int8,bfloat16")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    texts = [path.read_text(encoding="utf-8") for path in asked.texts]
    exact, speed = prefilled(asked.model, REFERENCE, texts, asked.tokens)
    print(f"{REFERENCE} | {speed:.0f} tokens/s | {len(exact)} tokens", flush=True)
    for dtype in asked.dtypes.split(","):
        other, own = prefilled(asked.model, dtype, texts, asked.tokens)
        loss = (exact.exp() * (exact - other)).sum(-1)
        same = (exact.argmax(-1) == other.argmax(-1)).float().mean()
        print(
            f"{dtype} | {own:.0f} tokens/s ({own / speed:.2f}x) | KL {loss.mean():.1e}, 99 % {loss.quantile(0.99):.1e} "
            f"| same token {same:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
