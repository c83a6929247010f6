"""Verdicts of the six claims, and tables, from whatever cells have run.

    python -m benchmarks.claims.verdicts        # writes benchmarks/results/claims_cpu.json

benchmarks/claims/README.md says by which rule, and docs/generate_claims.py writes the tables.
"""

from collections.abc import Container
from dataclasses import dataclass
from math import isfinite

from testing import record
from trl_fp8.features.correction.health import MIN_EFFECTIVE_SAMPLE_SIZE
from trl_fp8.features.one_forward.unexplained import LARGE_EXPLAINED_K3

from . import evidence
from .evidence import Estimate
from .runs import Run, Runs
from .statements import CLAIMS, EXCLUDED, HOLDS, LEVEL, NOT_RUN, OPEN, Claim, arm


SUPPORTED, NOT_SUPPORTED, NOT_DECIDED = "supported", "not supported", "not decided at this scale"
DIGITS = 5


@dataclass(frozen=True)
class Bands:
    """Of runs, by how far a metric went: within the first edge, between two, and beyond the last.

    Attributes:
        edges: From harmless to bad: rising, or falling if `is_least`.
        of: `worst` generation of a run, as the package warns of each, or its `mean`.
        warned: The edge beyond which the package warns, if it does.
    """

    metric: str
    edges: tuple[float, ...]
    of: str = "worst"
    is_least: bool = False
    warned: float | None = None

    def reading(self, run: Run) -> float:
        if self.of == "mean":
            return run.mean(self.metric)
        return run.least(self.metric) if self.is_least else run.most(self.metric)

    def passed(self, run: Run) -> int:
        """How many edges the run went beyond: all, if a generation has no finite number."""
        if run.has_gaps(self.metric):
            return len(self.edges)
        reading = self.reading(run)
        return sum(reading < edge if self.is_least else reading > edge for edge in self.edges)


K3, ERROR, SIZE = "k3", "token_mult_prob_error", "effective_sample_size"
BANDS = (
    Bands(K3, (1e-4, 1e-3, 1e-2, 1e-1), of="mean"),
    Bands(K3, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), warned=LARGE_EXPLAINED_K3),
    Bands(ERROR, (1.02, 1.05, 1.2, 1.5, 10.0)),
    Bands(SIZE, (0.95, 0.9, 0.7, 0.5, 0.3), is_least=True, warned=MIN_EFFECTIVE_SAMPLE_SIZE),
)


def results(runs: Runs) -> dict:
    return rounded(
        {
            "runs": len(runs),
            "claims": claims(runs),
            "arms": arms(runs),
            "over_bf16": over_bf16(runs),
            "corrections": corrections(runs),
            "losses": [loss_by_band(bands, runs) for bands in BANDS],
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
        if cell.correction == "none":
            continue
        over = {}
        for other in ("none", "tis") if cell.correction != "tis" else ("none",):
            reference = arm(cell.task, cell.rollouts, other, cell.precision, cell.pressure)
            over[other] = shown(evidence.mean(runs.differences("area", name, reference)))
        if over["none"]:
            masked = filter(isfinite, (run.mean("fraction_masked") for run in runs.of(name)))
            found[name] = {"over": over, "fraction_masked": shown(evidence.mean(masked))}
    return found


def losses(runs: Runs) -> list[tuple[Run, float]]:
    """Runs without correction, trained in BF16 on rollouts of other kinds, and the area that each lacks of the run on
    BF16 rollouts with its task, pressure and seed. Where half of those collapse there is nothing to lose. The full
    flow trains another forward, and is not among them.
    """
    found = []
    for name in runs.by_arm:
        cell = runs.of(name)[0].cell
        if (cell.correction, cell.precision) == ("none", "bf16") and cell.rollouts not in ("bf16", "full_flow"):
            pairs = runs.pairs(name, arm(cell.task, "bf16", pressure=cell.pressure))
            if 2 * sum(bf16.collapsed for _, bf16 in pairs) < len(pairs):
                found += [(run, bf16.area - run.area) for run, bf16 in pairs]
    return found


def loss_by_band(bands: Bands, runs: Runs) -> dict:
    """Mean loss of area of the runs in each band, and within and beyond the edge that the package warns at."""
    found = [(bands.passed(run), run.cell.seed, loss) for run, loss in losses(runs)]

    def of(passed: Container[int]) -> dict | None:
        by_seed = {}
        for edges, seed, loss in found:
            if edges in passed:
                by_seed.setdefault(seed, []).append(loss)
        mean = evidence.clustered_mean(by_seed)
        return mean and vars(mean) | {"runs": sum(map(len, by_seed.values()))}

    made = vars(bands) | {"bands": [of((passed,)) for passed in range(len(bands.edges) + 1)]}
    if bands.warned is not None:
        first = bands.edges.index(bands.warned) + 1
        made |= {"within": of(range(first)), "beyond": of(range(first, len(bands.edges) + 1))}
    return made


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
