"""The bench itself: prepares, lets every contender answer in a process of its own, in turn, and gathers. No torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.checkpoint.hub import find_packaged, model_fingerprint, resolve
from kvtool.core.checkpoint.load import resolve_dtype
from kvtool.core.common.children import python
from kvtool.core.common.plugins import extra_line
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, NoSpaceError, UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.reports.evaluation import Journal
from samples.benchmarks.bench.prompts import scratch_folder
from samples.benchmarks.systems.task import KVTOOL, LLAMA, OFF, ON, TRANSFORMERS, Contender, Measured, Task, text

KIND = "peers.py"
INSTALL = f"{extra_line('peers')} builds it (cmake and a compiler are needed); or --peers transformers"
_TUNED_TOKENS = 1024  # of the prompt that llama.cpp's settings are tried on, at most
ONCE = 0  # the journal's number for what is measured once, not for each context


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """Options of the measurement.

    Attributes
    ----------
    peers : of `PEERS`; kvtool is always there, in these modes.
    """

    model: str
    dtype: str
    offline: bool
    peers: tuple[str, ...]
    modes: tuple[str, ...]
    contexts: tuple[int, ...]
    question_tokens: int
    chunk_tokens: int
    new_tokens: int
    threads: int
    level: str
    repeat: int
    query: QueryOptions


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one contender."""

    contender: Contender
    context: int
    round: int
    measured: Measured


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was measured.

    Attributes
    ----------
    host : the machine.
    stored : a level and its bytes a token, each.
    tuning : what llama.cpp's settings were tried on, and how long each took; empty without llama.cpp.
    """

    files: ModelFiles
    dtype: str
    runs: tuple[Run, ...]
    host: Mapping[str, Any]
    stored: tuple[Mapping[str, Any], ...]
    tuning: Mapping[str, Any]


def runs(options: PeersOptions) -> int:
    """Return how many runs there will be, for a progress bar."""
    beside = sum(3 if peer == LLAMA else 1 for peer in options.peers)
    return (beside + len(options.modes)) * len(options.contexts) * options.repeat


def measure_peers(options: PeersOptions, resume: Path | None, events: Events) -> Found:
    """Measure whatever the resumed file has not yet.

    Raises
    ------
    KvtoolError : llama-cpp-python is not installed; a process ended without a word.
    UsageError : the model is no GGUF file; a context that the model cannot hold, or that no chunk fits in.
    ModelError : the model cannot be loaded.
    """
    files = resolve(options.model, offline=options.offline)
    job = Job(options, files, resume, events)
    with job.journal.writing(), ExitStack() as stack:
        job.run(stack)
    return job.found()


def _gguf(files: ModelFiles) -> Path | None:
    if files.kind == "packaged":
        return find_packaged()
    return Path(files.ref) if files.kind == "gguf" else None


class Job:
    """One run of the bench, or a part of it."""

    def __init__(self, options: PeersOptions, files: ModelFiles, resume: Path | None, events: Events) -> None:
        self._options, self._files, self._events = options, files, events
        self._gguf = _gguf(files)
        self._dtype = resolve_dtype(options.dtype, "cpu", files)
        self._folder: Path | None = None
        self.journal = Journal(resume, facts_of(options, files, self._dtype), KIND)

    def run(self, stack: ExitStack) -> None:
        """Measure what is missing; whatever was measured is kept at once."""
        threads = self._options.threads
        self._check_llama()
        if "stored" not in self._once():
            self._prepared(stack)
        if LLAMA in self._options.peers and "tuning" not in self._once():
            self._tune(stack)
        for context, round_, contender in self._all():
            if not self._is_known(context, round_, contender):
                self._events.status(f"{context} tokens, {contender.name}")
                found = answer_of("measure", asdict(self._task(contender, context, stack)), threads)
                self.journal.add(context, None, {key_of(contender, round_): found})
            self._events.advance(1)

    def _check_llama(self) -> None:
        """Refuse at once what would fail later."""
        wanted = LLAMA in self._options.peers
        if not wanted or ("tuning" in self._once() and all(self._is_known(*run) for run in self._all())):
            return
        if importlib.util.find_spec("llama_cpp") is None:
            raise KvtoolError("llama.cpp is measured through llama-cpp-python, which is not installed", INSTALL)
        if self._gguf is None:
            ref = self._files.ref
            raise UsageError(f"llama.cpp reads GGUF files, and {ref} is none", "--model FILE.gguf, or smollm2")

    def _is_known(self, context: int, round_: int, contender: Contender) -> bool:
        return key_of(contender, round_) in self.journal.rows.get(context, {})

    def found(self) -> Found:
        """Return the results so far: for the requested contexts, all rounds that the file holds."""
        runs = [
            Run(contender, context, round_, Measured.from_json(row))
            for context in self._options.contexts
            for contender in self._contenders()
            for round_, row in self._rounds(context, contender)
        ]
        once = self._once()
        host, stored = once["stored"]["host"], tuple(once["stored"]["rows"])
        return Found(self._files, self._dtype, tuple(runs), host, stored, once.get("tuning", {}))

    def _rounds(self, context: int, contender: Contender) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows = self.journal.rows.get(context, {})
        for number in range(len(rows)):
            if row := rows.get(key_of(contender, number)):
                yield number, row

    def _once(self) -> Mapping[str, Any]:
        return self.journal.rows.get(ONCE, {})

    def _all(self) -> Iterator[tuple[int, int, Contender]]:
        """Short prompts first; every contender once a round, so that a slow moment of the machine meets all."""
        for context in sorted(self._options.contexts):
            for round_ in range(self._options.repeat):
                for contender in self._contenders():
                    yield context, round_, contender

    def _contenders(self) -> list[Contender]:
        found = []
        if LLAMA in self._options.peers:
            found += llama_contenders(self._once()["tuning"]["rows"])
        if TRANSFORMERS in self._options.peers:
            found.append(Contender(TRANSFORMERS))
        return [*found, *(Contender(KVTOOL, mode=mode) for mode in self._options.modes)]

    def _prepared(self, stack: ExitStack) -> Path:
        """The folder with the store and the prompts, made at the first need."""
        if self._folder is None:
            self._events.status("prefill and store the prompts' chunks")
            self._folder = stack.enter_context(scratch_folder())
            options = self._options
            told: dict[str, Any] = {"folder": str(self._folder), "model": options.model, "dtype": self._dtype}
            told |= {"offline": options.offline, "threads": options.threads, "level": options.level}
            told |= {"contexts": [*self._lengths()], "question_tokens": options.question_tokens}
            told |= {"chunk_tokens": options.chunk_tokens, "new_tokens": options.new_tokens}
            found = answer_of("prepare", told, options.threads)
            if "stored" not in self._once():
                self.journal.add(ONCE, None, {"stored": found})
        return self._folder

    def _lengths(self) -> list[int]:
        """The contexts, and the length that llama.cpp's settings are tried at."""
        tried = [self._tuned_at()] if LLAMA in self._options.peers else []
        return sorted({*self._options.contexts, *tried})

    def _tuned_at(self) -> int:
        return min(_TUNED_TOKENS, min(self._options.contexts))

    def _tune(self, stack: ExitStack) -> None:
        self._events.status("try llama.cpp's settings")
        found = answer_of("tune", asdict(self._task(Contender(LLAMA), self._tuned_at(), stack)), self._options.threads)
        self.journal.add(ONCE, None, {"tuning": found})

    def _task(self, contender: Contender, context: int, stack: ExitStack) -> Task:
        options = self._options
        return Task(
            contender=contender,
            folder=str(self._prepared(stack)),
            context=context,
            threads=options.threads,
            new_tokens=options.new_tokens,
            model=options.model,
            dtype=self._dtype,
            offline=options.offline,
            gguf=None if self._gguf is None else str(self._gguf),
            ratio=options.query.ratio,
            link_tokens=options.query.link_tokens,
            link=options.query.link,
        )


