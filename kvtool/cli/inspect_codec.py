"""`kvtool inspect codec`: what each level costs and loses."""

from __future__ import annotations

from typing import Any

from kvtool.cli.inspect_subject import Subject, retrieval_of
from kvtool.cli.options import Run
from kvtool.cli.sessions import open_session
from kvtool.cli.spark import sparkline
from kvtool.core.errors import UsageError


def codec(run: Run, store: Any, about: Subject, names: list[str]) -> None:
    """Answer the questions from each level's records, tell what that loses, and write the page."""
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import read_batch
    from kvtool.core.session.levels import ProfileShelf
    from kvtool.lab.charts.codec import HEAD, codec_rows, codec_sections
    from kvtool.lab.measure.codec import chosen_schemes, codec_report

    if about.batch is None:
        raise UsageError("inspect codec needs questions", "--batch FILE.jsonl, as for `kvtool query`")
    requests = read_batch(about.batch)[: about.limit]
    session = open_session(run, store)
    wanted = chosen_schemes(names, ProfileShelf(store).current(), len(session.decoder.layers))
    options = QueryOptions(**retrieval_of(run), fusion="reuse")
    with run.out.progress("questions", total=len(requests), unit="questions") as bar:
        value = codec_report(session, requests, options, wanted, bar.advance)
    identity = session.identity
    resolved = {"model": identity.model, "device": session.decoder.device, "dtype": identity.dtype}
    facts: dict[str, object] = {"model": session.identity.model, "questions": len(requests)}
    about.write_page(run, "Codec levels", facts, codec_sections(value))

    def show() -> None:
        run.out.table(HEAD, codec_rows(value))
        for row in value["schemes"]:
            errors = [[layer[side] for layer in row["layers"]] for side in ("k_relative_error", "v_relative_error")]
            run.out.print(
                f"error by layer, {row['scheme']:<8} keys {sparkline(errors[0])} up to {max(errors[0]):.1%}"
                f"   values {sparkline(errors[1])} up to {max(errors[1]):.1%}"
            )
        if "f1" in value["exact"]:
            run.out.print(f"F1 from exact records: {value['exact']['f1']:.3f}, {value['questions']} questions")

    run.out.result({"resolved": resolved} | value, human=show)
