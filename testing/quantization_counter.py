"""Counts how often a trainer with one forward quantizes a weight."""

from trl_fp8.features.one_forward.followed_linear import BackwardPrecision


class QuantizationCounter:
    """`calls` is the number since the counter was made; `during` that of one function call."""

    def __init__(self, monkeypatch):
        self.calls, original = 0, BackwardPrecision.quantize_weights

        def counted(precision, weights):
            self.calls += len(weights)
            return original(precision, weights)

        monkeypatch.setattr(BackwardPrecision, "quantize_weights", counted)

    def during(self, function) -> int:
        before = self.calls
        function()
        return self.calls - before