def facts_of(options: PeersOptions, files: ModelFiles, dtype: str) -> dict[str, Any]:
    """Return the facts that have to be the same to resume a file; contexts and rounds may be added."""
    return {
        "model": model_fingerprint(files, dtype),
        "text": hashlib.sha256(text().encode()).hexdigest(),
        "dtype": dtype,
        "threads": options.threads,
        "level": options.level,
        "question_tokens": options.question_tokens,
        "chunk_tokens": options.chunk_tokens,
        "new_tokens": options.new_tokens,
        "ratio": options.query.ratio,
        "link_tokens": options.query.link_tokens,
        "link": options.query.link,
    }


def key_of(contender: Contender, round_: int) -> str:
    """The journal's name of a measurement."""
    return f"{contender.name}, round {round_ + 1}"


def llama_contenders(tried: Sequence[Mapping[str, Any]]) -> list[Contender]:
    """llama.cpp as it comes, and with the quickest setting with flash attention and without."""
    best = [
        min((row for row in tried if row["flash"] == flash), key=lambda row: row["prefill_ms"]) for flash in (ON, OFF)
    ]
    return [Contender(LLAMA), *(Contender(LLAMA, ubatch=row["ubatch"], flash=row["flash"]) for row in best)]


_PROGRAM = "from samples.benchmarks.systems.child import main; main()"
_KINDS = {kind.exit_code: kind for kind in (UsageError, ModelError, NoSpaceError, DamagedError)}
_SAID = 500  # characters of what a dead process said last
# Variables that set how many threads the libraries in the processes make by default.
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def answer_of(job: str, told: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Run a job of `child.py`, and read its answer.

    Raises
    ------
    KvtoolError : what it was refused with, or that it died.
    """
    environment = os.environ | dict.fromkeys(_POOLS, str(threads))
    done = subprocess.run(
        python(_PROGRAM, job, json.dumps(told)), capture_output=True, text=True, env=environment, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:_SAID]
        hint = "the system ended it: free some memory" if done.returncode < 0 else "what was measured stays in --resume"
        raise KvtoolError(f"the process to {job} ended with {done.returncode}: {said}", hint) from error
    if refusal := found.get("error"):
        kind = _KINDS.get(refusal["exit_code"], KvtoolError)
        raise kind(refusal["message"], refusal["hint"])
    return found
