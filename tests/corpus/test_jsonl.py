"""JSON lines: rows without one text are read by their keys."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.core.corpus.readers import read_documents
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from tests.wording import refused


def lines(*written: str) -> list[Document]:
    return read_documents(Path("/in/a.jsonl"), "\n".join(written).encode())


def read(*rows: object) -> list[Document]:
    return lines(*map(json.dumps, rows))


def text(row: object) -> str:
    (document,) = read(row)
    return document.text


METADATA = {
    **{"text": "Nine tons lie on the quay, and the crane lifts all of them.", "id": "a", "url": "https://a.org/b c"},
    **{"author": "Ottilie Berg", "tags": ["tide", "crane"], "date": "Mon, 3 Mar 2031 10:00:00 GMT", "score": 0.5},
    **{"license": "Creative Commons Attribution 4.0", "comments": 12, "answer": None, "context": [0.5] * 300},
    **{"html": "<p>nine tons lie on the quay and more.</p>", "sentences": ["the crane lifts all of them."]},
    **{"copy": "Nine tons lie on the quay, and the crane lifts all of them."},
}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "Where?", "completion": "At pier 4."}, "Prompt: Where?\nCompletion: At pier 4."),
        ({"instruction": "Sum up.", "input": "", "output": "Closed."}, "Instruction: Sum up.\nOutput: Closed."),
        ({"q": "Who?", "a": "Ines.", "id": 7}, "Q: Who?\nA: Ines.\nId: 7"),
        ({"title": "Cranes", "abstract": "They lift."}, "Title: Cranes\nAbstract: They lift."),
        ({"question": "Who?", "answers": ["Ines", "Alma"]}, "Question: Who?\nAnswers: Ines, Alma"),
        ({"name": "Alder", "height": 12.5, "open": True, "note": None}, "Name: Alder\nHeight: 12.5\nOpen: true"),
        ({"data": {"text": "Nine tons."}, "n": 3}, "Data: Nine tons.\nN: 3"),
        ("A row may be a text.", "A row may be a text."),
        (["One", "two"], "One, two"),
        ({"label": "rope", "vector": [0.5] * 300}, "Label: rope\nVector: 300 numbers, left out"),
        ({"title": "T", "text": "Nine tons.", "n": 4}, "T\n\nNine tons."),
        ({"text": "", "body": "Nine tons."}, "Nine tons."),
        ({"text": " ", "question": "Who?"}, "Text:  \nQuestion: Who?"),
        ({"text": "Nine tons.", "question": "Who?", "answer": "07:40"}, "Nine tons.\n\nQuestion: Who?\nAnswer: 07:40"),
        ({"title": "T", "passage": "Nine tons.", "answer": True}, "T\n\nNine tons.\n\nAnswer: true"),
        ({"body": "How?", "answers": [{"body": "Code 4471", "score": 3}]}, "How?\n\nBody: Code 4471\nScore: 3"),
        ({"text": "Nine tons.", "answers": {"text": ["44"], "start": [0]}}, "Nine tons.\n\nAnswers: 44\nStart: 0"),
        ({"text": "a", "bestAnswer": "4", "QUESTION": "Q"}, "a\n\nBestAnswer: 4\nQUESTION: Q"),
        ({"text": "Nine tons.", "gold_answers": ["4"]}, "Nine tons.\n\nGold_answers: 4"),
        (
            {"text": "Nine tons.", "q": "Who?", "a": "Ines", "qa": "b", "answer_id": "c"},
            "Nine tons.\n\nQ: Who?\nA: Ines",
        ),
        ({"role": "user", "content": "How tall?"}, "User: How tall?"),
        (
            {"text": "Nine tons.", "meta": {"n": 3, "fact": "It opens at noon."}},
            "Nine tons.\n\nFact: It opens at noon.",
        ),
        ({"text": "水門", "fact": "開門は七時。"}, "水門\n\nFact: 開門は七時。"),
        (METADATA, METADATA["text"]),
    ],
)
def test_rows_are_read_by_their_keys(row: object, shown: str) -> None:
    assert text(row) == shown


@pytest.mark.parametrize(("role", "said"), [("role", "content"), ("from", "value")])
def test_conversations_show_who_speaks(role: str, said: str) -> None:
    answer = {role: "gpt", said: "31 metres.", "weight": 1}
    turns = [{role: "human", said: "How tall?"}, answer, {role: "gpt", said: None}]
    assert text({"conversations": turns}) == "Human: How tall?\nGpt: 31 metres.\nWeight: 1"


def test_conversations_of_parts_are_read() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    parts = [{"type": "text", "text": "What is this?"}, picture]
    shown = text({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A crane."}]})
    assert shown.startswith("User: What is this?\n")
    assert shown.endswith("Url: picture, left out\nAssistant: A crane.")


def test_indented_rows_one_after_another_are_read() -> None:
    rows = [{"q": "Who?", "a": ["Ines"]}, {"text": "Nine tons."}]
    data = "\n".join(json.dumps(row, indent=1) for row in rows).encode()
    first, second = read_documents(Path("/in/a.jsonl"), data)
    assert (first.source, first.text) == ("/in/a.jsonl#1", "Q: Who?\nA: Ines")
    assert (second.source, second.text) == ("/in/a.jsonl#7", "Nine tons.")


def test_notes() -> None:
    scan = b64encode(random.Random(1).randbytes(1600)).decode()
    (document,) = read({"scan": scan, "caption": "A crane."})
    assert document.text == "Scan: [data]\nCaption: A crane."
    assert document.notes == ("embedded data: 1 not read",)
    empty: tuple[object, ...] = ({}, {"id": "abc", "n": 5}, [1, 2], {"text": None}, 7, {"q": ""}, "")
    documents = lines('{"text": "good"}', *map(json.dumps, empty), "{broken", "[" * 100_000, '{"text": "end"}')
    assert [document.text for document in documents] == ["good", "end"]
    assert documents[0].notes[:7] == tuple(f"line {line} left out: no text" for line in range(2, 9))
    assert [note.split(" left out")[0] for note in documents[0].notes[7:]] == ["line 9", "line 10"]
    assert documents[1].notes == ()
    with refused(UnreadableFile, numbers=True):
        read({"n": 1})
    assert len(lines('{"text": "x"}', *["bad"] * 100)[0].notes) == 21
    row = {"id": "a", "text": "The mill is old.", "owner": {"name": "Rosa"}, "url": "http://m", "pages": 3}
    row["answer"] = "Yes"
    (document,) = read(row)
    assert document.text == "The mill is old.\n\nAnswer: Yes"
    assert document.notes == ("fields not read: owner, url",)


def test_sources_are_ids_or_line_numbers() -> None:
    documents = lines(
        '{"id": "x", "title": "T", "text": "one\\u2028two"}',
        "",
        '{"content": "a\\ud800b \\ud83d\\ude00"}\r',
        '{"id": 7, "body": "four"}',
        '{"id": "dup", "passage": "five"}',
        '{"id": "dup", "text": "six"}',
        json.dumps({"id": "i" * 100_000, "text": "seven"}),
    )
    assert [document.source for document in documents] == [
        f"/in/a.jsonl#{label}" for label in ("x", 3, 7, 5, 6, "line 7")
    ]
    assert [document.text for document in documents[:3]] == ["T\n\none\u2028two", "a\ufffdb 😀", "four"]


@given(st.lists(st.one_of(st.none(), st.integers(1, 6), st.sampled_from(["a", "line 2", "3"])), min_size=1, max_size=8))
def test_sources_differ(ids: list[object]) -> None:
    documents = read(*({"id": label, "text": "x"} for label in ids))
    assert len({document.source for document in documents}) == len(ids)
