"""What FP8 does to learning: published claims, tried with a real engine on tasks that two cores can learn."""
