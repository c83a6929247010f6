"""A training run on disk: its log, its facts, its checkpoints."""
