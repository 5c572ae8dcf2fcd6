"""samples/tools/citations.py: which sentences are marked, and when a cited one is such."""

from __future__ import annotations

from samples.tools.citations import is_right, marked_sentences, table
from tests.samples.tools.test_eval import hotpot_row, squad_file


def test_marked_are_supporting_facts() -> None:
    rows = dict(marked_sentences("hotpotqa", [hotpot_row()]))
    assert rows == {"q1": ["It flashes twice.", "It grinds beans."]}
    beyond = hotpot_row(supporting_facts=[["Corvane Light", 7], ["Inn", 0]])
    assert dict(marked_sentences("hotpotqa", [beyond])) == {"q1": ["Supper is at six."]}


def test_marked_has_the_span() -> None:
    asked = squad_file({"id": "7", "question": "?", "answers": [{"text": "백 일", "answer_start": 3}]})
    block = asked["data"][0]["paragraphs"][0]
    block["context"] += " 물은 차다."
    assert dict(marked_sentences("squad", asked)) == {"7": ["종은 백 일 동안 묻는다."]}


def test_right_is_a_marked_sentence_or_most_of_it() -> None:
    marked = ["The mill grinds beans."]
    assert is_right("The mill grinds beans.", marked)
    assert is_right("Once: The mill grinds beans.", marked)
    assert is_right("mill grinds beans.", marked)
    assert not is_right("beans.", marked)
    assert not is_right("It is old.", marked)


def test_a_rule_is_compared_with_citations() -> None:
    rows = [{"`--cite`": True, "rule": number > 2, "answer": number > 5} for number in range(8)]
    lines = list(table(rows))
    assert lines[0].startswith("| rule | all answers | 2 right answers |")
    assert lines[1] == "| `--cite` | 1.00 | 1.00 |  |"
    assert lines[2].startswith("| rule | 0.62 | 1.00 | +")
