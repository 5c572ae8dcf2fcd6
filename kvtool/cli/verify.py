"""`kvtool store verify|repair`: whether a store is sound, and what is to be done where it is not."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.cli.text import one_line
from kvtool.core.cache.options import LockOptions, StoreOptions, VerifyOptions
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_DAMAGED, KvtoolError

if TYPE_CHECKING:
    from kvtool.core.cache.damage import Damage
    from kvtool.core.cache.store import Store


@takes(VerifyOptions, StoreOptions, examples=("store verify", "store verify --sample 1/7"))
def verify(run: Run) -> int | None:
    """Check every digest and every reference."""
    options = run.get(VerifyOptions)
    return _verify(run, options.repair, Fraction(options.sample) if options.sample is not None else None)


@takes(StoreOptions, LockOptions, examples=("store repair", "store repair --store ./kv"))
def repair(run: Run) -> int | None:
    """Drop what is damaged; it is computed again. The same as `verify --repair`."""
    return _verify(run, True, None)


def _texts(run: Run, store: Store, sample: Fraction | None) -> tuple[int | None, list[Damage]]:
    """Compare documents with what was computed of them: how many, None where the model's tokenizer is not here."""
    from kvtool.core.upkeep.texts import compare_texts, stored_tokenizer

    try:
        if not store.manifest():
            return 0, []
        return compare_texts(store, stored_tokenizer(store), sample or Fraction(1))
    except KvtoolError as error:
        run.out.warning(f"texts were not compared with their chunks: {error.message}", error.hint)
        return None, []


def _verify(run: Run, repairs: bool, sample: Fraction | None) -> int | None:
    from kvtool.core.cache.store import Store
    from kvtool.core.cache.verify import verify as check

    with Store.open(run.folder) as store:
        texts, others = _texts(run, store, sample)
        damaged = check(store, sample) + others
        left, repaired = damaged, 0
        if damaged and repairs:
            with store.writer(run.lock_wait) as writer:
                repaired = writer.repair(damaged)
            left = check(store, sample)
        sizes, concerns = store.stats(), store.concerns()
    for concern in concerns:
        run.out.warning(concern)
    rows = [{"kind": d.kind, "chunk": d.chunk, "level": d.level, "layer": d.layer, "reason": d.reason} for d in damaged]
    value = {"records": sizes["records"], "bytes": sizes["bytes"], "damaged": rows, "repaired": repaired}
    value["texts"] = texts
    if sample is not None:  # the counts above are the store's; of its KV only this part was read
        value["sample"] = str(sample)

    def show() -> None:
        for row in rows:
            where = f"{row['chunk']} {row['level']} layer {row['layer']}: " if row["chunk"] else ""
            run.out.print(one_line(f"damaged: {where}{row['reason']}"))
        if rows or run.out.verbosity >= 0:
            part = "" if sample is None else f", the KV of {sample} of them checked"
            dropped = f", {counted(repaired, 'entry', 'entries')} dropped" if repaired else ""
            run.out.print(f"{counted(sizes['records'], 'record')}{part}; {len(rows)} damaged{dropped}")

    run.out.result(value, human=show)
    return EXIT_DAMAGED if left else None
