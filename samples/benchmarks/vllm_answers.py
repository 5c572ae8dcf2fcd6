"""Answers of vLLM fed from a store, compared with those of kvtool's own engine to the same prompt, mode by mode.

    python samples/benchmarks/vllm_answers.py STORE MODEL VLLM_PYTHON

MODEL is the folder of the store's model, VLLM_PYTHON the interpreter of vLLM's environment (`kvtool help vllm`). The
prompt has the first chunks of three documents. Both compute in float32 with one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.cache.store import Store
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.model.generate import Sampling, generate
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.tokens import encode
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import plan_spotted, spotted
from kvtool.core.session.session import Session

ROOT = Path(__file__).resolve().parents[2]
WAYS: list[dict[str, Any]] = [{"fusion": mode} for mode in ("full", "reuse", "epic", "blend", "infoflow", "union")]
WAYS += [{"fusion": "union", "ratio": 1.0}, {"fusion": "union", "ratio": 0.3, "shift": False}]
_LONGEST = 8  # tokens of an answer


def prompt_of(session: Session, question: str) -> list[int]:
    """Return the token ids of a prompt with the first chunks of three documents, pasted as text."""
    documents = [one for one in session.store.documents() if len(one.chunks) > 1][:3]
    texts = [one.text[one.chunks[0].start : one.chunks[0].end].strip() for one in documents]
    pasted = "\n\n".join(f"### Passage {number}\n{text}" for number, text in enumerate(texts, 1))
    return [*encode(session.tokenizer, f"You answer from passages.\n\n{pasted}\n\nQuestion: {question}\nAnswer:")]


def by_kvtool(session: Session, ids: list[int], way: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """Return log probabilities of the first token, and the answer's tokens, by kvtool's own engine."""
    options = QueryOptions.of(way)
    with session.store.view():
        plan = plan_spotted(session, tuple(ids), spotted(session.finder.spot(ids[:-1])), options)
        selector = selector_for(options, options.mode())
        fused = fuse(session.decoder, plan, selector, session.source, _LONGEST)
    written = generate(session.decoder, fused.cache, int(fused.logits.argmax()), Sampling.greedy(_LONGEST))
    return torch.log_softmax(fused.logits.double(), -1), list(written.script)[:_LONGEST]


def by_vllm(store: str, model: str, python: str, rounds: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return vLLM's answers, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        job, answers = Path(folder) / "job.json", Path(folder) / "answers.json"
        job.write_text(json.dumps({"model": model, "connector": {"store": store}, "rounds": rounds}))
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([python, ROOT / "tests" / "vllm" / "served.py", job, answers], env=env, check=True)
        rows: list[list[dict[str, Any]]] = json.loads(answers.read_text())
    return rows


def main(store: str, model: str, python: str) -> None:
    torch.set_num_threads(1)
    with Store.open(Path(store)) as opened:
        session = Session.open(opened, ModelOptions.of({"model": model, "dtype": "float32", "offline": True}))
        ids, first = prompt_of(session, "What is this about?"), prompt_of(session, "Where is it?")
        own = [by_kvtool(session, ids, way) for way in WAYS]
    exactly = [{"ids": ids, "kvtool": False}]
    asked = [[{"ids": first}], *([{"ids": ids, "kvtool": way}] for way in WAYS), exactly]
    _, *fed, again = by_vllm(store, model, python, asked)
    full = torch.tensor(fed[0][0]["log_probs"]).double()
    print(f"{len(ids)} tokens\n| mode | not computed by vLLM | Δ | same tokens | from vLLM's full prefill |")
    print("| --- | --- | --- | --- | --- |")
    for way, (log_probs, written), (got,) in zip(WAYS, own, fed, strict=True):
        theirs = torch.tensor(got["log_probs"]).double()
        delta, apart = float((log_probs - theirs).abs().max()), float((full - theirs).abs().max())
        name = ", ".join(str(value) if name == "fusion" else f"{name} {value}" for name, value in way.items())
        print(f"| {name} | {got['cached']} | {delta:.1e} | {'yes' if written == got['ids'] else 'NO'} | {apart:.1e} |")
    print(f"asked exactly again: {again[0]['cached']} found, same answer: {again[0]['ids'] == fed[0][0]['ids']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
