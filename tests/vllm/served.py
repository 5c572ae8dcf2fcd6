"""Answers of vLLM, computed in its own environment: `python served.py JOB ANSWERS`, both files of JSON.

A job has `model`, `connector` (its extra configuration; null: vLLM alone), `options` of `LLM`, and `rounds` of requests
that are sent together: each has `ids`, and may have `kvtool`, `max_tokens`, `spoil`, a file and the runs of it to
damage before, and `remove`, a folder to remove before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def opened(job: dict[str, Any]) -> LLM:
    options = {"max_model_len": 1024, "block_size": 32, "enforce_eager": True, "enable_prefix_caching": True}
    if job["connector"] is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvtoolConnector",
            kv_connector_module_path="kvtool.vllm",
            kv_role="kv_both",
            kv_connector_extra_config=job["connector"],
        )
    common = {"dtype": "float32", "skip_tokenizer_init": True, "max_logprobs": -1}
    return LLM(model=job["model"], **common, **options | job.get("options", {}))


def answered(llm: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer requests together; return ids, the first token's log probabilities, and how much was not computed."""
    params = []
    for one in requests:
        if "spoil" in one:
            spoil(*one["spoil"])
        if "remove" in one:
            shutil.rmtree(one["remove"])
        extra = {"kv_transfer_params": {"kvtool": one["kvtool"]}} if "kvtool" in one else None
        length = {"max_tokens": one.get("max_tokens", 8), "ignore_eos": True}
        params.append(SamplingParams(temperature=0, detokenize=False, logprobs=-1, extra_args=extra, **length))
    started = time.perf_counter()
    outs = llm.generate([{"prompt_token_ids": one["ids"]} for one in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    rows = []
    for out in outs:
        first = out.outputs[0].logprobs[0]
        log_probs = [first[token].logprob for token in range(len(first))]
        cached = out.num_cached_tokens or 0
        rows.append({"ids": [*out.outputs[0].token_ids], "log_probs": log_probs, "cached": cached, "seconds": seconds})
    return rows


def spoil(path: str, places: list[tuple[int, int]]) -> None:
    with open(path, "r+b") as file:
        for start, stop in places:
            file.seek(start)
            run = bytes(255 - byte for byte in file.read(stop - start))
            file.seek(start)
            file.write(run)


def main(job_path: str, answers_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    llm = opened(job)
    Path(answers_path).write_text(json.dumps([answered(llm, requests) for requests in job["rounds"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
