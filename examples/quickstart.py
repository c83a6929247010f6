"""GRPO with FP8 rollouts. The two marked lines are all that differs from TRL's GRPOTrainer.

python examples/quickstart.py
"""

import torch
from addition_task import cached_checkpoint, exact_answer, reinforcement_dataset

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer  # from trl import GRPOConfig, GRPOTrainer


settings = dict(
    output_dir="outputs/quickstart",
    per_device_train_batch_size=64,
    num_generations=8,
    max_completion_length=32,
    vllm_max_model_length=64,
    use_vllm=True,
    learning_rate=3e-4,
    max_steps=5,
    logging_steps=1,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),  # CPUs often emulate BF16
)

if __name__ == "__main__":
    model, data = str(cached_checkpoint()), reinforcement_dataset()
    trainer = FP8GRPOTrainer(model, exact_answer, FP8GRPOConfig(**settings), data)  # GRPOTrainer, GRPOConfig
    trainer.train()
    trainer.save_model()
