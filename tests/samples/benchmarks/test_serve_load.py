"""The load test of the server: it distinguishes a wrong answer from the expected one, and an error from an answer."""

from __future__ import annotations

from samples.benchmarks import serve_load
from tests.serve.conftest import KEY, Served, built, ready, served, tiny

__all__ = ["built", "ready", "served", "tiny"]


def test_clients_are_measured_and_their_answers_compared(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    asked = ["Who built the third mill?", "Who built the first mill?"]
    alone = serve_load.measure((host, int(port), KEY), 1, [asked])
    expected = {one.question: one.text for one in alone.told}
    together = serve_load.measure((host, int(port), KEY), 3, [asked, asked[::-1], [*asked, ""]])
    assert len(together.told) == 6
    assert [error.startswith("RuntimeError: 400") for error in together.errors] == [True]
    cells = together.row(3, expected).split(" | ")
    assert cells[:4] == ["| 3", "7", "1", "0"]
    assert together.row(3, expected | {asked[0]: "another"}).split(" | ")[3] == "3"
    assert all(0 < one.first <= one.whole and one.tokens == 8 for one in together.told)
