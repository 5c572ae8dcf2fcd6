"""Several answers written side by side, a token of each at a time."""

from __future__ import annotations

from kvtool.core.model.generate import Writing
from kvtool.core.model.stepping import step_together


class Together:
    """Answers that are written together; they come and go between any two steps.

        together = Together()
        together.add(Writing(decoder, fused.cache, [first], sampling, on_text))
        while together.writings:
            for writing in together.step():
                answer = writing.end()

    What an answer says does not depend on those beside it: it is what `generate` gives of it alone, token by token. In
    machine code all go through the model at once, which reads its weights once for all of them, and every logit is the
    same to the last bit; elsewhere they go one by one.

    Each has its own cache, sampling and listener. One thread steps; where others use the model meanwhile, it holds the
    session's lock for a step, not for an answer.

    Attributes
    ----------
    writings : those that are still being written, the oldest first.
    """

    def __init__(self) -> None:
        self.writings: list[Writing] = []

    def add(self, writing: Writing) -> None:
        """Take an answer in; one that is complete already comes back from the next step."""
        self.writings.append(writing)

    def remove(self, writing: Writing) -> None:
        """Leave an answer as it is: nobody waits for it any more."""
        self.writings.remove(writing)

    def step(self) -> list[Writing]:
        """Write a token of every answer that lacks one; returns those that are done, and lets go of them.

        What goes wrong with one answer alone (its listener has left, its logits are no numbers) ends that one, what
        goes wrong with the step all that took part: their `end` raises it.
        """
        going = [writing for writing in self.writings if not writing.done]
        try:
            logits = step_together([writing.stepper for writing in going], [writing.token for writing in going])
        except Exception as error:
            for writing in going:
                writing.fail(error)
        else:
            for writing, row in zip(going, logits, strict=True):
                writing.try_to_take(row)
        done = [writing for writing in self.writings if writing.done]
        self.writings = [writing for writing in self.writings if not writing.done]
        return done
