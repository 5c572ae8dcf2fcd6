"""A session in a pool of four threads: every answer is the serial one. ``python threads.py STORE CORPUS ROUNDS``."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import kvtool
from kvtool.core.fusion.selectors import FUSIONS
from kvtool.core.query.reply import Reply
from tests.faults.harness.subject import QUESTIONS


def facts(reply: Reply) -> tuple[object, ...]:
    return reply.answer, [chunk.id for chunk in reply.chunks], reply.tokens, reply.fused.logits.tolist()


def main() -> int:
    asked = [(question, mode) for question in QUESTIONS for mode in FUSIONS]
    torch.set_num_threads(1)
    with kvtool.open(sys.argv[1], offline=True) as cache:

        def ask(one: tuple[str, str]) -> tuple[object, ...]:
            return facts(cache.query(one[0], fusion=one[1], max_tokens=4, top_k=3))

        cache.query(QUESTIONS[0], fusion="auto", max_tokens=1)  # the machine is measured
        serial = {one: ask(one) for one in asked}
        many = asked * int(sys.argv[3])
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, many))
    differing = [one for one, reply in zip(many, found, strict=True) if reply != serial[one]]
    for one in differing:
        sys.stdout.write(f"{one} is another than serially\n")
    sys.stdout.write(f"{len(many)} answers in {len(FUSIONS)} modes, {len(differing)} differ\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
