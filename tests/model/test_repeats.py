"""Answers that repeat themselves end there; lists, tables, code, numbers and refrains go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtool.core.model.tokens import TextStream, encode
from tests.fusion.making import tokenizer

BELL = "The bell was cast in 1884, and it hangs in the tower of Corvane."
PROUD = "They are proud of their place in the world"
KOREAN = "천문대는 언덕 위에 서 있으며 해마다 많은 사람이 그곳을 찾아옵니다."
JAPANESE = "天文台は丘の上に立っていて毎年多くの人がそこを訪れます。"


def streamed(
    text: str | list[int], stops: Sequence[str] = (), stop_repeats: bool = True, ends: frozenset[int] = frozenset()
) -> tuple[TextStream, list[str]]:
    """Say a text, or tokens, token by token, as long as it is not ended."""
    pieces: list[str] = []
    stream = TextStream(tokenizer(), {*ends}, pieces.append, stops, stop_repeats)
    for token in encode(tokenizer(), text) if isinstance(text, str) else text:
        if stream.ended:
            break
        stream.add(token)
    stream.end()
    return stream, pieces


@pytest.mark.parametrize(
    ("begin", "said_again"),
    [
        ("It is old. " + BELL, " " + BELL),
        (BELL, "\n\n" + BELL),
        (f"{BELL} It is rung at noon.", f" {BELL} It is rung at noon."),  # two sentences, after each other
        ("The Harrowdene Bell Foundry", "\n\nThe Harrowdene Bell Foundry"),
        (f"{PROUD}, and {PROUD},", f" and {PROUD},"),
        ("It was 3 weeks, 22 seconds, 1 minute,", " 22 seconds, 1 minute,"),
        (KOREAN, " " + KOREAN),
        (JAPANESE, JAPANESE),
        ("```\nrun()\n```\n" + BELL, " " + BELL),
    ],
)
def test_a_loop_ends_before_it_repeats(begin: str, said_again: str) -> None:
    """Greedy decoding would repeat its last words until `--max-tokens`."""
    stream, pieces = streamed(begin + said_again * 20)
    assert stream.repeated
    assert stream.text.strip() == begin
    assert "".join(pieces) == stream.text  # what was shown is the answer, and nothing of it is taken back
    assert tokenizer().decode(stream.ids).strip() == begin
    assert streamed(begin + said_again * 20, stop_repeats=False)[0].text == begin + said_again * 20


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- a\n- a\n- a\n- a\n- b\n",
        "Yes. Yes. Yes, it does. No. No.",
        "Ha ha ha ha ha ha, ha ha ha, ha ha ha!",
        "1000000000000000000000000000000000000000000000000000000",
        "0, " * 60 + "1",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| | | |\n| | | |\n| | | |\n| | | |\n| | | |\n",
        f"- Anna: {BELL}\n- Berta: {BELL}\n- Clara: {BELL}\n",
        "I went down to the crossroads, fell down on my knees\n" * 2 + "Asked the Lord above for mercy",
        "London Bridge is falling down,\nFalling down, falling down.\nLondon Bridge is falling down,\nMy fair lady.",
        "```python\nclass A:\n    def f(self):\n        raise NotImplementedError\n\n    def g(self):\n"
        "        raise NotImplementedError\n\n    def h(self):\n        raise NotImplementedError\n```\n",
        "```\nPlease wait for the machine.\nPlease wait for the machine.\nDone.\n```",
        "천천히 천천히 천천히 걸어갔다. 그리고 천천히, 아주 천천히 돌아왔다.",
    ],
)
def test_repetition_for_a_reason_goes_on(text: str) -> None:
    stream, pieces = streamed(text)
    assert not stream.repeated
    assert stream.text == text == "".join(pieces)


def test_little_is_held_back() -> None:
    """A reader waits for a word or two where a sentence begins as one did before."""
    pieces: list[str] = []
    stream = TextStream(tokenizer(), set(), pieces.append, stop_repeats=True)
    text = "The mill stands at the river. The mill is old. The bell hangs in the tower. The bell rings at noon."
    held = []
    for token in encode(tokenizer(), text):
        stream.add(token)
        held.append(len(stream.text) - len("".join(pieces)))
    assert max(held) <= len("The mill s")
    assert sum(held) / len(held) < 2
