"""The trained model (transformers) as this project uses it. Knows nothing of the engine."""
