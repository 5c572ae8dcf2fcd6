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
    """Documents of a few paragraphs, by file name; `write` makes the folder so.

    Attributes
    ----------
    documents : paragraphs by name.
    """

    folder: Path
    documents: dict[str, list[str]] = field(default_factory=dict)
    made: int = 0  # documents that there have ever been

    @classmethod
    def begin(cls, folder: Path, dice: random.Random, count: int = 4) -> Corpus:
        """Write `count` documents."""
        corpus = cls(folder)
        for _ in range(count):
            corpus.add(dice)
        return corpus

    def write(self) -> None:
        """Make the folder hold these documents, and nothing else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.name not in self.documents:
                path.unlink()
        for name in self.documents:
            path, text = self.folder / name, self.text(name)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")

    def text(self, name: str) -> str:
        """The content of a document's file."""
        return "\n\n".join(self.documents[name]) + "\n"

    def texts(self) -> dict[str, str]:
        """The content of every file, by its path."""
        return {str(self.folder / name): self.text(name) for name in self.documents}

    def question(self, dice: random.Random) -> str:
        """A question with words that most documents have."""
        return dice.choice(_QUESTIONS).format(dice.choice(_ORDINALS), dice.choice(_THINGS))

    def any_path(self, dice: random.Random) -> str:
        """The path of a document."""
        return str(self.folder / dice.choice(sorted(self.documents)))

    # ---- changes; each says what it did ----

    def change(self, dice: random.Random) -> str:
        """Do one of the changes below."""
        changes = (self.edit, self.edit, self.swap_paragraphs, self.swap_documents, self.rename, self.remove)
        more = (self.add, self.copy, self.repeat)
        what = dice.choice((*changes, *more))(dice)
        self.write()
        return what

    def add(self, dice: random.Random) -> str:
        """A new document."""
        name = self._new_name()
        heading = f"# The {dice.choice(_ORDINALS)} {dice.choice(_THINGS)}"
        self.documents[name] = [heading, *(_paragraph(dice) for _ in range(dice.randint(2, 4)))]
        self.write()
        return f"add {name}"

    def edit(self, dice: random.Random) -> str:
        """Other words at the beginning, the middle or the end of a document; or a paragraph more or less."""
        name = dice.choice(sorted(self.documents))
        paragraphs = self.documents[name]
        where = dice.choice(("beginning", "middle", "end"))
        at = {"beginning": 0, "middle": len(paragraphs) // 2, "end": len(paragraphs) - 1}[where]
        how = dice.choice(("replace", "insert", "drop", "word"))
        if how == "drop" and len(paragraphs) > 1:
            del paragraphs[at]
        elif how == "insert":
            paragraphs.insert(at, _paragraph(dice))
        elif how == "word":
            paragraphs[at] += f" It holds {dice.choice(_WORDS)}."
        else:
            paragraphs[at] = _paragraph(dice)
        return f"{how} at the {where} of {name}"

    def swap_paragraphs(self, dice: random.Random) -> str:
        """Two paragraphs of one document change places."""
        name = dice.choice(sorted(self.documents))
        paragraphs = self.documents[name]
        one, other = dice.randrange(len(paragraphs)), dice.randrange(len(paragraphs))
        paragraphs[one], paragraphs[other] = paragraphs[other], paragraphs[one]
        return f"swap paragraphs {one} and {other} of {name}"

    def swap_documents(self, dice: random.Random) -> str:
        """Two files have each other's content."""
        one, other = dice.sample(sorted(self.documents), 2)
        self.documents[one], self.documents[other] = self.documents[other], self.documents[one]
        return f"swap {one} and {other}"

    def rename(self, dice: random.Random) -> str:
        """A file has another name."""
        name, new = dice.choice(sorted(self.documents)), self._new_name()
        self.documents[new] = self.documents.pop(name)
        return f"rename {name} to {new}"

    def remove(self, dice: random.Random) -> str:
        """A file is gone, unless few are left."""
        if len(self.documents) <= _LEAST:
            return self.add(dice)
        name = dice.choice(sorted(self.documents))
        del self.documents[name]
        return f"remove {name}"

    def copy(self, dice: random.Random) -> str:
        """A second file with the content of another."""
        name, new = dice.choice(sorted(self.documents)), self._new_name()
        self.documents[new] = list(self.documents[name])
        return f"copy {name} to {new}"

    def repeat(self, dice: random.Random) -> str:
        """Repeat a paragraph in another place, of its own document or of another one."""
        paragraph = dice.choice(self.documents[dice.choice(sorted(self.documents))])
        name = dice.choice(sorted(self.documents))
        self.documents[name].insert(dice.randint(0, len(self.documents[name])), paragraph)
        return f"repeat a paragraph in {name}"

    def _new_name(self) -> str:
        self.made += 1
        return f"d{self.made}.md"


def _paragraph(dice: random.Random) -> str:
    subject = f"The {dice.choice(_ORDINALS)} {dice.choice(_THINGS)}"
    said = [f"{subject} was built in {dice.randint(1500, 1999)} by {dice.choice(_PEOPLE)}."]
    for _ in range(dice.randint(0, 2)):
        said.append(f"{dice.choice(_PEOPLE)} keeps {dice.choice(_WORDS)} and {dice.choice(_WORDS)} there.")
    return " ".join(said)
