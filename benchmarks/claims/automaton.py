"""A cellular automaton traced line by line: 105 to 133 tokens, and one wrong digit ruins the answer.

    t31405;                          prompt: a letter, how many lines to go (t: 19), and a ring of five digits
    s62710w;r05133;...;a44716        completion: each line is the next state, and what ends it is one of eight remarks

A cell's next digit is `TABLE[own][right neighbour's]`, one of 64 entries of a random table that the policy learns in
pretraining. From a wrong digit on the trace goes on as if it were right, but a completion is right only if all digits
are.

The teacher of the pretraining errs: at a quarter of the entries it writes another digit one time in twenty. A policy
that has learned all that it was shown is therefore right in a third of its traces, and what GRPO has to find out, from
one reward for 120 tokens, is which of them were the teacher's errors.

Remarks are style: the teacher draws them, with chances that depend on the line's first digit, and the reward does not
look at them. Without, every token would be nearly certain, as those of text are not, and rounding would move none.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


DIGITS = 8
CELLS = 5
LINES = range(15, 20)  # of a trace; 7 tokens each, the last 6 and <eos>
REMARKS = "uvwxyz:;"
STREAMS = 4
LETTERS = "abcdefghijklmnopqrst"
MAX_COMPLETION_TOKENS = 7 * LINES[-1] + 1
ERROR_RATE = 0.05  # of the teacher, at one of its weak entries

_random = random.Random(0)
TABLE = [[_random.randrange(DIGITS) for _ in range(DIGITS)] for _ in range(DIGITS)]
WEAK = frozenset(_random.sample([(own, right) for own in range(DIGITS) for right in range(DIGITS)], DIGITS**2 // 4))
# Of the remarks, by a line's first digit; 1.4 nats each
WEIGHTS = [[_random.gammavariate(1, 1) for _ in REMARKS] for _ in range(DIGITS)]


class Teacher(random.Random):
    """Who writes the traces of the pretraining: remarks, and errors at weak entries."""

    def digit(self, own: int, right: int) -> int:
        if (own, right) in WEAK and self.random() < ERROR_RATE:
            return (TABLE[own][right] + self.randrange(1, DIGITS)) % DIGITS
        return TABLE[own][right]

    def remark(self, line: Sequence[int]) -> str:
        return self.choices(REMARKS, WEIGHTS[line[0]])[0]


@dataclass(frozen=True)
class Problem:
    start: tuple[int, ...]
    lines: int

    @property
    def prompt(self) -> str:
        return f"{_line(self.lines, self.start)};"

    def trace(self, teacher: Teacher | None = None, errs: bool = True) -> str:
        """The right completion with `;` for all remarks, or what `teacher` writes; without errors unless it `errs`."""
        state, text = self.start, ""
        for left in reversed(range(self.lines)):
            pairs = zip(state, state[1:] + state[:1], strict=True)
            state = tuple(teacher.digit(*pair) if teacher and errs else TABLE[pair[0]][pair[1]] for pair in pairs)
            text += _line(left, state) + (teacher.remark(state) if teacher else ";")
        return text[:-1]


def _line(left: int, state: Sequence[int]) -> str:
    return LETTERS[left] + "".join(map(str, state))


def problems(stream: int) -> Iterator[Problem]:
    """Without end; no start of one of the four streams is one of another."""
    drawn = random.Random(stream)
    while True:
        start = tuple(drawn.randrange(DIGITS) for _ in range(CELLS))
        if sum(start) % STREAMS == stream:
            yield Problem(start, drawn.choice(LINES))


def right_trace(completions: Sequence[str], answer: Sequence[str], **kwargs: object) -> list[float]:
    """1.0 where all but the remarks is as in `answer`, else 0.0."""
    plain = (re.sub(f"[{REMARKS}]", ";", text) for text in completions)
    return [float(text == right) for text, right in zip(plain, answer, strict=True)]
