"""vLLM fed by the connector answers as kvtool's own engine does, and by itself where nothing can be fed.

vLLM takes another version of `transformers` than kvtool, so it runs in an environment of its own, whose interpreter
KVTOOL_TEST_VLLM names (`kvtool help vllm` says how to make one).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvtool.core.cache.store import Store
from kvtool.core.fusion.engine import fuse
from kvtool.core.fusion.options import selector_for
from kvtool.core.model.generate import Sampling, generate
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import plan_spotted, spotted
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, kvtool, payloads, write_corpus
from tests.families import SHAPE, filled, tiny_tokenizer
from tests.vllm.imitation import OWN, QUESTION, prompt_of
from tests.vllm.server import Server

VLLM = os.environ.get("KVTOOL_TEST_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="no environment with vLLM: KVTOOL_TEST_VLLM=/…/bin/python names one"),
]

WIDE = SHAPE | {"hidden_size": 128, "head_dim": 32}  # the heads of the other tiny models are too small for vLLM
_WINDOWS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "mistral": lambda: MistralConfig(**WIDE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "qwen3": lambda: Qwen3Config(**WIDE),
    "gemma3": lambda: Gemma3TextConfig(
        **WIDE, layer_types=_WINDOWS, sliding_window=64, query_pre_attn_scalar=32, hidden_activation="gelu_pytorch_tanh"
    ),
}
MODES = ["reuse", "epic", "blend", "infoflow", "union"]
LONGEST = 8
WITHOUT = [*OWN * 12, *QUESTION]


@dataclass(frozen=True)
class Answer:
    """`log_probs`: of the first token. `cached`: tokens that vLLM did not compute."""

    ids: list[int]
    log_probs: torch.Tensor
    cached: int = 0


class Served:
    def __init__(self, family: str, folder: Path) -> None:
        self.folder, self.store, self.model = folder, folder / "store", folder / "model"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            filled(AutoModelForCausalLM.from_config(FAMILIES[family]())).save_pretrained(self.model)
        tiny_tokenizer().save_pretrained(self.model)
        write_corpus(folder / "corpus")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVTOOL_HOME", str(folder / "home"))
            kvtool("ingest", folder / "corpus", "--store", self.store, "--model", self.model, *CHUNKS).fine()

    def by_vllm(self, rounds: Sequence[Sequence[dict[str, Any]]], **job: Any) -> list[list[Answer]]:
        wanted = {"model": str(self.model), "connector": {"store": str(self.store)}, "rounds": rounds} | job
        there, back = self.folder / "job.json", self.folder / "answers.json"
        there.write_text(json.dumps(wanted))
        code = [VLLM, Path(__file__).with_name("served.py"), there, back]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(code, env=env, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stderr[-4000:]
        rows = json.loads(back.read_text())
        return [[Answer(one["ids"], torch.tensor(one["log_probs"]), one["cached"]) for one in row] for row in rows]

    def by_kvtool(self, ids: Sequence[int], wishes: Sequence[Any]) -> list[Answer]:
        with Store.open(self.store) as store:
            session = Session.open(store, ModelOptions(offline=True, dtype="float32"))
            return [self._answer(session, tuple(ids), wish) for wish in wishes]

    def _answer(self, session: Session, ids: tuple[int, ...], wish: Any) -> Answer:
        options = QueryOptions.of({"fusion": wish} if isinstance(wish, str) else wish)
        with session.store.view():
            plan = plan_spotted(session, ids, spotted(session.finder.spot(ids[:-1])), options)
            selector = selector_for(options, options.mode())
            fused = fuse(session.decoder, plan, selector, session.source, LONGEST)
        log_probs = torch.log_softmax(fused.logits.double(), -1)
        written = generate(session.decoder, fused.cache, int(fused.logits.argmax()), Sampling.greedy(LONGEST))
        return Answer(list(written.script)[:LONGEST], log_probs)


def alike(one: Answer, other: Answer) -> None:
    torch.testing.assert_close(one.log_probs.double(), other.log_probs.double(), atol=1e-3, rtol=0)
    assert other.ids[: len(one.ids)] == one.ids[: len(other.ids)]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_vllm_answers_as_kvtool_does_in_every_mode(served: Served) -> None:
    ids, _ = prompt_of(served.store)
    wishes = [*MODES, {"fusion": "union", "ratio": 1.0}]
    exactly, unspotted = {"ids": ids, "kvtool": False}, {"ids": WITHOUT}
    rounds = [[{"ids": prompt_of(served.store, 1)[0]}], [exactly], *([{"ids": ids, "kvtool": wish}] for wish in wishes)]
    rounds += [
        [exactly],
        [unspotted],
        [{"ids": ids, "kvtool": "epic"}, {"ids": ids[:-2], "kvtool": "reuse"}, unspotted],
    ]
    (gate,), (full,), *fed, (again,), (without,), together = served.by_vllm(rounds)
    assert (gate.cached, full.cached, without.cached) == (0, 0, 0)
    assert [one[0].cached for one in fed] == [len(ids) - 1] * len(wishes)
    for own, (got,) in zip(served.by_kvtool(ids, wishes), fed, strict=True):
        alike(own, got)
    alike(full, fed[-1][0])  # recomputing everything is full prefill
    alike(full, again)  # blocks of other modes were not found
    alike(fed[1][0], together[0])
    alike(served.by_kvtool(ids[:-2], ["reuse"])[0], together[1])
    alike(without, together[2])
    ((alone,),) = served.by_vllm([[unspotted]], connector=None)
    alike(alone, without)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("qwen3", tmp_path_factory.mktemp("faults"))


def test_prompts_longer_than_a_step_and_preempted_ones_are_answered_alike(qwen: Served) -> None:
    one, other = (prompt_of(qwen.store, first)[0] for first in (0, 2))
    asked = [{"ids": ids, "kvtool": "reuse", "max_tokens": 60} for ids in (one, other)]
    blocks = (len(one) + len(other)) // 32 + 4  # both prompts, but not both answers
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256, "num_gpu_blocks_override": blocks}
    _, (first,), (second,), both = qwen.by_vllm([[asked[0]], [asked[0]], [asked[1]], asked], options=options)
    assert [answer.ids for answer in both] == [first.ids, second.ids]


def test_a_store_of_another_model_or_none_changes_no_answer(qwen: Served, tmp_path: Path) -> None:
    other = Served("llama", tmp_path / "other")
    ids, _ = prompt_of(other.store)
    asked: list[list[dict[str, Any]]] = [[{"ids": ids}], [{"ids": ids, "kvtool": False}], [{"ids": ids}]]
    for store in (other.store, tmp_path / "none"):
        _, (full,), (got,) = qwen.by_vllm(asked, connector={"store": str(store)})
        alike(full, got)


def test_a_store_that_is_removed_while_it_is_served_ends_no_request(qwen: Served, tmp_path: Path) -> None:
    store = shutil.copytree(qwen.store, tmp_path / "store")
    one, other = (prompt_of(qwen.store, first)[0] for first in (0, 2))
    asked = [[{"ids": one}], [{"ids": one, "kvtool": False}], [{"ids": other, "kvtool": False}]]
    removed = [{"ids": one, "kvtool": {"ratio": 1.0}, "remove": str(store)}]
    rounds = [*asked, removed, [{"ids": other, "kvtool": {"ratio": 1.0}}]]
    _, (first,), (second,), (got,), (later,) = qwen.by_vllm(rounds, connector={"store": str(store)})
    alike(first, got)
    alike(second, later)


def test_two_servers_of_one_store_answer_alike_while_ingest_writes(qwen: Served, tmp_path: Path) -> None:
    store = Path(shutil.copytree(qwen.store, tmp_path / "store"))
    gate, *before = (prompt_of(store, first)[0] for first in range(9))
    started = [Server(VLLM, qwen.model, store, tmp_path / name) for name in ("one.log", "two.log")]
    with started[0] as one, started[1] as two:
        for server in (one, two):
            assert server.ask(gate)[1] == 0
        expected = [one.ask([*ids, 5]) for ids in before]
        assert [cached for _, cached in expected] == [len(ids) for ids in before]
        write_corpus(tmp_path / "more", documents=24)
        code = [sys.executable, "-m", "kvtool", "ingest", tmp_path / "more", "--store", store, *CHUNKS]
        rounds = 0
        with subprocess.Popen(code, stdout=subprocess.DEVNULL) as ingest, ThreadPoolExecutor(4) as pool:
            while ingest.poll() is None or not rounds:
                rounds += 1
                asked = [pool.submit(server.ask, [*ids, 5]) for ids in before for server in (one, two)]
                assert [one.result()[0] for one in asked] == [ids for ids, _ in expected for _ in range(2)]
        assert ingest.returncode == 0
        known = {tuple(ids) for ids in before}
        later = next(ids for ids in (prompt_of(store, first)[0] for first in range(40, 80)) if tuple(ids) not in known)
        for server in (one, two):  # whose index may be a little behind
            ends = time.monotonic() + 60
            while server.ask(later)[1] < len(later) - 1:
                assert time.monotonic() < ends
        answers = [server.ask(later) for server in (one, two)]
        assert answers[0] == answers[1]
        assert answers[0][1] == len(later) - 1
        for server in (one, two):
            metrics = server.metrics()
            assert metrics["prompts_total"] >= 8 * rounds + 2
            assert metrics["claimed_tokens_total"] > 0
            assert metrics["recomputed_tokens_total"] > 0
            assert metrics["load_seconds_count"] > 0
            assert (metrics["failed_loads_total"], metrics["gate"]) == (0, 1)


def test_a_killed_engine_harms_no_store_and_the_next_server_answers(qwen: Served, tmp_path: Path) -> None:
    ids, gate = (prompt_of(qwen.store, first)[0] for first in (0, 2))
    records = payloads(qwen.store)
    with Server(VLLM, qwen.model, qwen.store, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        server.ask(gate)
        expected = server.ask([*ids, 5])
        assert expected[1] == len(ids)
        dying = pool.submit(server.ask, [*ids, 6], max_tokens=500)
        while server.metrics()["prompts_total"] < 3:
            time.sleep(0.05)
        server.kill_engine()
        with pytest.raises((AssertionError, httpx.TransportError)):
            dying.result()
        server.process.wait(120)  # vLLM ends with its engine
    assert payloads(qwen.store) == records
    with Server(VLLM, qwen.model, qwen.store, tmp_path / "log") as server:
        assert server.ask(gate)[1] == 0
        assert server.ask([*ids, 5]) == expected
