"""The six claims as data: what is compared with what, what a claim says of it, and when that is settled."""

from dataclasses import dataclass
from math import exp, log

from . import evidence
from .evidence import FEWEST, Estimate
from .runs import Runs


HOLDS, EXCLUDED, OPEN, NOT_RUN = "holds", "excluded", "open", "not run"
LEVEL = evidence.LEVEL / 2  # of tests and intervals: the claims were judged twice, the second time with more seeds
MARGIN = 0.03  # of accuracy, the loss that one source reports
RATIO_MARGIN = 1.05  # of a k3


def arm(task: str, rollouts: str, correction: str = "none", precision: str = "bf16", pressure: str = "1x1") -> str:
    """As `Cell.arm` spells it."""
    return "-".join([task, rollouts, correction, precision, pressure])


@dataclass(frozen=True)
class Comparison:
    """Of two arms, seed by seed.

    Attributes:
        metric: `area`, `final`, or `k3`, whose differences are those of its logarithm, and which is shown as a ratio.
        says: That `arm` has `more` or `less` than `reference`, is `near` it, or has `at least` a ratio `floor`.
    """

    metric: str
    arm: str
    reference: str
    says: str
    floor: float | None = None

    @property
    def arms(self) -> tuple[str, str]:
        return self.arm, self.reference

    @property
    def is_ratio(self) -> bool:
        return self.metric == "k3"

    def differences(self, runs: Runs) -> list[float]:
        return runs.differences(f"log_{self.metric}" if self.is_ratio else self.metric, self.arm, self.reference)

    def state(self, found: Estimate | None) -> str:
        """What the interval of the mean difference settles. Claimed and excluded overlap for `more` and `less`, where
        a difference may be certain and smaller than the margin: it holds, then.
        """
        if found is None or found.n < FEWEST:
            return NOT_RUN
        low, high = found.low, found.high
        margin = log(RATIO_MARGIN) if self.is_ratio else MARGIN
        if self.says == "less":
            low, high = -high, -low
        match self.says:
            case "near":
                holds, excluded = -margin < low and high < margin, low > margin or high < -margin
            case "at least":
                holds, excluded = low >= log(self.floor), high < log(self.floor)
            case "more" | "less":
                holds, excluded = low > 0, high < margin
        return HOLDS if holds else EXCLUDED if excluded else OPEN

    def judged(self, runs: Runs) -> dict:
        found = evidence.mean(self.differences(runs), LEVEL)
        shown = found and (found.mapped(exp) if self.is_ratio else found)
        return vars(self) | {"state": self.state(found)} | (vars(shown) if shown else {"n": 0})


@dataclass(frozen=True)
class Collapses:
    """At least half of the runs of `arm` collapse and none of `reference`; over the same seeds."""

    arm: str
    reference: str

    @property
    def arms(self) -> tuple[str, str]:
        return self.arm, self.reference

    def judged(self, runs: Runs) -> dict:
        """Holds by the count. Excluded by one collapse of `reference`, or if the exact interval of the share of the
        runs of `arm` is below one half, which with eight takes that none does.
        """
        pairs = runs.pairs(self.arm, self.reference)
        n = len(pairs)
        fell, other = sum(run.collapsed for run, _ in pairs), sum(run.collapsed for _, run in pairs)
        if n < FEWEST:
            state = NOT_RUN
        elif 2 * fell >= n and not other:
            state = HOLDS
        else:
            state = EXCLUDED if other or evidence.share(fell, n, LEVEL).high < 0.5 else OPEN
        return vars(self) | {"metric": "collapses", "state": state, "collapses": [fell, other], "n": n}


@dataclass(frozen=True)
class Claim:
    """
    Attributes:
        title: In pictures.
        test: Decided by its sign-flip p, adjusted for all claims' tests.
        parts: Decided by their intervals.
    """

    title: str
    text: str
    test: Comparison
    parts: tuple[Comparison | Collapses, ...]

    @property
    def arms(self) -> set[str]:
        return {arm for part in (self.test, *self.parts) for arm in part.arms}


LONG, SHORT, EXPERTS = "automaton", "addition", "addition_moe"
HARD = "3x4"  # three times the learning rate, four updates on each batch
TYPES = arm(SHORT, "e4m3", "tis", "fp16_emulated"), arm(SHORT, "e4m3", "tis", "bf16_emulated")

CLAIMS = {
    1: Claim(
        "FP8 linears",
        "FP8 linears without correction lose accuracy, token TIS restores it",
        Comparison("area", arm(SHORT, "e4m3"), arm(SHORT, "bf16"), "less"),
        (Comparison("area", arm(SHORT, "e4m3", "tis"), arm(SHORT, "bf16"), "near"),),
    ),
    2: Claim(
        "FP8 KV cache",
        "An FP8 KV cache adds mismatch, TIS still restores",
        Comparison("k3", arm(SHORT, "e4m3_kv"), arm(SHORT, "e4m3"), "more"),
        (Comparison("area", arm(SHORT, "e4m3_kv", "tis"), arm(SHORT, "bf16"), "near"),),
    ),
    3: Claim(
        "experts",
        "A mixture of experts has more mismatch, and needs correction even with BF16 rollouts",
        Comparison("area", arm(EXPERTS, "bf16", "tis"), arm(EXPERTS, "bf16"), "more"),
        (
            Comparison("k3", arm(EXPERTS, "bf16"), arm(SHORT, "bf16"), "more"),
            Comparison("k3", arm(EXPERTS, "e4m3"), arm(SHORT, "e4m3"), "more"),
        ),
    ),
    4: Claim(
        "FP16 training",
        "Training in FP16 has no less mismatch, and converges faster",
        Comparison("area", *TYPES, "more"),
        (Comparison("k3", *TYPES, "at least", 0.8),),
    ),
    5: Claim(
        "one FP8 flow",
        "FP8 in training and rollouts has less mismatch than in rollouts alone, and nearly BF16's accuracy",
        Comparison("area", arm(SHORT, "e4m3_kv"), arm(SHORT, "full_flow"), "less"),
        (
            Comparison("k3", arm(SHORT, "full_flow"), arm(SHORT, "e4m3_kv"), "less"),
            Comparison("area", arm(SHORT, "full_flow"), arm(SHORT, "bf16"), "near"),
        ),
    ),
    6: Claim(
        "under pressure",
        "BF16 training with FP8 rollouts collapses on long rollouts and hard tasks, one FP8 flow does not",
        Comparison("final", arm(LONG, "e4m3_kv", pressure=HARD), arm(LONG, "full_flow", pressure=HARD), "less"),
        (Collapses(arm(LONG, "e4m3_kv", pressure=HARD), arm(LONG, "full_flow", pressure=HARD)),),
    ),
}
