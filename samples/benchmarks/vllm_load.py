"""Requests a second of vLLM on a CPU with clients that ask at once, and what prompts without passages lose by kvtool.

    OMP_NUM_THREADS=1 taskset -c 1 /…/vllm/bin/python samples/benchmarks/vllm_load.py STORE MODEL load [--clients 8]
    OMP_NUM_THREADS=1 taskset -c 1 /…/vllm/bin/python samples/benchmarks/vllm_load.py STORE MODEL plain [--rounds 30]

Run in vLLM's environment (`kvtool help vllm`). A process with the connector and one without it answer in turn, and
each measures its own processor time. `load`: prompts of some random chunks of the store with a line before each, a
question of one's own, and an answer of 16 tokens; a client asks again when it is answered. `plain`: one token after
300 and 2,000 tokens of the store in random order, in which no passage is found. Each round is a pair in changing order.
The result is the median of the quotients, with the interval of 95 % of the medians of 2,000 samples of these pairs, and
the time in the connector's own methods: two processes differ by some per cent from start to start.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": sys.path[0]}

from kvtool.core.cache.store import Store

_BEFORE, _ANSWER, _CHUNKS, _LONGEST = [10, 11, 12, 13, 14, 15], 16, 6, 4096


def watched() -> list[float]:
    """Return a list that the processor time of each call of the connector's methods will be added to."""
    from kvtool.vllm import KvtoolConnector

    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return method(*given, **named)
            finally:
                spent.append(time.process_time() - started)

        return call

    for name, method in vars(KvtoolConnector).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(KvtoolConnector, name, timed(method))
    return spent


def serve(pipe: Any, store: str | None, model: str, clients: int) -> None:
    """Answer lists of prompts from a pipe: wall, processor and the connector's seconds, and tokens not computed."""
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "KvtoolConnector",
        "kv_connector_module_path": "kvtool.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }
    more = {} if store is None else {"kv_transfer_config": transfer}
    own = watched() if store else []
    common = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": 32}
    llm = LLM(model=model, max_model_len=_LONGEST, max_num_seqs=clients, **common, **more)
    while True:
        prompts, way, tokens = pipe.recv()
        extra = {"kv_transfer_params": {"kvtool": way}} if way else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        own.clear()
        wall, processor = time.perf_counter(), time.process_time()
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        spent = time.perf_counter() - wall, time.process_time() - processor
        pipe.send((*spent, sum(own), sum(out.num_cached_tokens or 0 for out in outs)))


class Server:
    """A process that runs vLLM; `store`: None without the connector."""

    def __init__(self, store: str | None, model: str, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        context.Process(target=serve, args=(other, store, model, clients), daemon=True).start()

    def answer(
        self, prompts: list[list[int]], way: str | None = None, tokens: int = 1
    ) -> tuple[float, float, float, int]:
        """Return wall, processor and the connector's seconds, and how many tokens of prompts vLLM did not compute."""
        self._pipe.send((prompts, way, tokens))
        result: tuple[float, float, float, int] = self._pipe.recv()
        return result


class Prompts:
    """Prompts of a store's own tokens, of which no two begin alike."""

    def __init__(self, store: str) -> None:
        self._random, self._number = random.Random(0), count(100)
        with Store.open(Path(store)) as opened:
            infos = [opened.chunk_info(ref.chunk_id) for one in opened.documents() for ref in one.chunks]
        self._chunks = [list(info.token_ids) for info in infos if info is not None]

    def stored(self) -> list[int]:
        """Return some chunks and a question."""
        number, some = next(self._number), self._random.sample(self._chunks, _CHUNKS)
        return [number, *(token for chunk in some for token in [*_BEFORE, *chunk]), *range(20, 30), number]

    def plain(self, tokens: int) -> list[int]:
        """Return so many tokens in an order that nothing has that is stored."""
        every = [token for chunk in self._chunks for token in chunk]
        return [next(self._number), *self._random.choices(every, k=tokens - 1)]


def load(given: argparse.Namespace, prompts: Prompts, without: Server, fed: Server) -> None:
    """Print a table of clients that ask at once."""
    ways: list[tuple[str, Server, str | None]] = [("vLLM alone", without, None)]
    ways += [(mode, fed, mode) for mode in ("reuse", "epic", "union")]
    fed.answer([prompts.stored()], "reuse")  # for the gate
    for _, server, way in ways:
        server.answer([prompts.stored()], way)  # for what is made once, such as machine code
    asked, base = [prompts.stored() for _ in range(given.clients * given.requests)], 0.0
    mean = statistics.mean(map(len, asked))
    print(f"{given.clients} clients, {len(asked)} requests of {mean:.0f} tokens on average, {_ANSWER} tokens answered")
    print("| mode | tokens not computed | wall s | processor s | requests a processor second | times |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, server, way in ways:
        wall, processor, _, cached = server.answer(asked, way, _ANSWER)
        rate = len(asked) / processor
        base = base or rate
        share = cached / sum(map(len, asked))
        print(f"| {name} | {share:.0%} | {wall:.1f} | {processor:.1f} | {rate:.2f} | {rate / base:.2f} |", flush=True)


def plain(given: argparse.Namespace, prompts: Prompts, without: Server, fed: Server) -> None:
    """Print what prompts without passages take with the connector, as a share of what they take without."""
    fed.answer([prompts.stored()])  # for the gate
    print("| tokens | without, processor s | with | median of pairs | 95 % | in the connector, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tokens in map(int, given.tokens.split(",")):
        pairs: list[dict[Server, tuple[float, ...]]] = []
        for number in range(given.rounds + 1):
            order = (without, fed) if number % 2 else (fed, without)
            prompt = prompts.plain(tokens)
            pairs.append({server: server.answer([prompt])[1:3] for server in order})
        del pairs[0]  # what is made once
        before, after = (statistics.median(pair[server][0] for pair in pairs) for server in (without, fed))
        quotients = [pair[fed][0] / pair[without][0] for pair in pairs]
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(quotients, k=len(quotients))) for _ in range(2000))
        shown = f"{statistics.median(quotients):.4f} | {medians[50]:.4f} … {medians[-51]:.4f}"
        own = 1e3 * statistics.median(pair[fed][1] for pair in pairs)
        print(f"| {tokens} | {before:.4f} | {after:.4f} | {shown} | {own:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("what", choices=["load", "plain"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", default="300,2000", help="of `plain`")
    given = parser.parse_args()
    servers = Server(None, given.model, given.clients), Server(given.store, given.model, given.clients)
    {"load": load, "plain": plain}[given.what](given, Prompts(given.store), *servers)


if __name__ == "__main__":
    main()
