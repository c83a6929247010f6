"""Verdicts of the six claims, and tables, from whatever cells have run.

    python -m benchmarks.claims.verdicts        # writes benchmarks/results/claims_cpu.json

docs/claims.md says by which rule, and docs/generate_claims.py shows it there.
"""

from dataclasses import dataclass
from math import isfinite

from trl_fp8.correction.health import MAX_TOKEN_MULT_PROB_ERROR, MIN_EFFECTIVE_SAMPLE_SIZE

from .. import record
from . import evidence
from .evidence import Estimate
from .runs import Run, Runs
from .statements import CLAIMS, EXCLUDED, HOLDS, NOT_RUN, OPEN, Claim, arm


LEVEL = 0.05 / 2  # of all claims, which were judged twice: with eight seeds each, and with sixteen of some
SUPPORTED, NOT_SUPPORTED, NOT_DECIDED = "supported", "not supported", "not decided at this scale"
DIGITS = 5


@dataclass(frozen=True)
class Threshold:
    """Of a metric of runs: beyond it (above, or below if `is_least`), and not.

    Attributes:
        of: `worst` generation of a run, as the package warns of each, or its `mean`.
        in_force: The package warns at this one.
    """

    metric: str
    value: float
    of: str = "worst"
    is_least: bool = False
    in_force: bool = False

    def reading(self, run: Run) -> float:
        if self.of == "mean":
            return run.mean(self.metric)
        return run.least(self.metric) if self.is_least else run.most(self.metric)

    def is_beyond(self, run: Run) -> bool:
        if run.has_gaps(self.metric):
            return True
        return self.reading(run) < self.value if self.is_least else self.reading(run) > self.value


ERROR, SIZE = "token_mult_prob_error", "effective_sample_size"
THRESHOLDS = (
    *(Threshold("k3", value, "mean") for value in (1e-4, 1e-3, 1e-2, 1e-1)),
    *(Threshold(ERROR, value, in_force=value == MAX_TOKEN_MULT_PROB_ERROR) for value in (1.02, 1.05, 1.1, 1.2, 1.5)),
    *(
        Threshold(SIZE, value, is_least=True, in_force=value == MIN_EFFECTIVE_SAMPLE_SIZE)
        for value in (0.95, 0.9, 0.7, 0.5, 0.3)
    ),
)


def results(runs: Runs) -> dict:
    return rounded(
        {
            "runs": len(runs),
            "claims": claims(runs),
            "arms": arms(runs),
            "over_bf16": over_bf16(runs),
            "corrections": corrections(runs),
            "thresholds": [loss_beyond(threshold, runs) for threshold in THRESHOLDS],
        }
    )


def claims(runs: Runs) -> dict[str, dict]:
    """Each claim's test with its p, its parts, and the verdict. A test that has not run counts in Holm's procedure."""
    tests = [claim.test.judged(runs) for claim in CLAIMS.values()]
    ps = [
        1.0 if test["state"] == NOT_RUN else evidence.sign_flip(claim.test.differences(runs))
        for test, claim in zip(tests, CLAIMS.values(), strict=True)
    ]
    judged = {}
    for number, test, p, adjusted in zip(CLAIMS, tests, ps, evidence.holm(ps), strict=True):
        claim = CLAIMS[number]
        test["state"] = tested(claim, test, adjusted)
        parts = [part.judged(runs) for part in claim.parts]
        verdict = verdict_of([part["state"] for part in (test, *parts)])
        judged[str(number)] = {
            "claim": claim.text,
            "verdict": verdict,
            "p": p,
            "adjusted_p": adjusted,
            "test": test,
            "parts": parts,
        }
    return judged


def tested(claim: Claim, test: dict, adjusted: float) -> str:
    """A test holds if it rejects in its direction. Otherwise its interval may exclude what it was to show."""
    if test["state"] == NOT_RUN:
        return NOT_RUN
    gain = test["value"] - (1 if claim.test.is_ratio else 0)
    if adjusted <= LEVEL and (gain > 0) == (claim.test.says == "more"):
        return HOLDS
    return EXCLUDED if test["state"] == EXCLUDED else OPEN


