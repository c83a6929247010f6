"""`Syncs`: decides when a generation needs a sync, refuses empty prompts, and logs the metrics of syncs."""

import json
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import TrainerCallback

from trl_fp8.recipe.messages import listed
from trl_fp8.sync.records import Occasion, SyncReport

from .batch import Rollouts, highest, lowest, mean_of
from .feature import Feature


logger = get_logger(__name__)

# File in a checkpoint that names the kernel of FP8 linears. The kernel is chosen by timings on the device
# (engine/vllm/gemms.py), so a resumed run may get another kernel, which rounds differently
PINNED = "engine.json"


class Syncs(Feature, TrainerCallback):
    """Requests the syncs that TRL would omit. Logs each sync, and warns of weights with blocks that became zero."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._logged: dict[bool, SyncReport] = {}  # the sync logged last in training (True) and evaluation (False)
        self._dead: set[str] = set()  # weights with zero blocks that a warning has already named
        self._latest: Occasion | None = None  # occasion of the latest generation
        self._warn_of_long_prompts()

    def _warn_of_long_prompts(self) -> None:
        """Warn if the longest prompt leaves too little of the context for its completions."""
        trainer = self.trainer
        context = trainer.args.vllm_max_model_length
        completion = trainer.args.max_completion_length
        # Without vllm_max_model_length the context is the model's own. Environments and a rollout_func make prompts
        # that the dataset does not show
        if context is None or trainer.environment_factories is not None or trainer.rollout_func is not None:
            return
        dataset = trainer.train_dataset
        columns = dataset.column_names if isinstance(dataset, Dataset) else ()
        has_images = "image" in columns or "images" in columns  # only TRL knows how many tokens an image takes
        if "prompt" not in columns or has_images:
            return

        def characters(prompt: str | list[dict] | None) -> int:
            if isinstance(prompt, str):
                return len(prompt)
            return sum(len(str(message.get("content"))) for message in prompt or ())

        # `[:]` reads the column at once, which is several times as fast as row by row
        longest = max(dataset["prompt"][:], key=characters, default=None)
        if not longest:
            return
        (prompt_ids,) = trainer.prompt_token_ids([longest])
        if len(prompt_ids) + completion > context:
            logger.warning(
                f"vllm_max_model_length={context}: the longest prompt has {len(prompt_ids)} tokens, and its "
                f"completions end after {context - len(prompt_ids)} of max_completion_length={completion}. For "
                f"complete ones raise vllm_max_model_length to {len(prompt_ids) + completion}."
            )

    def require_sync(self, *_: Any, **__: Any) -> None:
        """Make the next generation sync. TRL syncs only if the step differs from that of the last sync."""
        self.trainer._last_loaded_step = -1

    on_train_begin = require_sync  # an earlier call of `train` may have synced in a step of the same number
    on_train_end = require_sync  # load_best_model_at_end may have loaded other weights
    on_evaluate = on_predict = require_sync  # callbacks may evaluate other weights, such as averaged ones

    def before_generation(self, prompts: list) -> None:
        trainer = self.trainer
        current = Occasion(trainer.args.seed, trainer.state.global_step, int(trainer.model.training))
        if current != self._latest:  # evaluation may have other weights and KV scales than training in the same step
            self.require_sync()
        self._latest = current
        # Keep the engine's weights if it may generate again before they change: in further turns, or in the next
        # batch of an evaluation
        has_turns = trainer.tools or trainer.environments or trainer.rollout_func
        keep_weights = bool(has_turns) or not trainer.model.training
        trainer.vllm_generation.begin(current, keep_weights)

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
        if self._logged.get(training) is sync:  # a sync serves several generations, and the first one logs it
            return
        self._logged[training] = sync
        newly_dead = [name for name in sync.dead_blocks if name not in self._dead]
        if newly_dead:
            self._dead.update(newly_dead)
            blocks = listed(f"{name} ({sync.dead_blocks[name]} blocks)" for name in newly_dead)
            logger.warning(
                f"{len(newly_dead)} weights ({self.trainer.recipe.format.description}) have blocks that the engine "
                f"holds as good as zero: {blocks}. Usual causes: experts that get no tokens, pruned weights."
            )
        rollouts.metrics |= {
            "fp8/sync_seconds": mean_of(sync.seconds),
            "fp8/quantize_seconds": mean_of(sync.quantize_seconds),
            "fp8/audited_tensors": lowest(sync.audited_tensors),  # the same from the second sync on
            "fp8/sync_bytes": mean_of(sync.bytes_sent),
        }
        for name, value in self.trainer.vllm_generation.sync_metrics.items():
            rollouts.metrics[name] = highest(value)
        if self.trainer.recipe.fp8_weights:
            rollouts.metrics["fp8/weight_relative_error"] = highest(sync.weight_relative_error)
            rollouts.metrics["fp8/dead_blocks"] = highest(sum(sync.dead_blocks.values()))

    def save(self, folder: str) -> None:
        if self.trainer.accelerator.is_main_process:
            Path(folder, PINNED).write_text(json.dumps(self.trainer.vllm_generation.pinned))

    def load(self, folder: str) -> None:
        """Warn if the checkpoint's engine had another kernel. This engine has started, so its kernel stays."""
        path = Path(folder, PINNED)
        now = self.trainer.vllm_generation.pinned
        before = json.loads(path.read_text()) if path.exists() else {}
        if before and before != now:
            logger.warning(
                f"the engine of resume_from_checkpoint={str(folder)!r} had {before}, this one has {now}: its kernels "
                "round differently, so that the run does not continue exactly as it would have. With "
                f"vllm_engine_kwargs={before} it does."
            )
