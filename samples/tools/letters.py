"""Table of letter pairs by which kvtool guesses legacy encodings: write kvtool/core/corpus/readers/letters.txt again.

    pip install chardet==7.7.0 && python samples/tools/letters.py

chardet (0BSD licence) counts the byte pairs of each language in its code pages. Here they become pairs of lower-case
letters, so that one table serves all code pages of a language. A line is a language: its name, and after each tab the
pairs whose costs round to 0, 1, 2, … half nats, -2 ln P(second letter | first). A space is whatever is ASCII and no
letter, and the apostrophe ’; `*` is any second letter that was not seen after the first. The last lines are the most
frequent characters of writings that have thousands.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

TARGET = Path(__file__).resolve().parents[2] / "kvtool/core/corpus/readers/letters.txt"
PAGES = {
    **dict.fromkeys("ru uk be bg mk sr".split(), "cp1251"),
    **dict.fromkeys("cs hr hu pl ro sk sl".split(), "cp1250"),
    **dict.fromkeys("ca da de en es fi fr is it nl no pt sq sv".split(), "cp1252"),
    **dict.fromkeys("et lt lv".split(), "cp1257"),
    **dict.fromkeys("ar fa".split(), "cp1256"),
    **{"el": "cp1253", "tr": "cp1254", "he": "cp1255", "vi": "cp1258", "th": "cp874"},
}
TEXTS = {  # of languages that chardet does not count
    "sq": """Trageti niset në mesditë dhe zyra e portit mbyllet në orën pesë. Fëmijët nuk paguajnë për biletën, të
    rriturit paguajnë dy euro. Është e ndaluar të pini duhan në kuvertë. Ju lutemi shkruani emrin, mbiemrin dhe
    adresën tuaj në këtë fletë. Çdo ditë ka një shërbim të ri; kur bën kohë e keqe, anija nuk lëviz. Përgjigjja vjen
    brenda tri ditëve. Shtëpia, qyteti, rrugë, këngë, gjuhë, Shqipëri, atëherë, edhe më, çelës, kështu, mirë, parë,
    tjetër, vetëm, gjatë, bëhet, thënë, kërkesë, përdorues, fjalëkalim, Kosovë, Tiranë, Durrës, Korçë, Sarandë,
    Vlorë, që, së, janë, kanë.""",
    "ca": """El transbordador surt al migdia i l'oficina tanca a les cinc. Què és això? Aquí no hi ha cap més
    notícia; el català és una llengua. La informació és al web, però també a la recepció. Demà farà bon temps, això
    sí: només plourà a la nit. Canvieu la contrasenya, si us plau, i introduïu el número. País, pàgina, últim,
    cançó, qüestió, veïns, València, Èric, anglès, francès, així, avui, perquè, després, gràcies, família, política,
    història, àrea, dóna, algú, vàlid, Girona, Lleida, Núria, Montserrat, Àngel, Mercè, Jordi, Barça, plaça, força,
    avinguda, Sànchez, Pagès.""",
}
FREQUENT = {
    "chinese": "的一是不了在人有我大来上个国到说们为子和你地出道也时年得就那要下以生会自着去过家学对可里后小么心多天"
    "而能好都然没日于起还发成事只作当想看文无开手十用主行方如前所本见经头面公同三已老从动两长海市县张王李"
    "陈刘黄",
    "taiwanese": "的一是不了在人有我大來上個國到說們為子和你地出道也時年得就那要下以生會自著去過家學對可裡後小心多天而"
    "能好都然沒日於起還發成事只作當想看文無開手十用主行方如前所本見經頭面公同三已老從動兩長海市縣張王李陳"
    "劉黃林",
    "japanese": "日一国人年大十二本中長出三時行見月後前生五間上東四今金九入学高子外八六下来気小七山話女北午書先名川千"
    "水西電校語土木田村佐藤鈴橋伊渡辺林加吉井島野市区町県都京阪横浜市方会社理目者部新地合同事自対手定発",
    "korean": "이다는의가을에고하은로지를한사대도리기어아나시그인자서해수있일정부상들과보전만국주성동장공제화구안연"
    "유선조여원세스면원김박최강윤임오",
}
UNSEEN = 0.05  # counts of a pair that was not seen
SIGNS = "£€©®™§°µ½¼¾²³±×•…–—«»“”„‘"  # of English texts


def letter(byte: int, page: str) -> str:
    """Return a byte's letter in lower case; a space for what is ASCII and no letter, or a control character."""
    char = bytes([byte]).decode(page, "ignore").lower()[:1]
    return char if char.isalpha() or (char > "\xa0" and char != "’") else " "


def counted(text: bytes) -> list[int]:
    """Count the byte pairs of a text, to the size of chardet's counts."""
    table = [0] * 65536
    for first, second in pairwise(text):
        table[first << 8 | second] += 8
    return table


def main() -> None:
    from chardet.models import load_models

    models, lines = load_models(), []
    for language, page in sorted(PAGES.items()):
        counts: dict[str, int] = defaultdict(int)
        totals: dict[str, int] = defaultdict(int)
        table = counted(TEXTS[language].encode(page)) if language in TEXTS else models[f"{language}/{page}"]
        for place, count in enumerate(table):
            pair = letter(place >> 8, page) + letter(place & 255, page)
            if count and pair != "  ":
                counts[pair] += count
                totals[pair[0]] += count
        for sign in SIGNS if language == "en" else "":
            counts[" " + sign], counts[sign + " "] = counts[" " + sign] + 4, counts[sign + " "] + 20
            totals[" "], totals[sign] = totals[" "] + 4, totals[sign] + 20
        chances = {pair: (count + UNSEEN) / (totals[pair[0]] + 256 * UNSEEN) for pair, count in counts.items()}
        chances |= {first + "*": UNSEEN / (total + 256 * UNSEEN) for first, total in totals.items()}
        classes: dict[int, list[str]] = defaultdict(list)
        for pair, chance in sorted(chances.items()):
            classes[round(-2 * math.log(chance))].append(pair)
        lines.append("\t".join([language, *("".join(classes[cost]) for cost in range(max(classes) + 1))]))
    lines += [f"{name}\t{characters}" for name, characters in FREQUENT.items()]
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
