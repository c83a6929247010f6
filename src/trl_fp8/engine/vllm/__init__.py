"""vLLM 0.31 as the engine: started, synced, audited, sampled from."""
