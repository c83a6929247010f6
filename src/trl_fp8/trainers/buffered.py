"""Base of TRL's GOLD and IW-OPD, which distill slices of a batch: those of the dataset, and those that they generate.

They have no method that only generates. But they call the engine's `sync_weights` and `generate`, and nothing else of
it, so that a step's hooks stand there.
"""

from dataclasses import dataclass

from trl_fp8.run.batch import COMPLETION_IDS, COMPLETION_MASK, PROMPT_IDS, Rollouts
from trl_fp8.run.launch import require_room

from .distilling import Distilling, DistillingConfig


IGNORED = -100  # label of a token that is not trained on


@dataclass
class BufferedConfig(DistillingConfig):
    """Base of the configs of GOLD and IW-OPD."""

    # Not flags: what GRPO's config has and theirs lack
    generation_batch_size = generation_kwargs = min_p = None
    repetition_penalty, mask_truncated_completions = 1.0, False

    def __post_init__(self):
        super().__post_init__()
        if self.own_engine and self.vllm_sync_frequency != 1:
            raise ValueError(
                f"vllm_sync_frequency={self.vllm_sync_frequency} with {type(self).__name__}: every generation is of "
                "the policy as it is, and audited as such. Set vllm_sync_frequency=1."
            )

    @property
    def steps_per_generation(self) -> int:
        return self.gradient_accumulation_steps  # TRL generates once for each optimizer step


class Buffered(Distilling):
    """Hooks of a step in GOLD and IW-OPD. It stands before `FP8Rollouts`."""

    has_prompts = False
    num_iterations = 1
    _last_loaded_step = -1  # below 0: the next generation syncs
    _generating = False

    def _make_generation(self, **kwargs) -> object:
        generation = super()._make_generation(**kwargs)
        if self.features:
            self._sync, self._sample = generation.sync_weights, generation.generate
            generation.sync_weights, generation.generate = self._sync_within, self._generate_hooked
        return generation

    def _sync_within(self) -> None:
        """Sync, but not where TRL does: there features do not know yet what will be generated."""
        if self._generating:
            self._sync()

    def _generate_hooked(self, prompts: list[list[int]], images: list | None, num_generations: int) -> tuple:
        for feature in self.features:
            feature.before_generation(prompts)
        for feature in self.features:
            feature.before_turn(prompts)
        require_room(prompts, self.context)
        self._generating = True
        try:
            if self._last_loaded_step < 0:
                self._sync()
                self._last_loaded_step = self.state.global_step
            output = self._sample(prompts, images, num_generations)
        finally:
            self._generating = False
        rollouts = Rollouts(*output[:2])
        for feature in self.features:
            feature.after_generation(rollouts)
        self._note(rollouts.metrics)
        return output

    def _fill_buffer(self, generation_batch, buffer_steps: int) -> None:
        super()._fill_buffer(generation_batch, buffer_steps)
        for index, generated in enumerate(self.generated_slices if self.features else ()):
            if generated:
                inputs = self._buffered_inputs[index]
                columns = inputs["prompts"].shape[1]
                tensors = {
                    PROMPT_IDS: inputs["input_ids"][:, :columns],
                    COMPLETION_IDS: inputs["input_ids"][:, columns:],
                    COMPLETION_MASK: (inputs["labels"][:, columns:] != IGNORED).long(),
                }
                added = {name: value for name, value in self.extended(dict(tensors)).items() if name not in tensors}
                self._buffered_inputs[index] = inputs | added

    @property
    def generated_slices(self) -> list[bool]:
        """Return for each slice of the buffer whether the policy generated it."""
        raise NotImplementedError
