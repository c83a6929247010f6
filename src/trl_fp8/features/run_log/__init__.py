"""The run log: fp8_run.jsonl, and the report that is drawn from it."""
