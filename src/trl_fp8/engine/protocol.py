"""What any engine tells: after its start how it computes, after a generation what it sampled from.

What a delivery asks of it: `sync.delivery.Engine`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trl_fp8.quantization.facts.scaling import ActivationScaling


@dataclass(frozen=True)
class EngineNumerics:
    """How an engine computes. Whoever follows one asks nothing else."""

    kernels: Mapping[str, int]  # name of each FP8 kernel of linears and experts -> number of layers that it runs
    linears: ActivationScaling | None = None  # how FP8 linears quantize their input; None if no linear is FP8
    query_rounded: bool = False  # attention rounds q to e4m3, as it does k and v
    # Largest mean |log-prob difference| of a trainer that calls the same kernels; what the platform guarantees
    mismatch_bound: float = 0.0


@dataclass(frozen=True)
class Survivors:
    """The tokens that top-k, top-p and min-p left, for each token of one sequence of T, E of them in all."""

    counts_T: np.ndarray  # int32; how many for each token, 0 where none was sampled (prompts, results of tools)
    ids_E: np.ndarray  # int32, those of one token behind those of another
