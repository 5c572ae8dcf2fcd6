"""Show an answer on a terminal: its numbers, its sources, and what was recomputed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.cli.out import Out
from kvtool.cli.terminal import clean
from kvtool.core.common.marks import Place, as_named_here
from kvtool.core.common.text import counted
from kvtool.core.query.reply import NO_KV, marked

if TYPE_CHECKING:
    from kvtool.core.query.reply import ChunkSpans, Reply, ReplyChunk

Facts = Mapping[str, Any]  # of a reply, as its JSON has them
_MISLEADING = re.compile(r'"|,\s|\s\((?:from|changed|gone)\b')  # separators of places, and remarks after one
_SINCE = {"changed": " (changed since ingest)", "deleted": " (gone since ingest)"}


def show_sources(out: Out, chunks: Sequence[ReplyChunk], passages: bool = False) -> None:
    """Show the sources of an answer, the best first; with `passages` their text. With -v both, and also the chunks in
    the order of the prompt."""
    if not passages:
        out.status(source_line(chunks))
    for chunk in _best_first(chunks) if passages or out.verbosity > 0 else ():
        out.status(f"source: {cited(chunk)}")
        out.passage([(chunk.text.strip() + "\n", 0)])
    for chunk in chunks:
        out.detail(f"  {chunk.status:5} {chunk.tokens:5} tokens  {cited(chunk)}")


def end_answer(out: Out, facts: Facts) -> None:
    """End an answer that was shown as it came, with its correction if it is verified; one that was not is shown now,
    with the sentences that it cites."""
    citations, verified, text = facts.get("citations"), facts.get("verified"), facts["answer"]
    if citations is not None:
        out.prose(marked(text, citations))
        for one in {each["number"]: each for each in citations}.values():
            place = Place(one["line"], one["label"]).cite(as_named_here(one["source"]))
            out.prose(f"[{one['number']}] {_unmistakable(place)}: {one['text']}")
    elif text and (out.on_terminal or not verified):
        out.end_line()
    else:
        out.print(text)
    if citations is None and verified and verified["corrected"] and out.on_terminal:
        out.print("\ncorrected:")
        out.prose(text)


def source_line(chunks: Sequence[ReplyChunk]) -> str:
    return "sources: " + (", ".join(dict.fromkeys(map(cited, _best_first(chunks)))) or "what was said before")


def _best_first(chunks: Sequence[ReplyChunk]) -> list[ReplyChunk]:
    return sorted(chunks, key=lambda chunk: -(chunk.score or 0))


def cited(chunk: ReplyChunk) -> str:
    """Return the place of a chunk on one line, relative to the working folder if it is below it, and whether its file
    has changed. No name of a file or an origin can look like several places."""
    made_by = f" (from {_unmistakable(chunk.origin)})" if chunk.origin else ""
    return _unmistakable(chunk.cite(as_named_here(chunk.source))) + made_by + _SINCE.get(chunk.staleness, "")


def _unmistakable(name: str) -> str:
    name = name.replace("\n", "\\n")
    return json.dumps(name, ensure_ascii=False) if _MISLEADING.search(clean(name)) else name


_COLOURS = {"deviation": 33, "link token": 36, "question attention": 35, "hole": 31, "dropped": 90}
_OTHER = 34


def show_explained(out: Out, reply: Reply) -> None:
    """Each chunk's text with what was recomputed of it in a colour, or in brackets, under a line that says why."""
    for chunk, runs in zip(reply.chunks, reply.explanations, strict=True):
        out.status(f"{cited(chunk)}: {_counts(runs, chunk.tokens)}")
        out.passage((span.text, _COLOURS.get(span.reason, _OTHER) if span.reason else 0) for span in runs.spans)
    shifted = reply.fused.shifted
    if count := int(shifted.rows.sum()):
        out.status(
            f"shifted {count} reused tokens by {shifted.size:.0%} of the mean change of the recomputed ones, "
            f"of which {shifted.common:.0%} is common to a chunk"
        )
    if forward := reply.resolved.get("forward"):
        out.status(f"layers: {forward}")


def _counts(runs: ChunkSpans, tokens: int) -> str:
    why = ", ".join(f"{count} for {reason}" for reason, count in runs.recomputed.items())
    gone = f", {runs.dropped} not there" if runs.dropped else ""
    return f"{sum(runs.recomputed.values())} of {tokens} tokens recomputed" + (f" ({why})" if why else "") + gone


def show_verified(out: Out, facts: Facts) -> None:
    if not (verified := facts.get("verified")):
        return
    times = verified["timing_ms"]
    after = f"{times['final'] / 1e3:.2f} s after the question, {times['first'] / 1e3:.2f} s of them to the first token"
    if not times["prefill"]:
        out.status(f"verified: nothing to do, {facts['fusion']} computes as full prefill does")
    elif verified["corrected"]:
        accepted = f"{verified['accepted']} of {counted(verified['drafted'], 'token')}"
        out.status(f"verified: full prefill accepts {accepted} and goes on otherwise; {after}")
    else:
        out.status(f"verified: full prefill gives the same answer; {after}")


