"""The frozen FP8 base of a policy with adapters, which its engine holds."""
