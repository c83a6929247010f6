"""What tests and benchmarks share: tiny models, published shapes, engines, runs, oracles. Not part of the wheel."""
