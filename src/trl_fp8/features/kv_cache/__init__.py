"""FP8 KV cache: scales calibrated on the policy, written to the engine, simulated in the trainer's attention."""
