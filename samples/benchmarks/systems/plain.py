"""Plain transformers: sdpa attention, its own cache, one call of the model a token."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import resolve_dtype
from kvtool.core.common.collecting import quiet
from kvtool.core.model.hf.modules import cache_name
from samples.benchmarks.systems.task import About, PeerPrompt, Task


class PlainRunner:
    """A model as `from_pretrained` gives it."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        files = resolve(task.model, offline=task.offline)
        dtype = resolve_dtype(task.dtype, "cpu", files)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                str(files.folder),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="sdpa",
            )
        self._model: Any = model.eval().requires_grad_(False)
        self._cache: Any = None

    def first(self, prompt: PeerPrompt) -> int:
        self._cache = None
        return self._compute(prompt.ids)

    def next(self, token: int) -> int:
        return self._compute((token,))

    @torch.inference_mode()
    def _compute(self, ids: tuple[int, ...]) -> int:
        given = torch.tensor([ids])
        name = cache_name(self._model)
        out = self._model(input_ids=given, use_cache=True, logits_to_keep=1, **{name: self._cache})
        self._cache = out[name]
        return int(out.logits[0, -1].argmax())

    def about(self, prompt: PeerPrompt) -> About:
        return About(f"{transformers.__version__}, torch {torch.__version__}", built())


def load(task: Task, capacity: int) -> PlainRunner:
    """Load the model."""
    return PlainRunner(task)


def built() -> str:
    """Return torch's CPU capability, which its own kernels use, and its threads."""
    return f"CPU capability {torch.backends.cpu.get_cpu_capability()}, threads {torch.get_num_threads()}"
