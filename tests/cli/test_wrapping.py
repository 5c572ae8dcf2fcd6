"""Lines of an answer break between words, in whatever pieces it arrives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from rich.cells import cell_len

from kvtool.cli.terminal import WordWrap, render_quote, wrapped

ENGLISH = "The observatory at Kellhaven was founded by Ilse Varnholt, who owned the hill outright."
KOREAN = "별머리 천문대는 여울진시 북쪽 한밝고개 꼭대기에 있다. 이 천문대를 세운 사람은 송라윤으로, 그는 쌀을 팔았다."
CHINESE = "天文台建于一八八七年，由当地居民出资（每户一斗米）。第一台望远镜用了二十七年。"
URL = "https://example.org/" + "a-long-path/" * 8


def pieces(text: str, seed: int) -> Iterator[str]:
    rng, at = random.Random(seed), 0
    while at < len(text):
        length = rng.randint(1, 6)
        yield text[at : at + length]
        at += length


def streamed(text: str, columns: int, seed: int) -> str:
    wrap = WordWrap()
    return "".join(wrap.take(piece, columns) for piece in pieces(text, seed)) + wrap.rest(columns)


@pytest.mark.parametrize("columns", [20, 37, 80])
@pytest.mark.parametrize("text", [ENGLISH, KOREAN])
def test_no_word_is_broken_and_no_line_is_too_long(text: str, columns: int) -> None:
    for seed in range(20):
        lines = [line.rstrip() for line in streamed(text, columns, seed).split("\n")]
        assert max(map(cell_len, lines)) <= columns
        assert " ".join(lines) == text
        for line, after in pairwise(lines):  # each line has as much as fits
            assert cell_len(f"{line} {after.split(' ')[0]}") > columns


def test_text_without_blanks_breaks_anywhere_but_at_its_marks() -> None:
    lines = streamed(CHINESE, 20, 3).split("\n")
    assert "".join(lines) == CHINESE
    assert all(16 <= cell_len(line) <= 20 for line in lines[:-1])
    assert not any(line[0] in "，。）" or line[-1] == "（" for line in lines)


def test_a_word_longer_than_a_line_is_left_in_one_piece() -> None:
    for seed in range(20):
        assert streamed(f"See {URL} for more.", 30, seed).split() == f"See {URL} for more.".split()
        assert URL in streamed(f"See {URL} for more.", 30, seed)


def test_what_is_shown_waits_for_one_word_at_most() -> None:
    wrap = WordWrap()
    assert wrap.take("one tw", 20) == "one "
    assert wrap.take("o", 20) == ""
    assert wrap.take(" ", 20) == "two "
    assert wrap.take("x" * 22, 20) == "x" * 22  # it cannot fit: nothing is gained by waiting
    assert wrap.take("yy" * 5, 20) == "yy" * 5
    assert wrap.take(" z", 20) == ""
    assert wrap.rest(20) == "\nz"


def test_a_line_that_is_full_to_the_edge() -> None:
    assert wrapped("12345 789 next", 9) == "12345 789\nnext"
    assert wrapped(f"123456789 {'u' * 12}", 9) == f"123456789\n{'u' * 12}"
    assert wrapped("123456789 \nnext", 9) == "123456789\nnext"


@pytest.mark.parametrize(
    "text", [ENGLISH, KOREAN, CHINESE, f"{URL} {KOREAN}", "    indented    a b c d e f g  " + "x" * 30]
)
def test_a_passage_breaks_between_words_whatever_is_marked_in_it(text: str) -> None:
    for seed in range(20):
        for columns in (4, 20, 33):
            marked = [(piece, "<{}>") for piece in pieces(text, seed)]
            lines = [line[2:] for line in render_quote(marked, columns).replace("<", "").replace(">", "").splitlines()]
            assert "".join("".join(lines).split()) == "".join(text.split())
            assert all(cell_len(line) <= columns - 2 for line in lines)
            words = {word for word in text.split() if 2 * len(word) <= columns - 2}  # a letter may take two cells
            assert words <= {word for line in lines for word in line.split()}


def test_lines_of_the_text_and_of_code_are_its_own() -> None:
    code = "```python\n    if something_long and something_else and more:\n        pass\n```"
    text = f"1. one\n\n   - two\n{code}\nand then as before, on"
    assert wrapped(text, 16) == f"1. one\n\n   - two\n{code}\nand then as \nbefore, on"
    assert wrapped(text, None) == text
