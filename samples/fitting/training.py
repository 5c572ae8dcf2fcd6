"""Distils full prefill into what is fitted: the model is frozen, its answers over exact caches are the aim."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from fitting.prompts import Prompt
from fitting.reading import Reading, hidden_error, kl_answers, read

WARM_UP = 20
BETAS = (0.9, 0.98)


def teacher_of(prompt: Prompt) -> Reading:
    """What the model makes of the questions over full prefill's rows."""
    with torch.no_grad():
        return read(prompt, prompt.rows("full"))


@torch.no_grad()
def judged(kind: Any, prompts: Sequence[Prompt], run: str, fitted: bool) -> list[float]:
    """KL of every answer in nats."""
    found: list[float] = []
    for prompt in prompts:
        found += kl_answers(teacher_of(prompt), kind.read(prompt, run, fitted)).tolist()
    return found


def train(kind: Any, prompts: Sequence[Prompt], steps: int, rate: float, seed: int = 1) -> None:
    """Take one step a prompt: KL of the answers and error of hidden states, over a run of the kind drawn by lot."""
    draw, order, started = random.Random(seed), [], time.perf_counter()
    adam = torch.optim.AdamW(kind.parameters, lr=rate, betas=BETAS, weight_decay=0.01)
    losses: list[tuple[float, float]] = []
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        order = order or draw.sample(list(prompts), len(prompts))
        losses.append(_step(kind, order.pop(), draw.choice(kind.runs), adam))
        if step % 10 == 9:
            seconds = time.perf_counter() - started
            kl, hidden = (mean(side) for side in zip(*losses[-20:], strict=True))
            print(f"step {step + 1}: KL {kl:.4f}, hidden {hidden:.4f}, {seconds:.0f} s", flush=True)


def _step(kind: Any, prompt: Prompt, run: str, adam: torch.optim.Optimizer) -> tuple[float, float]:
    wanted = teacher_of(prompt)
    with torch.enable_grad():
        got = kind.read(prompt, run)
        kl, hidden = kl_answers(wanted, got).mean(), hidden_error(wanted, got)
        adam.zero_grad()
        (kl + hidden).backward()
    torch.nn.utils.clip_grad_norm_(kind.parameters, 1.0)
    adam.step()
    return float(kl.detach()), float(hidden.detach())


def table(kind: Any, sets: dict[str, Sequence[Prompt]]) -> None:
    """Print KL before and after, mean (median), run by run and set by set."""
    print("| set | run | answers | KL before | KL after |\n| --- | --- | --- | --- | --- |")
    for name, prompts in sets.items():
        for run in kind.runs:
            sides = [judged(kind, prompts, run, fitted) for fitted in (False, True)]
            cells = [f"{mean(side):.4f} ({median(side):.4f})" for side in sides]
            print(f"| {name} | `{run}` | {len(sides[0])} | {' | '.join(cells)} |", flush=True)
