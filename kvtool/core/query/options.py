"""Options of a question's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import LEVELS, MAX_LOSS, NAMES
from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.fusion.options import FUSION, INSIDE, FusionOptions
from kvtool.core.fusion.selectors import AUTO, MODES, parameters_of_mode
from kvtool.core.model.options import ANSWER, SamplingOptions, system_option
from kvtool.core.options.option import Option, Options, option, options_of
from kvtool.core.retrieval.passages import CHUNKS, RetrievalOptions

if TYPE_CHECKING:
    from kvtool.core.session.identity import StoreIdentity

DEFER, LINK = "Deferred loading", "Shared store and time limits"  # headings in the command's help


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options, sections=("query",)):
    """Options of how stored KV is read."""

    level: str = option(
        "auto",
        "Compression level to read: raw and lossless are exact, 1 loses least.",
        group=FUSION,
        choices=("auto", *LEVELS),
        metavar=f"auto|{NAMES}",
    )
    max_loss: float = option(
        MAX_LOSS,
        "Maximum loss (KL divergence) of --level auto, in nats per token of the answer.",
        parameter="load.max_loss",
        lowest=0,
    )
    state_cache_size: int = option(
        4 * 10**9,
        "Disk space in the store for prompt states of recurrent models; 0 stores none.",
        parameter="load.state_cache_size",
        unit="size",
        lowest=0,
        instead="4GB",
    )
    slo_ms: float | None = option(
        None,
        "Target time to the first token. Decides which chunks a shared store sends, and at which level.",
        group=LINK,
        metavar="MS",
        lowest=1,
    )
    load_timeout: float = option(  # seconds: what no disk takes for a megabyte unless something is wrong with it
        10.0,
        "Maximum time to read one record; after it, the chunk is recomputed.",
        parameter="load.timeout",
        unit="duration",
        lowest=0.001,
    )


@dataclass(frozen=True, kw_only=True)
class QueryOptions(LoadOptions, FusionOptions, RetrievalOptions, SamplingOptions, sections=("query",)):
    """Options of how to answer; `set`, as `NAME=VALUE`, keeps parameters of fusion modes, others go to their fields."""

    system: str | None = system_option(ANSWER)
    verify: bool = option(
        False, "Show the answer at once, then check it by full prefill and correct it where it differs.", group=ANSWER
    )
    cite: bool = option(False, "Cite a sentence of the passages after each sentence of the answer.", group=ANSWER)
    clamp: bool = option(
        False, "Shorten the answer to what is left of the model's context.", group=ANSWER, flag=None, setting=False
    )
    force: bool = option(
        False, "Answer even if this model failed the self-check (`kvtool inspect gate`).", group=ANSWER, setting=False
    )
    audit: float = option(
        0.0,
        "Share of the questions to answer again by full recompute, as a check.",
        group=INSIDE,
        unit="percentage",
        lowest=0,
        highest=1,
    )
    explain: bool = option(False, "Show which tokens were recomputed, and why.", group=INSIDE, setting=False)
    token_ids: bool = option(False, "Add the prompt's token ids to the JSON.", group=INSIDE, setting=False)
    defer: bool = option(False, "Load more chunks only if the model is unsure of the answer.", group=DEFER)
    defer_first: int = option(2, "Number of chunks that --defer loads first.", parameter="defer.first", lowest=1)
    defer_threshold: float = option(
        0.6, "Confidence in the answer at which --defer stops loading.", parameter="defer.threshold", lowest=0
    )  # samples/results/quality.md

    def __post_init__(self) -> None:
        known = options_of(QueryOptions)
        own = {each.parameter: each for each in known.values() if each.parameter}
        of_modes = dict[str, str]()
        for pair in known["set"].accept(self.set, "set"):
            name, _, value = pair.partition("=")
            if (mine := own.get(name)) is not None:
                before = getattr(self, mine.name) if mine.many else ()
                given = mine.parse(value, name)
                object.__setattr__(self, mine.name, (*before, *given) if mine.many else given)
            else:
                of_modes[name] = pair
        object.__setattr__(self, "set", tuple(of_modes.values()))
        super().__post_init__()

    def check_comparable(self) -> None:
        """Refuse what `--compare` cannot do: with `defer` each mode might stop at another prompt, and verified answers
        are the same in every mode."""
        if self.defer:
            raise UsageError("--compare answers from whole prompts", "leave --defer out, or give --no-defer")
        if self.verify:
            raise UsageError(
                "--compare shows answers as each mode gives them", "leave --verify out, or give --no-verify"
            )

    def check_of(self, identity: StoreIdentity, modes: Sequence[str] = ()) -> None:
        """Refuse what a store's model cannot do, before it is loaded; `modes`: in addition to `mode`. Raises
        UsageError."""
        identity.check_modes((self.mode(identity.keeps_states), *modes), self.defer)

    def rounds(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the range of chunks, best first, that each round of `--defer` loads: `defer_first`, then as many as are
        loaded already."""
        start, stop = 0, min(self.defer_first, count)
        yield start, stop
        while stop < count:
            start, stop = stop, min(2 * stop, count)
            yield start, stop

    def is_streamed(self, on_terminal: bool) -> bool:
        """Return whether an answer is shown as it comes: what it cites is known at its end, and a pipe gets the final
        text of a verified one alone."""
        return not self.cite and (on_terminal or not self.verify)

    def check(self) -> None:
        if self.set:
            check_parameters(self.set)
        if self.verify and self.temperature > 0:
            raise UsageError(
                "--verify and --temperature exclude each other: sampled answers differ in any case",
                "leave one out (`--temperature 0` lifts a setting)",
            )
        if self.defer and self.fusion == AUTO:
            raise UsageError(
                "--defer and --fusion auto exclude each other", "name a mode: auto decides for a whole prompt"
            )
        if self.defer and self.slo_ms is not None:
            raise UsageError(
                "--defer and --slo-ms exclude each other",
                "leave one out (`--slo-ms none` lifts a setting): an objective is for a whole prompt",
            )


@dataclass(frozen=True, kw_only=True)
class ChunkChoice(Options, settings=False, group=CHUNKS):
    """Options that name the chunks of a question's prompt; without them, chunks are retrieved."""

    chunks: tuple[str, ...] = option(
        (), "Use these chunks (`kvtool store ls --chunks`) in this order, without search.", metavar="ID|PATH:LINE"
    )
    documents: tuple[str, ...] = option((), "Use all chunks of these documents, without search.", metavar="PATH")

    def check(self) -> None:
        if self.chunks and self.documents:
            raise UsageError("--chunks and --documents exclude each other", "give one of them")


def every_parameter() -> dict[str, Option]:
    """Return all parameters of `--set` by name, without the fields of a mode that have a separate option, such as
    `ratio`."""
    own = options_of(QueryOptions)
    of_modes = [option for mode in MODES for option in parameters_of_mode(mode).values() if option.name not in own]
    return {each.parameter: each for each in (*of_modes, *own.values()) if each.parameter}


def shown_default(parameter: Option) -> str:
    return parameter.default_text or ("" if parameter.many else str(parameter.default))


def check_parameters(pairs: Sequence[str]) -> None:
    known = every_parameter()
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name in known:
            known[name].parse(value, name)
            continue
        listed = f"known: {', '.join(f'{each}={shown_default(option)}' for each, option in known.items())}"
        own = options_of(QueryOptions).get(name.rpartition(".")[2])
        near = f"{own.flag.partition('/')[0]} gives it" if own and own.flag else did_you_mean(name, known)
        raise UsageError(f"there is no parameter {name!r}", "; ".join(filter(None, (near, listed))))
