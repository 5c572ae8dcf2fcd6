"""A folder of small documents, and seeded random changes of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_THINGS = "mill bridge harbour oven school bakery tower market well library".split()
_PEOPLE = "Anna Boris Clara Dmitri Edda Farid Greta Hassan Ines Jonas".split()
_WORDS = "flour water salt stone river tide moon coast bread dough grain rope lamp boat wheel".split()
_QUESTIONS = ("Who built the {} {}?", "When was the {} {} finished?", "What does the {} {} hold, and since when?")
_LEAST = 2  # documents that are left


@dataclass
class Corpus:
    """Documents of a few paragraphs, by file name; `write` makes the folder so."""

    folder: Path
    documents: dict[str, list[str]] = field(default_factory=dict)
    made: int = 0  # documents that there have ever been

    @classmethod
    def begin(cls, folder: Path, dice: random.Random, count: int = 4) -> Corpus:
        corpus = cls(folder)
        for _ in range(count):
            corpus.add(dice)
        return corpus

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name not in self.documents:
                path.unlink()
        for name in self.documents:
            path, text = self.folder / name, self.text(name)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")

    def text(self, name: str) -> str:
        return "\n\n".join(self.documents[name]) + "\n"

    def texts(self) -> dict[str, str]:
        return {str(self.folder / name): self.text(name) for name in self.documents}

    def question(self, dice: random.Random) -> str:
        return dice.choice(_QUESTIONS).format(dice.choice(_ORDINALS), dice.choice(_THINGS))

    def any_path(self, dice: random.Random) -> str:
        return str(self.folder / dice.choice(sorted(self.documents)))

    def change(self, dice: random.Random) -> None:
        changes = (self.edit, self.edit, self.swap_paragraphs, self.swap_documents, self.rename, self.remove)
        dice.choice((*changes, self.add, self.copy, self.repeat))(dice)
        self.write()

    def add(self, dice: random.Random) -> None:
        heading = f"# The {dice.choice(_ORDINALS)} {dice.choice(_THINGS)}"
        self.documents[self._new_name()] = [heading, *(_paragraph(dice) for _ in range(dice.randint(2, 4)))]
        self.write()

    def edit(self, dice: random.Random) -> None:
        """Other words at the beginning, the middle or the end of a document; or a paragraph more or less."""
        paragraphs = self._any(dice)
        at = dice.choice((0, len(paragraphs) // 2, len(paragraphs) - 1))
        how = dice.choice(("replace", "insert", "drop", "word"))
        if how == "drop" and len(paragraphs) > 1:
            del paragraphs[at]
        elif how == "insert":
            paragraphs.insert(at, _paragraph(dice))
        elif how == "word":
            paragraphs[at] += f" It holds {dice.choice(_WORDS)}."
        else:
            paragraphs[at] = _paragraph(dice)

    def swap_paragraphs(self, dice: random.Random) -> None:
        paragraphs = self._any(dice)
        one, other = dice.randrange(len(paragraphs)), dice.randrange(len(paragraphs))
        paragraphs[one], paragraphs[other] = paragraphs[other], paragraphs[one]

    def swap_documents(self, dice: random.Random) -> None:
        one, other = dice.sample(sorted(self.documents), 2)
        self.documents[one], self.documents[other] = self.documents[other], self.documents[one]

    def rename(self, dice: random.Random) -> None:
        self.documents[self._new_name()] = self.documents.pop(dice.choice(sorted(self.documents)))

    def remove(self, dice: random.Random) -> None:
        if len(self.documents) <= _LEAST:
            return self.add(dice)
        del self.documents[dice.choice(sorted(self.documents))]
        return None

    def copy(self, dice: random.Random) -> None:
        self.documents[self._new_name()] = list(self._any(dice))

    def repeat(self, dice: random.Random) -> None:
        """Repeat a paragraph in another place, of its own document or of another one."""
        paragraph, paragraphs = dice.choice(self._any(dice)), self._any(dice)
        paragraphs.insert(dice.randint(0, len(paragraphs)), paragraph)

    def _any(self, dice: random.Random) -> list[str]:
        """The paragraphs of a document."""
        return self.documents[dice.choice(sorted(self.documents))]

    def _new_name(self) -> str:
        self.made += 1
        return f"d{self.made}.md"


def _paragraph(dice: random.Random) -> str:
    subject = f"The {dice.choice(_ORDINALS)} {dice.choice(_THINGS)}"
    said = [f"{subject} was built in {dice.randint(1500, 1999)} by {dice.choice(_PEOPLE)}."]
    for _ in range(dice.randint(0, 2)):
        said.append(f"{dice.choice(_PEOPLE)} keeps {dice.choice(_WORDS)} and {dice.choice(_WORDS)} there.")
    return " ".join(said)
