"""Public sets: `eval.py` makes documents and a batch of each format; `citations.py` marks sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samples.tools import eval as ev
from samples.tools.citations import is_right, marked_sentences, table

MILL = ["Tide Mill", ["The mill is old.", " It grinds beans."]]
LIGHT = ["Corvane Light", ["It flashes twice."]]
INN = ["Inn", ["Supper is at six."]]


def hotpot_row(**changes: Any) -> dict[str, Any]:
    row = {
        "_id": "q1",
        "question": "What does the mill grind?",
        "answer": "beans",
        "supporting_facts": [["Corvane Light", 0], ["Tide Mill", 1]],
        "context": [INN, MILL, LIGHT],
    }
    return row | changes


def musique_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "2hop__1",
        "question": "Who?",
        "answer": "Ilse Varnholt",
        "answer_aliases": ["Varnholt", "Ilse Varnholt"],
        "answerable": True,
        "paragraphs": [
            {"idx": i, "title": t, "paragraph_text": f"Text {t}.", "is_supporting": t in "BF"}
            for i, t in enumerate("ABCDEF")
        ],
    }
    return row | changes


def locomo_row(sample: str = "c", sessions: int = 9, **changes: Any) -> dict[str, Any]:
    conversation: dict[str, Any] = {"speaker_a": "Ann", "speaker_b": "Bo"}
    for number in range(1, sessions + 1):
        turns = [{"speaker": "Ann", "dia_id": f"D{number}:{i}", "text": f"s{number} t{i}"} for i in range(1, 18)]
        conversation |= {f"session_{number}": turns, f"session_{number}_date_time": f"{number} May, 2023"}
    qa = [
        {"question": "When?", "answer": 2022, "evidence": ["D5:9", "D1:17"], "category": 2},
        {"question": "Nothing?", "evidence": ["D1:1"], "category": 5, "adversarial_answer": "no"},
        {"question": "Who?", "answer": "Bo", "evidence": ["D2:1"], "category": 1},
        {"question": "Where?", "answer": "Rome", "evidence": ["D"], "category": 1},
    ]
    return {"sample_id": sample, "conversation": conversation, "qa": qa} | changes


def squad_file(*qas: dict[str, Any]) -> dict[str, Any]:
    block = {"context": "종은 백 일 동안 묻는다.", "qas": list(qas)}
    return {"version": "1", "data": [{"title": "단비 주종소", "paragraphs": [block]}]}


def squad_row(key: str, *answers: str) -> dict[str, Any]:
    return {"id": key, "question": "며칠인가?", "answers": [{"text": a, "answer_start": 0} for a in answers]}


def run(tmp_path: Path, kind: str, data: Any, *flags: str) -> int:
    source = tmp_path / "in.json"
    source.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    code: int = ev.main([kind, str(source), str(tmp_path / "out"), *flags])
    return code


def batch(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out/batch.jsonl").read_text(encoding="utf-8").splitlines()]


def corpus(tmp_path: Path) -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in (tmp_path / "out/corpus").iterdir()}


def titles(tmp_path: Path) -> list[str]:
    """First lines of the documents of the first question."""
    files = corpus(tmp_path)
    return [files[name].splitlines()[0] for name in batch(tmp_path)[0]["documents"]]


def test_hotpotqa(tmp_path: Path) -> None:
    other = hotpot_row(_id="q2", context=[MILL, ["Tide Mill", ["Another text."]], MILL])
    assert run(tmp_path, "hotpotqa", [hotpot_row(), other]) == 0
    first, second = batch(tmp_path)
    assert (first["id"], first["question"], first["answers"]) == ("q1", "What does the mill grind?", ["beans"])
    assert titles(tmp_path) == ["Inn", "Tide Mill", "Corvane Light"]
    assert corpus(tmp_path)[first["documents"][1]] == "Tide Mill\n\nThe mill is old. It grinds beans.\n"
    assert second["documents"][0] == first["documents"][1]  # a document of two questions is written once
    assert (len(second["documents"]), len(corpus(tmp_path))) == (2, 4)


def test_hotpotqa_context_as_columns(tmp_path: Path) -> None:
    columns = {"title": [p[0] for p in (INN, MILL, LIGHT)], "sentences": [p[1] for p in (INN, MILL, LIGHT)]}
    assert run(tmp_path, "hotpotqa", [hotpot_row(context=columns)]) == 0
    assert titles(tmp_path) == ["Inn", "Tide Mill", "Corvane Light"]


@pytest.mark.parametrize("title", ["../../etc/passwd", "CON", "", "a" * 400, "달여섬 등대", "x/y\\z:*?\n<>|", "\ud800"])
def test_file_names_are_safe_and_short(tmp_path: Path, title: str) -> None:
    assert run(tmp_path, "hotpotqa", [hotpot_row(context=[[title, ["Text."]]])]) == 0
    (name,) = corpus(tmp_path)
    assert len(name) <= 60
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [("musique", n, list(kept)) for n, kept in ((1, "BF"), (4, "ABCF"), (99, "ABCDEF"))]
    + [("hotpotqa", 2, ["Tide Mill", "Corvane Light"])],
)
def test_supporting_paragraphs_are_kept(tmp_path: Path, kind: str, count: int, expected: list[str]) -> None:
    row = musique_row() if kind == "musique" else hotpot_row()
    assert run(tmp_path, kind, [row], "--paragraphs", str(count)) == 0
    assert titles(tmp_path) == expected
    assert len(corpus(tmp_path)) == len(expected)


def test_musique_lines_without_unanswerable_questions(tmp_path: Path) -> None:
    rows = [musique_row(id="no", answerable=False), musique_row(id="yes")]
    assert run(tmp_path, "musique", "".join(json.dumps(r) + "\n" for r in rows)) == 0
    assert [(line["id"], line["answers"]) for line in batch(tmp_path)] == [("yes", ["Ilse Varnholt", "Varnholt"])]


def test_locomo_has_the_evidence_among_twelve_segments_in_order(tmp_path: Path) -> None:
    assert run(tmp_path, "locomo", [locomo_row()]) == 0
    files, (when, who) = corpus(tmp_path), batch(tmp_path)
    assert (when["id"], when["answers"], who["answers"]) == ("c-1", ["2022"], ["Bo"])
    for line, gold in ((when, ("s5 t9", "s1 t17")), (who, ("s2 t1\n",))):
        texts = [files[name] for name in line["documents"]]
        assert len(texts) == 12
        assert [text[0] for text in texts] == sorted(text[0] for text in texts)  # nine sessions: the days of May
        assert all(any(f"Ann: {turn}" in text for text in texts) for turn in gold)
    assert files[when["documents"][0]].startswith("1 May, 2023\n\nAnn: s1 t")
    assert when["documents"] != who["documents"]


def test_squad_leaves_retrieval_to_the_tool(tmp_path: Path) -> None:
    data = squad_file(squad_row("k1", "백 일", "백 일", "백일"), squad_row("none"), squad_row("k2", "백 일 동안"))
    assert run(tmp_path, "squad", data) == 0
    question = {"question": "며칠인가?"}
    assert batch(tmp_path) == [
        {"id": "k1", **question, "answers": ["백 일", "백일"]},
        {"id": "k2", **question, "answers": ["백 일 동안"]},
    ]
    assert list(corpus(tmp_path).values()) == ["단비 주종소\n\n종은 백 일 동안 묻는다.\n"]


BLOCKS = [{"context": f"Text {i}.", "qas": [squad_row(f"{i}{k}", "a") for k in "xyz"]} for i in range(3)]


@pytest.mark.parametrize(
    ("kind", "data", "limit", "ids", "documents"),
    [
        ("hotpotqa", [hotpot_row(_id=f"q{i}", context=[[f"T{i}", ["x"]]]) for i in range(5)], 2, "q0 q1", 2),
        ("squad", {"data": [{"title": "Two_words", "paragraphs": BLOCKS}]}, 4, "0x 1x 2x 0y", 3),
        ("locomo", [locomo_row(), locomo_row("d", 3)], 3, "c-1 d-1 c-3", 19),
    ],
    ids=["the first rows", "over all paragraphs", "each conversation in turn"],
)
def test_limit(tmp_path: Path, kind: str, data: Any, limit: int, ids: str, documents: int) -> None:
    assert run(tmp_path, kind, data, "--limit", str(limit)) == 0
    assert " ".join(line["id"] for line in batch(tmp_path)) == ids
    assert len(corpus(tmp_path)) == documents


# ---- citations ----


def test_marked_sentences() -> None:
    assert dict(marked_sentences("hotpotqa", [hotpot_row()])) == {"q1": ["It flashes twice.", "It grinds beans."]}
    asked = squad_file({"id": "7", "question": "?", "answers": [{"text": "백 일", "answer_start": 3}]})
    asked["data"][0]["paragraphs"][0]["context"] += " 물은 차다."
    assert dict(marked_sentences("squad", asked)) == {"7": ["종은 백 일 동안 묻는다."]}


def test_a_citation_is_right_if_it_is_most_of_a_marked_sentence() -> None:
    right = {"The mill grinds beans.", "Once: The mill grinds beans.", "mill grinds beans."}
    assert {one for one in (*right, "beans.", "It is old.") if is_right(one, ["The mill grinds beans."])} == right


def test_rules_are_compared_with_citations() -> None:
    lines = list(table([{"`--cite`": True, "rule": number > 2, "answer": number > 5} for number in range(8)]))
    assert lines[1] == "| `--cite` | 1.00 | 1.00 |  |"
    assert lines[2].startswith("| rule | 0.62 | 1.00 | +")
