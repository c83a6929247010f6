"""Shared parts of tests and benchmarks: tiny models, published shapes, engines, runs, oracles, records of results.

Not part of the wheel. Benchmarks import it, and it imports no benchmark.
"""
