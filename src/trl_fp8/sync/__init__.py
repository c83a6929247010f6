"""Syncs, policy -> engine: the writer of tensors, the audit that proves what was written, and refusals. No vLLM."""
