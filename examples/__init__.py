"""Scripts to run and to copy. Tests and benchmarks take the demo's task from here."""
