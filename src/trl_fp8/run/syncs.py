"""`Syncs`: tells the engine what it generates for, refuses empty prompts, and logs metrics of its syncs."""

import json
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import TrainerCallback

from trl_fp8.recipe.messages import listed
from trl_fp8.sync.records import SyncReport

from .batch import Rollouts, highest, lowest, mean_of
from .feature import Feature


logger = get_logger(__name__)

# In a checkpoint: the kernel of FP8 linears. A timing on the device chooses it (engine/vllm/gemms.py), so a resumed
# run may get another one, and would silently compute other numbers
PINNED = "engine.json"


class Syncs(Feature, TrainerCallback):
    """Logs each sync, once in training and once in evaluation, and warns of weights that went dead."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._logged: dict[bool, SyncReport] = {}  # in training, and in evaluation
        self._dead: set[str] = set()
        self._occasion: tuple[int, int, int] | None = None  # of the latest generation
        self._warn_of_long_prompts()

    def _warn_of_long_prompts(self) -> None:
        """Warn if the longest prompt leaves too little of the context for its completions."""
        trainer = self.trainer
        most = trainer.args.vllm_max_model_length
        budget = trainer.args.max_completion_length
        if most is None or trainer.environment_factories is not None or trainer.rollout_func is not None:
            return
        dataset = trainer.train_dataset
        columns = dataset.column_names if isinstance(dataset, Dataset) else ()
        has_images = "image" in columns or "images" in columns  # only TRL knows how many tokens these are
        if "prompt" not in columns or has_images:
            return

        def characters(prompt: str | list[dict] | None) -> int:
            texts = [prompt] if isinstance(prompt, str) else [str(message.get("content")) for message in prompt or ()]
            return sum(map(len, texts))

        prompt = max(dataset["prompt"][:], key=characters, default=None)  # row by row it takes 40 times as long
        if not prompt:
            return
        (prompt_ids,) = trainer.prompt_token_ids([prompt])
        if len(prompt_ids) + budget > most:
            logger.warning(
                f"vllm_max_model_length={most}: the longest prompt has {len(prompt_ids)} tokens, and its completions "
                f"end after {most - len(prompt_ids)} of max_completion_length={budget}. For whole ones raise "
                f"vllm_max_model_length to {len(prompt_ids) + budget}."
            )

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.forget()  # of another `train`, whose steps were counted from 0, too

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.forget()  # load_best_model_at_end has brought other weights

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self.forget()  # callbacks put other weights there for an evaluation, such as averaged ones

    def on_predict(self, args, state, control, **kwargs) -> None:
        self.forget()

    def forget(self) -> None:
        """Let the next generation sync: TRL assumes that weights of one step are the same."""
        self.trainer._last_loaded_step = -1

    def before_generation(self, prompts: list) -> None:
        trainer = self.trainer
        several_turns = trainer.tools or trainer.environments or trainer.rollout_func
        occasion = trainer.args.seed, trainer.state.global_step, int(trainer.model.training)
        if occasion != self._occasion:  # training and evaluation may have other weights, and KV scales
            self.forget()
        self._occasion = occasion
        keep_weights = bool(several_turns) or not trainer.model.training
        trainer.vllm_generation.begin(occasion, keep_weights)

    def before_turn(self, prompt_ids: list[list[int]]) -> None:
        empty = sum(not prompt for prompt in prompt_ids)
        if empty:
            raise ValueError(
                f"{empty} of {len(prompt_ids)} prompts are empty: there is no token to continue from. Filter them out "
                "of train_dataset, or put a system message before them."
            )

    def after_generation(self, rollouts: Rollouts) -> None:
        sync = self.trainer.vllm_generation.last_sync
        training = self.trainer.model.training
        if self._logged.get(training) is sync:
            return
        self._logged[training] = sync
        new = [name for name in sync.dead_blocks if name not in self._dead]
        if new:
            self._dead.update(new)
            dead = listed(f"{name} ({sync.dead_blocks[name]} blocks)" for name in new)
            logger.warning(
                f"{len(new)} weights ({self.trainer.recipe.format.description}) have blocks that the engine holds as "
                f"good as zero: {dead}. Usual causes: experts that get no tokens, pruned weights."
            )
        rollouts.metrics |= {
            "fp8/sync_seconds": mean_of(sync.seconds),
            "fp8/quantize_seconds": mean_of(sync.quantize_seconds),
            "fp8/audited_tensors": lowest(sync.audited_tensors),  # the same at every sync, or one was not whole
            "fp8/sync_bytes": mean_of(sync.bytes_sent),
        }
        rollouts.metrics |= {n: highest(value) for n, value in self.trainer.vllm_generation.sync_metrics.items()}
        if self.trainer.recipe.fp8_weights:
            rollouts.metrics["fp8/weight_relative_error"] = highest(sync.weight_relative_error)
            rollouts.metrics["fp8/dead_blocks"] = highest(sum(sync.dead_blocks.values()))

    def save(self, folder: str) -> None:
        if self.trainer.accelerator.is_main_process:
            Path(folder, PINNED).write_text(json.dumps(self.trainer.vllm_generation.pinned))

    def load(self, folder: str) -> None:
        """Warn of another engine. It started before the trainer knew what it resumes from, and cannot be changed."""
        path = Path(folder, PINNED)
        now = self.trainer.vllm_generation.pinned
        before = json.loads(path.read_text()) if path.exists() else {}
        if before and before != now:
            logger.warning(
                f"the engine of resume_from_checkpoint={str(folder)!r} had {before}, this one has {now}: its kernels "
                "round elsewhere, so that the run does not continue exactly as it would have. With "
                f"vllm_engine_kwargs={before} it does."
            )
