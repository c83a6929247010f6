"""Experts that the engine's routers chose, replayed by the policy's."""
