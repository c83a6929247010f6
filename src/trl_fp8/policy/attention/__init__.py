"""What the policy's attention sees: observed for calibration, rounded as the engine's KV cache rounds it."""
