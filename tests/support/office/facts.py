"""Documents about things that do not exist: a few paragraphs each, of which one holds the answer to a question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_THINGS = (
    *("Ardenfold Viaduct", "Brimsey Quarry", "Calloway Orrery", "Dunsmere Lock", "Eskerby Granary", "Farrow Pumphouse"),
    *("Gilderstone Dome", "Hathern Ropewalk", "Inverlay Weir", "Jessamy Foundry", "Kettlewick Kiln", "Larkspur Depot"),
    *("Millbrack Tower", "Nettlecombe Mint", "Oxmarsh Causeway", "Penhallam Vault", "Quenby Signalbox"),
    *("Rushcliffe Cistern", "Saltern Beacon", "Thornaby Archive", "Ullswick Jetty", "Vellacott Press"),
)
_BUILDERS = (
    *("Odile Farnsworth", "Bram Tessing", "Corisande Vole", "Dietmar Pask", "Elswyth Orne", "Fabian Luckhurst"),
    *("Greta Sandoval", "Hollis Quint", "Isaura Menke", "Jorin Blaauw", "Katya Wrexham", "Lucan Dray"),
    *("Mirela Stroud", "Nestor Plimsoll", "Ottoline Baird", "Percival Yoon", "Questa Halloran"),
    *("Rufus Ellingsen", "Saskia Thorn", "Tobin Ashdown", "Una Kestrel", "Viggo Marsh"),
)
_KOREAN_THINGS = (
    *("가람둑", "노을창고", "다래교", "라온종탑", "마루풍차", "바람등대", "사리나루", "아침제방", "자운극장"),
    *("차돌채석장", "카람우물", "타래방직소", "파란수문", "하늘온실", "고운활터", "나린서고", "두레염전"),
    *("미르광장", "보름양조장", "소담약방", "여울정거장", "지평천문대"),
)
_KOREAN_BUILDERS = (
    *("곽도윤", "남궁서린", "도하람", "류정안", "마연수", "방시우", "사공은호", "안해든", "장로아"),
    *("차이현", "태무결", "표나래", "하윤슬", "강다온", "고은찬", "나예솔", "명주원"),
    *("민가온", "변라희", "선우별", "여하준", "진소율"),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A document to write: its title, its paragraphs, and which of them (from 0) answers the question."""

    lang: str
    title: str
    paragraphs: tuple[str, ...]
    gold: int
    question: str
    answer: str


def facts(lang: str) -> Iterator[Fact]:
    """All documents of a language, in one order."""
    if lang == "ko":
        for number, (thing, builder) in enumerate(zip(_KOREAN_THINGS, _KOREAN_BUILDERS, strict=True)):
            yield _korean(thing, builder, 1803 + 7 * number)
    else:
        for number, (thing, builder) in enumerate(zip(_THINGS, _BUILDERS, strict=True)):
            yield _english(thing, builder, 1711 + 9 * number)


def _english(thing: str, builder: str, year: int) -> Fact:
    paragraphs = (
        f"This file is about the {thing}. Visitors come from the valley on market days and leave before the rain.",
        "The road to it is steep, and carts are left at the gate. Nobody remembers who paid for the gate.",
        "A committee of nine meets in the upper room. Its minutes are kept in a blue ledger with brass corners.",
        f"The {thing} was built in {year} by {builder}, who had learned the trade on the northern canals.",
        "Repairs are due every spring. Lime and oak are brought by barge and carried up by hand.",
    )
    return Fact("en", thing, paragraphs, 3, f"Who built the {thing}?", builder)


def _korean(thing: str, builder: str, year: int) -> Fact:
    paragraphs = (
        f"이 글은 {thing}에 관한 기록이다. 장날이면 골짜기 사람들이 찾아왔다가 비가 오기 전에 돌아간다.",
        "그곳으로 가는 길은 가파르고 수레는 문 앞에 세워 둔다. 그 문을 누가 세웠는지는 아무도 모른다.",
        "아홉 사람의 모임이 위층 방에서 열린다. 회의록은 놋쇠 모서리가 달린 푸른 장부에 적는다.",
        f"{thing}은(는) {year}년에 {builder}이(가) 지었다. 그는 북쪽 운하에서 일을 배운 사람이었다.",
        "봄마다 손질을 한다. 석회와 참나무를 배로 실어 와서 손으로 나른다.",
    )
    return Fact("ko", thing, paragraphs, 3, f"{thing}은 누가 지었는가?", builder)
