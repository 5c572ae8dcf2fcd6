"""What policies of a bounded store in front of a tier fetch, over made-up questions whose subject changes halfway.

    python samples/fronts.py [--seeds 2] [--zipf 1.0]

1,500 chunks (a fifth of them shorter), 1,200 different questions of five chunks each, asked 6,000 times by Zipf's law;
half way half of the questions swap their ranks, and every tenth question is of chunks drawn at random. The first 500
fill the store and are not counted. The last table fills the store from a journal of the first half, and asks on.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import mean

from kvtool.lab.simulator.fronts import LEVELS, Frequency, Policy, Question, Recency, Tally, Warmth, play

CHUNKS, DIFFERENT, EACH, LENGTH, FILL = 1500, 1200, 5, 6000, 500
BUDGETS = (0.05, 0.1, 0.25, 0.5)
HALF_LIVES = (30, 300, 900, 3000)
POLICIES: Mapping[str, Policy] = {
    "least recently used, a tenth at a time (before)": Policy(Recency),
    "least recently used, levels first (prune before)": Policy(Recency, by_level=True),
    "LFU with dynamic ageing": Policy(Frequency),
    **{f"warmth, half-life {life} questions": Policy(lambda life=life: Warmth(half_life=life)) for life in HALF_LIVES},  # type: ignore[misc]
    "warmth 900, levels first": Policy(lambda: Warmth(half_life=900), by_level=True),
    "warmth 900, what is colder does not come in (now)": Policy(lambda: Warmth(half_life=900), admits=True),
    "the same, no more than is needed at a time": Policy(lambda: Warmth(half_life=900), admits=True, spare=0.0),
}


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--zipf", type=float, default=1.0)
    given = parser.parse_args()
    traces = [make_trace(seed, given.zipf) for seed in range(given.seeds)]
    print("bytes fetched, of those asked / chunks here whole / here at the coarsest level\n")
    table(lambda policy, budget: [play(*trace, budget * total(trace[0]), policy, FILL) for trace in traces])
    print("\nthe 500 questions after the change\n")
    half = LENGTH // 2
    table(
        lambda policy, budget: [
            play(sizes, asked[: half + 500], budget * total(sizes), policy, half) for sizes, asked in traces
        ]
    )
    print("\nfilled from a journal of the first half, no change of interest\n")
    calm = [make_trace(seed, given.zipf, change=0.0) for seed in range(given.seeds)]
    print("| | " + " | ".join(f"{share:.0%}" for share in BUDGETS) + " |\n| --- |" + " --- |" * len(BUDGETS))
    for name, by_level in (("whole chunks, most asked first", False), ("coarsest level of all first", True)):
        print(
            f"| {name} |", " | ".join(shown([filled(*one, share, by_level) for one in calm]) for share in BUDGETS), "|"
        )


def make_trace(seed: int, zipf: float, change: float = 0.5) -> tuple[list[float], list[Question]]:
    """Sizes of chunks, and which of them each question asks for."""
    draw = random.Random(seed)
    sizes = [1.0 if draw.random() < 0.8 else draw.uniform(0.1, 1.0) for _ in range(CHUNKS)]
    order = draw.sample(range(CHUNKS), CHUNKS)
    popular = [1 / (rank + 1) ** 0.6 for rank in range(CHUNKS)]
    different = [tuple(dict.fromkeys(draw.choices(order, popular, k=3 * EACH)))[:EACH] for _ in range(DIFFERENT)]
    weights = [1 / (rank + 1) ** zipf for rank in range(DIFFERENT)]
    ranked, asked = draw.sample(range(DIFFERENT), DIFFERENT), list[Question]()
    for at in range(LENGTH):
        if at == LENGTH // 2:
            places = draw.sample(range(DIFFERENT), int(change * DIFFERENT))
            moved = [ranked[place] for place in draw.sample(places, len(places))]
            for place, question in zip(places, moved, strict=True):
                ranked[place] = question
        stray = draw.random() < 0.1
        asked.append(draw.sample(range(CHUNKS), EACH) if stray else different[draw.choices(ranked, weights)[0]])
    return sizes, asked


def total(sizes: list[float]) -> float:
    """Bytes of a tier."""
    return sum(sizes) * sum(LEVELS.values())


def table(run: Callable[[Policy, float], list[Tally]]) -> None:
    """A row for each policy."""
    print("| | " + " | ".join(f"{share:.0%}" for share in BUDGETS) + " |\n| --- |" + " --- |" * len(BUDGETS))
    for name, policy in POLICIES.items():
        print(f"| {name} |", " | ".join(shown(run(policy, share)) for share in BUDGETS), "|", flush=True)


def shown(tallies: list[Tally]) -> str:
    """Means over traces."""
    return " / ".join(f"{mean(getattr(tally, name) for tally in tallies):.2f}" for name in Tally.__slots__)


def filled(sizes: list[float], asked: list[Question], share: float, by_level: bool) -> Tally:
    """Fill a store by what the first half asked most, and ask the second half, nothing coming in."""
    journal = Counter(chunk for question in asked[: LENGTH // 2] for chunk in question)
    room, held = share * total(sizes), {chunk: set[str]() for chunk in range(CHUNKS)}
    for levels in [[level] for level in LEVELS] if by_level else [[*LEVELS]]:
        for chunk, _ in journal.most_common():
            need = sizes[chunk] * sum(LEVELS[level] for level in levels)
            if need <= room:
                room -= need
                held[chunk].update(levels)
    here = [(chunk, sum(LEVELS[level] for level in held[chunk])) for one in asked[LENGTH // 2 :] for chunk in one]
    needed, whole = sum(sizes[chunk] for chunk, _ in here), sum(LEVELS.values())
    return Tally(
        1 - sum(sizes[chunk] * bits for chunk, bits in here) / needed / whole,
        mean(bits > whole - 1e-9 for _, bits in here),
        mean("4" in held[chunk] for chunk, _ in here),
    )


if __name__ == "__main__":
    main()