def verdict_of(states: list[str]) -> str:
    """Of the states of a claim's test and parts."""
    if NOT_RUN in states:
        return NOT_RUN
    if EXCLUDED in states:
        return NOT_SUPPORTED
    return SUPPORTED if set(states) == {HOLDS} else NOT_DECIDED


def arms(runs: Runs) -> dict[str, dict]:
    """Means over seeds with intervals, of k3 the geometric one; and how many runs collapsed."""
    made = {}
    for name in runs.by_arm:
        of = runs.of(name)
        made[name] = {
            "n": len(of),
            "collapses": sum(run.collapsed for run in of),
            "diverged": sum(run.diverged is not None for run in of),
            "area": shown(evidence.mean(run.area for run in of)),
            "final": shown(evidence.mean(run.final for run in of)),
            "k3": shown(evidence.geometric_mean(filter(isfinite, (run.log_k3 for run in of)))),
            ERROR: shown(evidence.mean(filter(isfinite, (run.mean(ERROR) for run in of)))),
        }
    return made


def over_bf16(runs: Runs) -> dict[str, dict]:
    """Of each arm the area over that of BF16 rollouts without correction: same task, precision, pressure and seed."""
    found = {}
    for name in runs.by_arm:
        cell = runs.of(name)[0].cell
        reference = arm(cell.task, "bf16", precision=cell.precision, pressure=cell.pressure)
        if name != reference:
            found[name] = shown(evidence.mean(runs.differences("area", name, reference)))
    return found


def corrections(runs: Runs) -> dict[str, dict]:
    """Of each arm with a correction the area over those of none and of TIS on the same rollouts, and what it masks."""
    found = {}
    for name in runs.by_arm:
        cell = runs.of(name)[0].cell
        over = {}
        for other in ("none", "tis"):
            reference = arm(cell.task, cell.rollouts, other, cell.precision, cell.pressure)
            differences = [] if name == reference else runs.differences("area", name, reference)
            over[f"over_{other}"] = shown(evidence.mean(differences))
        if cell.correction != "none" and over["over_none"]:
            masked = filter(isfinite, (run.mean("fraction_masked") for run in runs.of(name)))
            found[name] = over | {"fraction_masked": shown(evidence.mean(masked))}
    return found


def losses(runs: Runs) -> list[tuple[Run, float]]:
    """Runs without correction, trained in BF16 on rollouts of other kinds, and the area that each lacks of the run on
    BF16 rollouts with its task, pressure and seed. The full flow trains another forward, and is not among them.
    """
    found = []
    for name in runs.by_arm:
        cell = runs.of(name)[0].cell
        if (cell.correction, cell.precision) == ("none", "bf16") and cell.rollouts not in ("bf16", "full_flow"):
            reference = arm(cell.task, "bf16", pressure=cell.pressure)
            found += [(run, other.area - run.area) for run, other in runs.pairs(name, reference)]
    return found


def loss_beyond(threshold: Threshold, runs: Runs) -> dict:
    """Mean loss of area of runs beyond the threshold and within it, with intervals over seeds; None of no runs."""
    sides = {True: {}, False: {}}
    for run, loss in losses(runs):
        sides[threshold.is_beyond(run)].setdefault(run.cell.seed, []).append(loss)
    return vars(threshold) | {"beyond": side(sides[True]), "within": side(sides[False])}


def side(losses_by_seed: dict[int, list[float]]) -> dict | None:
    found = evidence.clustered_mean(losses_by_seed)
    return found and vars(found) | {"runs": sum(map(len, losses_by_seed.values()))}


def shown(found: Estimate | None) -> dict | None:
    return found and vars(found)


def rounded(value: object) -> object:
    """To `DIGITS` digits wherever there is a float."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    runs = Runs.read()
    found = results(runs)
    print(record.write("claims", len(runs), found))
    for number, claim in found["claims"].items():
        print(f"{number}. {claim['claim']}: {claim['verdict']}")


if __name__ == "__main__":
    main()