def show_numbers(out: Out, facts: Facts, steps: int, stepper: str) -> None:
    show_end(out, facts)
    show_verified(out, facts)
    show_decision(out, facts)
    _show_rounds(out, facts)
    tokens, timing = facts["tokens"], facts["timing_ms"]
    new = facts.get("reasons", {}).get(NO_KV, 0)
    out.status(
        f"{facts['fusion']}: first token after {timing['ttft']:.0f} ms; {tokens['prompt']} prompt tokens: "
        f"{tokens['reused']} reused, {tokens['recomputed']} recomputed, {tokens['fresh']} fresh"
        + (f" ({new} of them had no KV yet)" if new else "")
        + (f"; {tokens['dropped']} more are not stored" if tokens["dropped"] else "")
    )
    if cut := facts.get("chunks_omitted"):
        say = out.status if "shift" in facts else out.detail
        say(f"{counted(cut, 'further chunk')} found, and cut: scores far below the best (search.min_score)")
    if forward := facts.get("resolved", {}).get("forward"):
        out.detail(f"layers: {forward}")
    out.detail(f"{steps} more tokens in {timing['generate']:.0f} ms ({stepper})")
    _show_stream(out, facts)


def show_corrections(out: Out, corrections: Sequence[Mapping[str, str]]) -> None:
    for one in corrections:
        out.status(f"searched for {one['to']} (no chunk has {one['from']!r})")


def show_end(out: Out, facts: Facts) -> None:
    """Say which words were corrected, and that an answer was not ended by the model, since its text may not show it."""
    show_corrections(out, facts.get("corrections", ()))
    if facts["finish"] == "length":
        out.status(f"… cut at {counted(facts['tokens']['generated'], 'token')}: --max-tokens allows more")
    elif facts["finish"] == "repeat":
        out.status("… ended where the answer repeats itself: --set sampling.stop_repeats=no lets it go on")


def show_decision(out: Out, facts: Facts) -> None:
    if not (chosen := facts.get("controller")):
        return
    ratio = "" if chosen["ratio"] is None else f" at {chosen['ratio']:.1%}"
    level = "" if chosen["level"] is None else f" from level {chosen['level']}"
    fusion = facts["fusion"]
    out.status(f"auto: {fusion}{ratio}{level}, expected after {chosen['expected_ms'][fusion]:.0f} ms")
    out.detail("  expected: " + ", ".join(f"{mode} {ms:.0f} ms" for mode, ms in chosen["expected_ms"].items()))


def _show_rounds(out: Out, facts: Facts) -> None:
    for number, one in enumerate(facts.get("rounds", ()), 1):
        loaded = f"{counted(len(one['chunks']), 'chunk')}, {one['bytes_read'] / 1e6:.1f} MB"
        out.status(f"round {number}: {loaded}; {one['reason']}")
    if left := facts.get("chunks_remaining"):
        out.status(f"{counted(left, 'chunk')} not loaded")


def _show_stream(out: Out, facts: Facts) -> None:
    if not (slo := facts.get("slo")):
        return
    out.status(f"objective: {slo['slo_ms']:.0f} ms, {'met' if slo['met'] else 'missed'}")
    say = out.status if "shift" in facts else out.detail
    for row in facts["stream"]:
        rates = ", ".join(
            f"{what} {row[name]:.1f} Mbit/s"
            for what, name in (("expected", "estimated_mbps"), ("measured", "measured_mbps"))
            if row[name] is not None
        )
        level = "text" if row["level"] is None else f"level {row['level']}"
        say(f"  {row['chunk'][:12]} {level}: {row['decision']}{' (' + rates + ')' if rates else ''}")


def show_runs(out: Out, replies: Sequence[Reply], title: str) -> None:
    full = replies[0].timing_ms["ttft"]
    rows = [
        (
            _mode(reply),
            f"{reply.comparison['kl_first']:.3f}",
            f"{reply.comparison['kl_answer']:.3f}",
            reply.tokens["reused"],
            reply.tokens["recomputed"],
            reply.tokens["fresh"],
            f"{reply.timing_ms['ttft']:.0f}",
            f"{full / reply.timing_ms['ttft']:.1f}x",
        )
        for reply in replies
    ]
    columns = ("mode", "KL first", "KL answer", "reused", "recomputed", "fresh", "TTFT ms", "speedup")
    out.table(columns, rows, title=title)
    for number, reply in enumerate(replies):
        same = number and reply.answer == replies[0].answer
        cut = "" if reply.finish == "stop" else " …"
        out.prose(f"{_mode(reply)}: {f'as {_mode(replies[0])}' if same else reply.answer + cut}")


def _mode(reply: Reply) -> str:
    return reply.fusion if reply.asked_mode == reply.fusion else f"{reply.asked_mode} ({reply.fusion})"
