"""Whether the engine computes the model that the policy is, module by module."""
