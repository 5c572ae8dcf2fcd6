"""samples/tools/eval.py: each format's small print, and that a wrong file is an error and not an empty evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samples.tools import eval as ev

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
    titles = "ABCDEF"
    row = {
        "id": "2hop__1",
        "question": "Who?",
        "answer": "Ilse Varnholt",
        "answer_aliases": ["Varnholt", "Ilse Varnholt"],
        "answerable": True,
        "paragraphs": [
            {"idx": i, "title": t, "paragraph_text": f"Text {t}.", "is_supporting": t in "BF"}
            for i, t in enumerate(titles)
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


def test_hotpotqa(tmp_path: Path) -> None:
    assert run(tmp_path, "hotpotqa", [hotpot_row()]) == 0
    (line,) = batch(tmp_path)
    files = corpus(tmp_path)
    assert {k: line[k] for k in ("id", "question", "answers")} == {
        "id": "q1",
        "question": "What does the mill grind?",
        "answers": ["beans"],
    }
    assert [files[name].splitlines()[0] for name in line["documents"]] == ["Inn", "Tide Mill", "Corvane Light"]
    assert files[line["documents"][1]] == "Tide Mill\n\nThe mill is old. It grinds beans.\n"


def test_hotpotqa_context_as_columns_gives_the_same_files(tmp_path: Path) -> None:
    columns = {"title": [p[0] for p in (INN, MILL, LIGHT)], "sentences": [p[1] for p in (INN, MILL, LIGHT)]}
    facts = {"title": ["Tide Mill"], "sent_id": [0]}
    row = hotpot_row(context=columns, supporting_facts=facts, id="q1")
    del row["_id"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert run(tmp_path / "a", "hotpotqa", [hotpot_row()]) == 0
    assert run(tmp_path / "b", "hotpotqa", [row]) == 0
    assert corpus(tmp_path / "a") == corpus(tmp_path / "b")
    assert batch(tmp_path / "a") == batch(tmp_path / "b")


def test_a_document_of_two_questions_is_written_once(tmp_path: Path) -> None:
    other = hotpot_row(_id="q2", context=[MILL, ["Tide Mill", ["Another text."]], MILL])
    assert run(tmp_path, "hotpotqa", [hotpot_row(), other]) == 0
    first, second = batch(tmp_path)
    assert len(corpus(tmp_path)) == 4
    assert second["documents"][0] == first["documents"][1]
    assert len(second["documents"]) == 2


@pytest.mark.parametrize("title", ["../../etc/passwd", "CON", "", "a" * 400, "달여섬 등대", "x/y\\z:*?\n<>|", "\ud800"])
def test_file_names_are_safe_and_short(tmp_path: Path, title: str) -> None:
    assert run(tmp_path, "hotpotqa", [hotpot_row(context=[[title, ["Text."]]])]) == 0
    (name,) = corpus(tmp_path)
    assert len(name) <= 60
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
    assert batch(tmp_path)[0]["documents"] == [name]


def test_musique_aliases_and_order(tmp_path: Path) -> None:
    assert run(tmp_path, "musique", [musique_row()]) == 0
    (line,) = batch(tmp_path)
    assert line["answers"] == ["Ilse Varnholt", "Varnholt"]
    assert [corpus(tmp_path)[name][0] for name in line["documents"]] == list("ABCDEF")


@pytest.mark.parametrize(("count", "expected"), [(1, "BF"), (2, "BF"), (4, "ABCF"), (6, "ABCDEF"), (99, "ABCDEF")])
def test_musique_keeps_supporting_paragraphs(tmp_path: Path, count: int, expected: str) -> None:
    assert run(tmp_path, "musique", [musique_row()], "--paragraphs", str(count)) == 0
    files = corpus(tmp_path)
    assert "".join(files[name][0] for name in batch(tmp_path)[0]["documents"]) == expected
    assert len(files) == len(expected)


def test_hotpotqa_keeps_supporting_paragraphs(tmp_path: Path) -> None:
    assert run(tmp_path, "hotpotqa", [hotpot_row()], "--paragraphs", "2") == 0
    files = corpus(tmp_path)
    titles = [files[name].splitlines()[0] for name in batch(tmp_path)[0]["documents"]]
    assert titles == ["Tide Mill", "Corvane Light"]


def test_musique_one_object_a_line_and_unanswerable_ones(tmp_path: Path) -> None:
    rows = [musique_row(id="no", answerable=False), musique_row(id="yes")]
    assert run(tmp_path, "musique", "".join(json.dumps(r) + "\n" for r in rows)) == 0
    assert [line["id"] for line in batch(tmp_path)] == ["yes"]


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


def test_locomo_asks_of_each_conversation_in_turn(tmp_path: Path) -> None:
    assert run(tmp_path, "locomo", [locomo_row(), locomo_row("d", 3)], "--limit", "3") == 0
    lines = batch(tmp_path)
    assert [line["id"] for line in lines] == ["c-1", "d-1", "c-3"]
    assert [len(line["documents"]) for line in lines] == [12, 9, 12]


def test_squad_leaves_retrieval_to_the_tool(tmp_path: Path) -> None:
    data = squad_file(squad_row("k1", "백 일", "백 일", "백일"), squad_row("none"), squad_row("k2", "백 일 동안"))
    assert run(tmp_path, "squad", data) == 0
    lines = batch(tmp_path)
    assert [(line["id"], line["answers"]) for line in lines] == [("k1", ["백 일", "백일"]), ("k2", ["백 일 동안"])]
    assert all("documents" not in line for line in lines)
    assert list(corpus(tmp_path).values()) == ["단비 주종소\n\n종은 백 일 동안 묻는다.\n"]
    assert "백 일" in (tmp_path / "out/batch.jsonl").read_text(encoding="utf-8")


def test_limit_of_squad_spreads_over_the_paragraphs(tmp_path: Path) -> None:
    blocks = [{"context": f"Text {i}.", "qas": [squad_row(f"{i}{k}", "a") for k in "xyz"]} for i in range(3)]
    data = {"data": [{"title": "Two_words", "paragraphs": blocks}]}
    assert run(tmp_path, "squad", data, "--limit", "4") == 0
    assert [line["id"] for line in batch(tmp_path)] == ["0x", "1x", "2x", "0y"]
    assert sorted(corpus(tmp_path).values()) == [f"Two words\n\nText {i}.\n" for i in range(3)]


def test_limit(tmp_path: Path) -> None:
    rows = [hotpot_row(_id=f"q{i}", context=[[f"T{i}", ["x"]]]) for i in range(5)]
    assert run(tmp_path, "hotpotqa", rows, "--limit", "2") == 0
    assert [line["id"] for line in batch(tmp_path)] == ["q0", "q1"]
    assert len(corpus(tmp_path)) == 2
