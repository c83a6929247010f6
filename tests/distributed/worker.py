"""One rank of a distributed test: `worker.py FUNCTION FOLDER OPTIONS` writes FOLDER/rank_<n>.json."""

import json
import os
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from engine import engines  # noqa: E402
from trainer.runs import arguments, dataset, reward_digits  # noqa: E402

from trl_fp8 import FP8GRPOTrainer  # noqa: E402
from trl_fp8.engine.upstream import engine_model  # noqa: E402
from trl_fp8.numerics.digest import digest  # noqa: E402


def train(folder: Path, checkpoint: str, ranks: int, lora: dict | None = None, resume: str | None = None, **flags):
    """A short training run; reports logs, what engine and policy hold at the end, and how the gathers went."""
    trainer = make_trainer(folder, checkpoint, lora, **flags)
    assert trainer.accelerator.num_processes == ranks
    gathered = FullTensors()
    trainer.train(resume_from_checkpoint=resume)
    trainer.vllm_generation.sync_weights()
    return {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "log": [row for row in trainer.state.log_history if "loss" in row],
        "evaluated": [row for row in trainer.state.log_history if "eval_reward" in row],
        "engine": engine_digest(trainer),
        "kv_scales": trainer.vllm_generation.last_sync.kv_scales.values.tolist(),
        "log_probs": engines.log_probs(trainer.vllm_generation.llm),
        "audited": trainer.vllm_generation.last_sync.audited_tensors,
        "audit_failures": trainer.vllm_generation.audit_failures,
        "policy": policy_digest(trainer),
        "most_gathered": gathered.most_alive,
        "gathered": gathered.total,
    }


def make_trainer(folder: Path, checkpoint: str, lora: dict | None = None, **flags) -> FP8GRPOTrainer:
    if lora is not None:
        from peft import LoraConfig

        lora = LoraConfig(task_type="CAUSAL_LM", **lora)
    return FP8GRPOTrainer(
        model=checkpoint,
        reward_funcs=reward_digits,
        args=arguments(folder / "run", **({"per_device_train_batch_size": 4} | flags)),
        train_dataset=dataset(),
        eval_dataset=dataset(4),
        peft_config=lora,
    )


class FullTensors:
    """How many gathered parameters (FSDP2's `full_tensor`) were alive at once."""

    def __init__(self):
        import weakref

        from torch.distributed.tensor import DTensor

        self.total = self.most_alive = 0
        alive, original = weakref.WeakSet(), DTensor.full_tensor

        def full_tensor(tensor, **kwargs):
            full = original(tensor, **kwargs)
            alive.add(full)
            self.total += 1
            self.most_alive = max(self.most_alive, len(alive))
            return full

        DTensor.full_tensor = full_tensor


def engine_digest(trainer) -> int:
    """Checksum of everything that the engine's model holds on this rank."""
    model = engine_model(trainer.vllm_generation.llm)
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    return digest(torch.stack([digest(tensor) for tensor in tensors])).item()


def policy_digest(trainer) -> int:
    """Checksum of the policy's weights, gathered."""
    named = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return digest(torch.stack([digest(named[name]) for name in sorted(named)])).item() if named else 0


def shard_on_cpu() -> None:
    """Let accelerate shard a policy on CPU ranks.

    accelerate 1.15 looks at FSDP and DeepSpeed settings only where it found an accelerator, and otherwise goes on with
    DDP, or with ranks that know nothing of each other. What it does after that look is all the same on gloo and CPU.
    """
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda state, *args: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    if any(os.environ.get(f"ACCELERATE_USE_{kind}") == "true" for kind in ("FSDP", "DEEPSPEED")):
        shard_on_cpu()
    function, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    report = globals()[function](folder, **options)
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(report))
