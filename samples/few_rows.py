"""What a pass of few rows is made of, and the least that it can take; run `python samples/few_rows.py --help`.

`reuse` computes a question's rows over chunks that are loaded meanwhile. Its parts are run alone, all of them and the
whole pass in turn, round after round: the products of every layer over weights as cold as in a pass, attention, the LM
head, and loading by one thread. The floor is what the parts take on all threads, loading shared among them; what the
pass takes beyond it is waiting and the work in between. Beside it stands the pass by OpenMP's team. The least and the
middle of each are told, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors import selector_for
from kvtool.core.fusion.source import StoreSource
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.kernels.linear.onednn import keep_few_kernels, keep_freed_memory, pack_weights
from kvtool.core.model import decoder as decoder_module
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.decoder import Decoder
from kvtool.core.native.threads import use_pool
from kvtool.core.query.options import QueryOptions
from kvtool.lab.bench.passes import Answerer, warm_up
from kvtool.lab.bench.prompts import BenchPrompt
from kvtool.lab.bench.scratch import Sizes, scratch_store
from kvtool.lab.bench.shapes import build_shape

MODE = "reuse"
PARTS = ("products", "attention", "head", "load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="default: qwen2.5-0.5b")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt (default: 2048)")
    parser.add_argument("--question", type=int, default=32, help="rows (default: 32)")
    parser.add_argument("--rounds", type=int, default=30, help="default: 30")
    options = parser.parse_args()
    keep_freed_memory()
    keep_few_kernels()
    loaded = build_shape(options.shape, "cpu", "auto", 0)
    pack_weights(loaded.model)
    decoder = Decoder(loaded)
    sizes = Sizes((options.context,), 256, options.question)
    with scratch_store(decoder, "raw", sizes, 0) as (store, (prompt,)):
        answerer = Answerer(decoder, store, QueryOptions())
        warm_up(answerer, prompt, (MODE,))
        work = parts_of(decoder, prompt, StoreSource(store, decoder), prompt.plan(store))
        work["whole pass"] = lambda: answerer.sample(prompt, MODE)
        work["whole pass by OpenMP"] = lambda: by_openmp(lambda: answerer.sample(prompt, MODE))
        tell(rounds(work, options.rounds))


def parts_of(decoder: Decoder, prompt: BenchPrompt, source: StoreSource, plan: Plan) -> dict[str, Callable[[], object]]:
    """The pass without loading, and each part alone."""
    cache = fuse(decoder, plan, selector_for(QueryOptions(), MODE), source).cache
    count = len(prompt.question)
    rows = QueryRows.of(torch.arange(prompt.length - count, prompt.length), "cpu")
    linears = [m for layer in decoder.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    products = [(_product_of(m), torch.zeros((1, count, m.in_features), dtype=decoder.dtype)) for m in linears]
    heads = decoder.config.num_attention_heads
    query = torch.zeros((1, count, heads, decoder.shapes[0].key_dim), dtype=decoder.dtype).transpose(1, 2)
    head, last = decoder.model.get_output_embeddings(), torch.zeros((1, 1, decoder.config.hidden_size))
    segments = [segment for segment in plan.segments if segment.status in ("hit", "exact")]

    def load() -> None:
        with Loader(
            decoder, [segments] * len(decoder.layers), decoder.new_cache(prompt.length), source, workers=1
        ) as loader:
            for layer in range(len(decoder.layers)):
                loader.wait(layer)

    def attend() -> None:
        for number, buffer in enumerate(cache.buffers):
            rows.attend(number, query, *buffer.view(), AttentionParams(query.shape[-1] ** -0.5))

    return {
        "products": lambda: [multiply(x) for multiply, x in products],
        "attention": attend,
        "head": lambda: head(last.to(decoder.dtype)),
        "load": load,
        "pass without loading": lambda: decoder.compute(prompt.question, rows, cache),
    }


def by_openmp(run: Callable[[], object]) -> None:
    """As it was before threads took part that are not waited for (`core/native/crew.py`)."""
    with patch.object(decoder_module, "use_pool", lambda threads: nullcontext()):
        run()


def _product_of(linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    chosen: Callable[[torch.Tensor], torch.Tensor] = getattr(linear, "rows_product", linear)
    return chosen


def rounds(work: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Wall time of everything, in turn."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(count):
        for name, run in work.items():
            found[name].append(milliseconds(run, alone=name in PARTS and name != "load"))
    return found


@torch.inference_mode()
def milliseconds(run: Callable[[], object], alone: bool = False) -> float:
    """Wall time of a run; `alone`: with threads that a pass would have gathered before."""
    with use_pool(torch.get_num_threads() if alone else 1):
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3


def tell(found: dict[str, list[float]]) -> None:
    threads = torch.get_num_threads()
    for least, which in ((min, "least"), (statistics.median, "middle")):
        wall = {name: least(taken) for name, taken in found.items()}
        floor = sum(wall[name] for name in PARTS if name != "load") + wall["load"] / threads
        print(f"{which} of {len(found['load'])}, {threads} threads, load average {os.getloadavg()[0]:.1f}:")
        for name, ms in wall.items():
            print(f"  {name:22s} {ms:8.1f} ms")
        print(f"  {'floor':22s} {floor:8.1f} ms: {floor / wall['whole pass']:.0%} of the whole pass")


if __name__ == "__main__":
    main()
