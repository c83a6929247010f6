"""A cellular automaton traced line by line: 105 to 133 tokens, and one wrong digit ruins the answer.

    t31405;                          prompt: a letter, how many lines to go (t: 19), and a ring of five digits
    s62710;r05133;...;a44716         completion: each line is the next state

A cell's next digit is `TABLE[own][right neighbour's]`, one of 64 entries of a random table that the policy learns in
pretraining. From a wrong digit on the trace goes on as if it were right. A completion is right if all of it is, so the
chance that a policy is right is that of one sequence of tokens, which a forward gives without any sampling.

The teacher of the pretraining errs: at a quarter of the entries it writes another digit one time in twenty. A policy
that has learned all that it was shown is therefore right in a third of its traces, and what GRPO has to find out, from
one reward for 120 tokens, is which of them were the teacher's errors.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


DIGITS = 8
CELLS = 5
LINES = range(15, 20)  # of a trace; 7 tokens each, the last 6 and <eos>
STREAMS = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_COMPLETION_TOKENS = 7 * LINES[-1] + 1
ERROR_RATE = 0.05  # of the teacher, at one of its weak entries

_random = random.Random(0)
TABLE = [[_random.randrange(DIGITS) for _ in range(DIGITS)] for _ in range(DIGITS)]
WEAK = frozenset(_random.sample([(own, right) for own in range(DIGITS) for right in range(DIGITS)], DIGITS**2 // 4))


@dataclass(frozen=True)
class Problem:
    start: tuple[int, ...]
    lines: int

    @property
    def prompt(self) -> str:
        return f"{_line(self.lines, self.start)};"

    def trace(self, teacher: random.Random | None = None) -> str:
        """The right completion, or what a `teacher` writes who errs at weak entries."""
        state, written = self.start, []
        for left in reversed(range(self.lines)):
            state = tuple(_next(own, right, teacher) for own, right in zip(state, state[1:] + state[:1], strict=True))
            written.append(_line(left, state))
        return ";".join(written)


def _line(left: int, state: Sequence[int]) -> str:
    return LETTERS[left] + "".join(map(str, state))


def _next(own: int, right: int, teacher: random.Random | None) -> int:
    digit = TABLE[own][right]
    if teacher and (own, right) in WEAK and teacher.random() < ERROR_RATE:
        return (digit + teacher.randrange(1, DIGITS)) % DIGITS
    return digit


def problems(stream: int) -> Iterator[Problem]:
    """Without end; no start of one of the four streams is one of another."""
    drawn = random.Random(stream)
    while True:
        start = tuple(drawn.randrange(DIGITS) for _ in range(CELLS))
        if sum(start) % STREAMS == stream:
            yield Problem(start, drawn.choice(LINES))


def right_trace(completions: Sequence[str], answer: Sequence[str], **kwargs: object) -> list[float]:
    """1.0 where every digit is right, else 0.0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
