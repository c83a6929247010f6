"""vLLM as the engine: started, synced, audited, sampled from."""
