"""The laws of split: cover, limit, whole, visible, deterministic, stable."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtool.core.corpus.outline import units
from kvtool.core.corpus.split import METHODS, CountTokens, SplitSettings, split
from kvtool.core.errors import UsageError


def by_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def by_bytes(texts: Sequence[str]) -> list[int]:
    return [len(text.encode()) // 3 for text in texts]


def by_quarters(texts: Sequence[str]) -> list[int]:
    """One more than the parts have together: the counter that adds up worst."""
    return [len(text) // 4 + 1 for text in texts]


COUNTERS: list[CountTokens] = [by_words, by_bytes, by_quarters]
KINDS = ["text", "markdown", "html", "code"]

_STRUCTURE = (
    *("\n", "\n\n", "\r\n", " ", "  \n \n", "# Head\n", "## Sub\n\n", "```\n", "| a | b |\n", "- item\n", ". "),
    *(
        *("다. ", "。", "Title\n=====\n", "    x = 1\n", "}\n", "한국어 문장이다.", "👩\u200d👩\u200d👧\u200d👦"),
        "e\u0301" * 3,
    ),
    *("\u200b", "\x1c", "\t", "…" * 9),
)
_texts = st.lists(
    st.one_of(st.sampled_from(_STRUCTURE), st.text(max_size=40), st.from_regex(r"\A[a-z]{1,9} ?\Z")), max_size=60
).map("".join)


def chunks(text: str, setting: SplitSettings, counter: CountTokens, kind: str = "text") -> list[str]:
    return [text[span.start : span.end] for span in split(text, setting, counter, kind)]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    text=_texts,
    method=st.sampled_from(sorted(METHODS)),
    most=st.integers(8, 60),
    share=st.integers(0, 4),
    counter=st.sampled_from(COUNTERS),
    kind=st.sampled_from(KINDS),
)
@example("\n\n```\n" + "a b c d e f g h i j\n" * 9, "semantic", 8, 0, by_words, "markdown")
@example("a" + " " * 400 + "b" * 400, "paragraph", 8, 0, by_bytes, "text")
@example("# A\n# B\n# C\n" * 20, "markdown", 8, 4, by_words, "markdown")
def test_laws(text: str, method: str, most: int, share: int, counter: CountTokens, kind: str) -> None:
    setting = SplitSettings(method, most, most * share // 4)
    parts = chunks(text, setting, counter, kind)
    if not text.strip():
        assert parts == []
        return
    assert "".join(parts) == text
    assert all(part.strip() for part in parts)
    assert max(counter([part.strip() for part in parts])) <= most
    if len(text) <= 64 * most:
        assert (len(parts) == 1) == (counter([text.strip()])[0] <= most)
    assert parts == chunks(text, setting, counter, kind)


def prose(rng: random.Random, count: int) -> list[str]:
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(1500)]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(6, 24))).capitalize() + rng.choice(".....!?")

    return [" ".join(sentence() for _ in range(rng.randint(2, 6))) for _ in range(count)]


EDITS: dict[str, tuple[int, int, list[str]]] = {  # a slice of a paragraph's sentences, and what replaces it
    "delete": (0, 1, []),
    "insert": (1, 1, ["A sentence that was not here before stands here now"]),
    "replace": (0, 1, ["Other words take the place of what was said"]),
}


def _edited(paragraphs: list[str], edit: str, rng: random.Random) -> list[str]:
    place = rng.randint(20, 40)
    sentences, (start, stop, new) = paragraphs[place].split(". "), EDITS[edit]
    sentences[start:stop] = new
    return [*paragraphs[:place], ". ".join(sentences) or "Gone", *paragraphs[place + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("method", "mean", "worst"), [("semantic", 2.0, 5), ("markdown", 2.0, 5), ("paragraph", 3.0, 9)]
)
def test_an_edit_changes_few_chunks(method: str, mean: float, worst: int, edit: str) -> None:
    rng = random.Random(7)
    changed = []
    for _ in range(30):
        before = prose(rng, 60)
        after = _edited(before, edit, rng)
        old = set(chunks("\n\n".join(before), SplitSettings(method), by_quarters))
        new = chunks("\n\n".join(after), SplitSettings(method), by_quarters)
        assert len(new) > 20
        changed.append(sum(chunk not in old for chunk in new))
    assert sum(changed) / len(changed) <= mean
    assert max(changed) <= worst


def test_an_edit_in_one_long_line_changes_few_chunks() -> None:
    rng = random.Random(5)
    line = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=40_000))
    old = set(chunks(line, SplitSettings(), by_quarters))
    new = chunks(line[:20_000] + "!" + line[20_000:], SplitSettings(), by_quarters)
    assert sum(chunk not in old for chunk in new) <= 6


def test_chunks_end_at_paragraphs_sentences_and_graphemes() -> None:
    one, two, three = ("word " * count for count in (90, 80, 150))
    text = ". Next ".join([one, one]).strip() + ".\n\n" + two.strip() + ".\n\n" + three.strip() + "."
    parts = chunks(text, SplitSettings(), by_words)
    assert len(parts) == 2
    assert parts[0].endswith(".\n\n")
    assert min(by_words(parts)) >= 150
    lines = "the quick brown fox jumps over the lazy dog and then goes on to do\nsomething else in the next line of"
    text = f"Once {lines} text. " * 6
    parts = chunks(text.strip(), SplitSettings("semantic", 60), by_words)
    assert all(part.rstrip().endswith(".") for part in parts)
    family, flag, accent = "👩‍👩‍👧‍👦", "🇰🇷", "e\u0301"
    text = (family + flag + accent) * 200
    for part in chunks(text, SplitSettings("semantic", 50), by_bytes):
        assert part[0] in (family[0], flag[0], "e")
        assert part.count("\U0001f1f0") == part.count("\U0001f1f7")


def test_sections_fences_and_tables() -> None:
    rng = random.Random(2)
    sections = [f"## Section {i}\n\n" + "\n\n".join(prose(rng, 3)) + "\n\n" for i in range(8)]
    for method in ("semantic", "markdown"):
        parts = chunks("".join(sections), SplitSettings(method), by_words, "markdown")
        starts = [part for part in parts if part.startswith("## ")]
        assert len(starts) == 8
        assert not any(part.rstrip().splitlines()[-1].startswith("#") for part in parts)
    body = "\n\n".join(prose(random.Random(2), 3))
    text = f"Chapter 1\n\n{body}\n\nINTRODUCTION\n\n{body}\n\nTitle\n=====\n\n{body}\n\n제3장 결론\n\n{body}"
    heads = [part.split("\n")[0] for part in chunks(text, SplitSettings(), by_words)]
    assert {"Chapter 1", "INTRODUCTION", "Title", "제3장 결론"} <= set(heads)
    rng = random.Random(4)
    fence = "```python\n" + "".join(f"x{i} = {i}\n\n" for i in range(12)) + "```\n\n"
    table = "| a | b |\n| --- | --- |\n" + "".join(f"| {i} | {i} |\n" for i in range(8)) + "\n"
    text = "\n\n".join([*prose(rng, 3), fence + table, *prose(rng, 3)])
    parts = chunks(text, SplitSettings("markdown", 100), by_words, "markdown")
    assert any(fence.strip() in part for part in parts)
    assert any(table.strip() in part for part in parts)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("오늘은 맑다. 내일은 흐리고 모레는 비가 온다.", "오늘은 맑다. "),
        ("오늘은날씨가매우맑았다.그러나내일은흐리다.", "오늘은날씨가매우맑았다."),
        ("今日はとても良い天気ですね。明日は雨です。", "今日はとても良い天気ですね。"),
        ("He met Dr. Smith of Acme. They talked.", "He met Dr. Smith of Acme. "),
        ("“Is it really so?” She nodded at him.", "“Is it really so?” "),
    ],
)
def test_sentence_ends(text: str, first: str) -> None:
    counter: CountTokens = lambda texts: [len(text) for text in texts]  # noqa: E731
    most = max(len(first), len(text) - len(first))
    assert chunks(text, SplitSettings("semantic", most, 1), counter)[0] == first


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "The lighthouse of Varn Skerry\nThe lighthouse of Varn Skerry was built in 1783 by the engineer Odile\n"
            "Krantz.\nIts lamp burned whale oil until 1861, when the council of the island bought a\n"
            "new one that had cost them ninety silver coins.\n",
            "was built in 1783 by the engineer Odile\nKrantz.",
        ),
        (
            "한빛마을 도서관의 역사\n한빛마을 도서관은 1962년에 서윤아 선생이 세웠다. 도서관 건물은 옛 양조\n"
            "장을 고쳐 지었다.\n도서관 뒤뜰에는 감나무가 세 그루 있었다.\n",
            "도서관 건물은 옛 양조\n장을 고쳐 지었다.",
        ),
    ],
    ids=["english", "korean"],
)
def test_sentences_of_a_pdf_go_over_its_line_ends(text: str, sentence: str) -> None:
    """Its titles and the last lines of its paragraphs are short, and no empty line is around them."""
    found = [text[one.start : one.end].strip() for one in units(text, "text")]
    assert any(one.endswith(sentence) for one in found)
    assert found[0] == text.partition("\n")[0]


@pytest.mark.parametrize("bad", [{"method": "none"}, {"max_tokens": 0}, {"min_tokens": 257}, {"min_tokens": -1}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SplitSettings(**bad)  # type: ignore[arg-type]
