"""The policy in the engine's precision: FP8 linears and experts, BF16 between them."""
