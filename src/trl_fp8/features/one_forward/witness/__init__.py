"""Comparison of the engine's model with the policy, module by module."""
