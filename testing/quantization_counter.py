"""Counts how often a trainer's flow quantizes a weight."""

from trl_fp8.features.one_forward.backward import FP8Flow


class QuantizationCounter:
    """`calls` is the number since the counter was made; `during` that of one function call."""

    def __init__(self, monkeypatch):
        self.calls, original = 0, FP8Flow.quantize_weights

        def counted(flow, weights):
            self.calls += len(weights)
            return original(flow, weights)

        monkeypatch.setattr(FP8Flow, "quantize_weights", counted)

    def during(self, function) -> int:
        before = self.calls
        function()
        return self.calls - before
