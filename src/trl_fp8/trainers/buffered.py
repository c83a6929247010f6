"""Base of `FP8GOLDTrainer` and `FP8IWOPDTrainer`. Some slices of their batch have completions of the dataset, the
others have completions that the policy generates.

These trainers of TRL have no method that only generates, which this class could override. But they call only two
methods of the engine, `sync_weights` and `generate`. So this class replaces both, and calls features' hooks
(run/feature.py) in `generate`.
"""

from dataclasses import dataclass

from trl_fp8.run.batch import COMPLETION_IDS, COMPLETION_MASK, PROMPT_IDS, Rollouts
from trl_fp8.run.launch import require_room

from .distilling import Distilling, DistillingConfig


IGNORED = -100  # label of a token that is not trained on


@dataclass
class BufferedConfig(DistillingConfig):
    """Base of the configs of GOLD and IW-OPD."""

    # Attributes of GRPO's config that these configs lack. They are not flags
    generation_batch_size = generation_kwargs = min_p = None
    repetition_penalty = 1.0
    mask_truncated_completions = False

    def __post_init__(self):
        super().__post_init__()
        if self.own_engine and self.vllm_sync_frequency != 1:
            raise ValueError(
                f"vllm_sync_frequency={self.vllm_sync_frequency} with {type(self).__name__}: each generation needs "
                "the current weights, which its audit checks. Set vllm_sync_frequency=1."
            )

    @property
    def steps_per_generation(self) -> int:
        return self.gradient_accumulation_steps  # TRL generates once for each optimizer step


class Buffered(Distilling):
    """Calls of features' hooks in a step of GOLD and IW-OPD. It stands before `FP8Rollouts` in the list of bases."""

    has_prompts = False  # datasets have no column "prompt"
    num_iterations = 1
    _last_loaded_step = -1  # below 0: the next generation syncs
    _is_generating = False

    def _make_generation(self, **kwargs) -> object:
        generation = super()._make_generation(**kwargs)
        if self.features:
            self._engine_sync = generation.sync_weights
            self._engine_generate = generation.generate
            generation.sync_weights = self._sync_if_generating
            generation.generate = self._generate_with_hooks
        return generation

    def _sync_if_generating(self) -> None:
        """Sync if `generate` is running. TRL also calls this before `generate`, when features do not know the prompts
        yet.
        """
        if self._is_generating:
            self._engine_sync()

    def _generate_with_hooks(self, prompts: list[list[int]], images: list | None, num_generations: int) -> tuple:
        for feature in self.features:
            feature.before_generation(prompts)
        for feature in self.features:
            feature.before_turn(prompts)
        require_room(prompts, self.context)
        self._is_generating = True
        try:
            if self._last_loaded_step < 0:
                self._engine_sync()
                self._last_loaded_step = self.state.global_step
            output = self._engine_generate(prompts, images, num_generations)
        finally:
            self._is_generating = False
        rollouts = Rollouts(*output[:2])
        for feature in self.features:
            feature.after_generation(rollouts)
        self._add_metrics(rollouts.metrics)
        return output

    def _fill_buffer(self, generation_batch, buffer_steps: int) -> None:
        super()._fill_buffer(generation_batch, buffer_steps)
        if not self.features:
            return
        for index, is_generated in enumerate(self.generated_slices):
            if not is_generated:
                continue
            inputs = self._buffered_inputs[index]
            prompt_columns = inputs["prompts"].shape[1]
            tensors = {
                PROMPT_IDS: inputs["input_ids"][:, :prompt_columns],
                COMPLETION_IDS: inputs["input_ids"][:, prompt_columns:],
                COMPLETION_MASK: (inputs["labels"][:, prompt_columns:] != IGNORED).long(),
            }
            extended = self.extend_batch(dict(tensors))
            added = {name: value for name, value in extended.items() if name not in tensors}
            self._buffered_inputs[index] = inputs | added

    @property
    def generated_slices(self) -> list[bool]:
        """Return, for each slice of the buffer, whether the policy generated it."""
        raise NotImplementedError
