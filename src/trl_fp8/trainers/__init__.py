"""TRL's trainers beside GRPO with FP8 rollouts, one file each with its config."""
