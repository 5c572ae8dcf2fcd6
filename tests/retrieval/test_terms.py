"""Search terms of any script."""

from __future__ import annotations

import unicodedata

import pytest

from kvtool.core.retrieval.terms import terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The mill was founded in 1874.", ["mill", "found", "1874"]),
        ("Founding, founded; FOUNDS", ["found", "found", "found"]),
        ("mills on rivers", ["mill", "river"]),
        ("it is red", ["red"]),  # short words keep their endings
        ("state-of-the-art", ["state", "art"]),
        ("snake_case x2", ["snake_case", "x2"]),
        ("", []),
        (" \t\n—!?", []),
        ("who was she", []),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("ﬁnal １８７４", ["final", "1874"]),  # compatibility forms
        ("Ελλάδα Москва", ["ελλάδα", "москва"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("방앗간", ["방앗", "앗간"]),
        ("방앗간은 누가", ["방앗", "앗간", "간은", "누가"]),
        ("강", ["강"]),
        ("1874년에", ["1874", "년에"]),
        ("KV캐시는 GPU에", ["kv", "캐시", "시는", "gpu", "에"]),
        ("東京都", ["東京", "京都"]),
        ("カタカナ", ["カタ", "タカ", "カナ"]),
        ("我喜欢 tea", ["我喜", "喜欢", "tea"]),
    ],
)
def test_pairs_of_unspaced_scripts(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize("particle", ["은", "이", "을", "에서", "으로", "의"])
def test_korean_particles_do_not_hide_a_noun(particle: str) -> None:
    assert set(terms("방앗간")) <= set(terms("방앗간" + particle))


@pytest.mark.parametrize("text", ["방앗간은 1874년에", "Café Zürich", "がぎぐ", "Việt Nam"])
def test_composed_and_decomposed_are_alike(text: str) -> None:
    composed, decomposed = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
    assert composed != decomposed
    assert terms(composed) == terms(decomposed)
    assert terms(composed)
