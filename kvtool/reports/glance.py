"""`kvtool inspect`: the store at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.common.json_text import level_rows
from kvtool.core.common.sizes import counted, shown_size
from kvtool.reports.page import Shown
from kvtool.reports.report import Report, ReportContext, ReportResult

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.common.machine import Arithmetic
    from kvtool.core.session.identity import StoreIdentity


def glance(context: ReportContext) -> ReportResult:
    """Show what the store holds, and for which model."""
    from kvtool.core.cache.access_log import read_served
    from kvtool.core.session.identity import MeasuredLosses, known_result
    from kvtool.core.upkeep.inventory import sizes_of

    store, identity = context.store, context.identity
    verdict, served, sizes = known_result(store, identity.fingerprint), read_served(store.path), sizes_of(store)
    lost = {level: {"kl_answer": loss} for level, loss in MeasuredLosses(store).at_most().items()}
    value: dict[str, Any] = {
        "path": str(store.path),
        **sizes,
        "levels": level_rows({level: row | lost.get(level, {}) for level, row in sizes["levels"].items()}),
        "model": identity.model,
        "dtype": identity.dtype,
        "computed_by": computed_by(store, identity),
        "fingerprint": identity.fingerprint,
        "system": identity.system,
        "lead_in": identity.lead_in.mode,
        "lead_in_tokens": len(identity.lead_in.ids),
        "gate": None if verdict is None else verdict.to_json(),
        "usage": served._asdict() | {"hit_rate": served.hit_rate},
    }
    return ReportResult("Store", value, [*_summary(value)])


def computed_by(store: Store, identity: StoreIdentity) -> list[dict[str, Any]]:
    made: Mapping[Arithmetic | None, int] = Counter(info.arithmetic for info in store.stretches().values())
    made = made or store.arithmetics(chunk for chunk in store.chunk_ids() if chunk != identity.prefix_id)
    counts = sorted(made.items(), key=lambda item: (-item[1], str(item[0])))
    return [
        {"dtype": None if by is None else by.dtype, "device": None if by is None else by.device, "chunks": count}
        for by, count in counts
    ]


def makers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['chunks']:,} in {row['dtype']} on {row['device']}" for row in rows if row["dtype"]]


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    beginning, verdict = value["prefix"] or {"tokens": 0, "levels": []}, value["gate"]
    gate = "not run yet" if verdict is None else "passed" if verdict["passed"] else "FAILED"
    yield f"store    {value['path']}"
    made = makers(value["computed_by"])
    computed = f"; computed {', '.join(made)}" if made else ""
    yield f"model    {value['model']}, kept in {value['dtype']}{computed}; gate {gate}"
    yield f"system   {value['system']}"
    yield f"lead-in  {value['lead_in']}, {value['lead_in_tokens']} tokens"
    documents, chunks = (counted(value[f"{what}s"], what) for what in ("document", "chunk"))
    yield f"content  {documents}, {chunks}; KV of {value['tokens']:,} tokens"
    if value["prefix"]:
        yield f"start    the prompt's own beginning: {beginning['tokens']} tokens, one chunk more"
    of_beginning = {row["level"] for row in beginning["levels"]}
    for row in value["levels"]:
        lost = f", {row['kl_answer']:.4f} nats a token lost at most" if "kl_answer" in row else ""
        first = row["level"] in of_beginning
        what = f"{counted(row['chunks'] - first, 'chunk')}{' and the beginning' if first else ''}"
        yield f"level    {row['level']}: {what}, {row['bytes'] / 1e6:,.1f} MB{lost}"
    if (kept := value["checkpoints"])["count"]:
        what = counted(kept["count"], "state checkpoint")
        yield f"prompts  {what} of answered prompts, {kept['bytes'] / 1e6:,.1f} MB"
    if (kept := value["unfinished"])["files"]:
        what = f"{counted(kept['files'], 'file')} begun and not finished: {counted(kept['chunks'], 'chunk')}"
        yield f"half     {what}, {kept['bytes'] / 1e6:,.1f} MB; the next ingest continues from there"
    served = value["usage"]
    if served["hit_rate"] is not None:
        asked = served["hits"] + served["misses"]
        questions = counted(served["questions"], "question")
        yield f"served   {questions}; found {served['hit_rate']:.1%} of {counted(asked, 'chunk')}"
    budget = "" if value["budget"] is None else f" of a budget of {shown_size(value['budget'])}"
    yield f"disk     {shown_size(value['folder_bytes'])} used{budget}; {shown_size(value['disk_free'])} free"


REPORT = Report(glance)
