"""Benchmarks, each a module to run from the repository's root: `python -m benchmarks.bench_sync`."""
