"""Proof that an engine computes the model that the policy is."""
