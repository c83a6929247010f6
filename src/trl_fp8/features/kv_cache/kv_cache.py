"""The engine's FP8 KV cache, from the trainer's side: it calibrates the scales and simulates the rounding.

prompts   a calibration that has no rollouts yet runs them
rollouts  were sampled under the scales in force; the pass that scores them is observed for the next scales
batch     gets a copy of the scales in force for each sequence, because TRL shuffles and splits it by sequence
loss      sees k and v (and q) as the cache held them, under the scales of its rollouts; so does a reference
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice

import torch
from trl.data_utils import prepare_multimodal_messages
from trl.distributed import DistributedBackend

from trl_fp8.engine.kernels import EngineKernels
from trl_fp8.engine.protocol import EngineNumerics
from trl_fp8.policy.hook import hook_of
from trl_fp8.quantization.codec.kv_scales import KV_SCALES, KVScales, outlier_layers
from trl_fp8.recipe.names import WRAPPED
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.run.batch import PROMPT_IDS, Batch, Rollouts, highest, lowest, mean_of
from trl_fp8.run.feature import Feature
from trl_fp8.sync.audit import all_reduce_max

from .calibration import Calibration, KVState, next_scales
from .observation import observe_sequences


SCALES_IN_FORCE = "kv_scales"  # key of a batch, [B, L, 3] fp32: scales of its rollouts, the same in every row
FIRST_ROWS = 16  # of the dataset, in which kv_cache_skip_layers='auto' looks for outliers


class KVCache(Feature):
    """Calibrates and simulates the cache. Resolves kv_cache_skip_layers='auto' in the run's recipe."""

    def __init__(self, trainer, recipe: FP8Recipe):
        super().__init__(trainer)
        args = trainer.args
        reduce_max = all_reduce_max if trainer.accelerator.num_processes > 1 else None
        self.hook = hook_of(trainer.model)
        self.hook.skip(recipe.kv_cache_skip_layers)
        if args.skip_layers is None:
            tokens = self._first_prompts()
            with DistributedBackend(trainer.accelerator).gather_params(list(trainer.model.parameters())):
                error_L = observe_sequences(
                    trainer.model, self.hook, tokens, fused_lm_head=True, reduce_max=reduce_max
                ).logit_error_L
            recipe = args.recipe_for(trainer.model, kv_cache_skip_layers=tuple(outlier_layers(error_L)))
            self.hook.skip(recipe.kv_cache_skip_layers)
        trainer.recipe = recipe  # with kv_cache_skip_layers="auto" resolved
        self.reference_hook = trainer.ref_model and hook_of(trainer.ref_model)
        if self.reference_hook:
            self.reference_hook.skip(recipe.kv_cache_skip_layers)
        self.calibration = Calibration(
            self.hook,
            mode=args.kv_calibration,
            margin=args.kv_scale_margin,
            max_tokens=args.kv_calibration_tokens,
            pad_token_id=trainer._tokenizer.pad_token_id,
            fused_lm_head=True,
            has_images=recipe.decoder == WRAPPED,
            reduce_max=reduce_max,
        )
        self.kv_state = KVState()
        self._logged: dict[bool, KVScales] = {}  # in training, and in evaluation

    def engine_part(self):
        from .engine_scales import EngineScales  # needs vllm

        self._in_engine = EngineScales(self.calibrate)
        return self._in_engine

    def calibrate(self) -> KVScales:
        """Make the scales of the policy as it is now; called in each sync."""
        scales, self.kv_state = next_scales(self.kv_state, self.calibration, self.trainer.model_wrapped)
        return scales

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        for hook in filter(None, (self.hook, self.reference_hook)):
            hook.round_queries(numerics.query_rounded)

    def before_generation(self, prompts: list) -> None:
        if self.trainer.rollout_func is not None:  # TRL syncs before anything is tokenized
            self.kv_state = self.kv_state.expecting(self.trainer.prompt_token_ids(prompts))

    def before_turn(self, prompt_ids: list[list[int]]) -> None:
        self.kv_state = self.kv_state.expecting(prompt_ids)

    def after_generation(self, rollouts: Rollouts) -> None:
        training = self.trainer.model.training
        step = self.trainer.state.global_step if training else None
        in_force = self.in_force
        self.kv_state = self.kv_state.after_rollouts(self.calibration, rollouts.sequences, in_force, step)
        if self._logged.get(training) is in_force:
            return
        self._logged[training] = in_force
        scales = in_force.values[list(in_force.layers)]
        rollouts.metrics |= {
            "fp8/calibration_seconds": mean_of(self.trainer.vllm_generation.last_sync.prepare_seconds),
            "fp8/kv_scale_min": lowest(scales.min().item()),
            "fp8/kv_scale_max": highest(scales.max().item()),
            "fp8/kv_margin": highest(self.kv_state.margin),
        }

    @contextmanager
    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        with self.kv_state.watching(self.hook), self._cache(self.trainer.args.simulate_kv_cache):
            yield

    @contextmanager
    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        """Use the policy's scales: the KL divergence compares two models, not two ways to round k and v."""
        hook = self.reference_hook or self.hook  # without a hook of its own it is the policy, adapters disabled
        with self._cache(self.trainer.args.simulate_kv_cache), hook.as_engine(self.hook.scales_L3):
            yield

    def as_rollouts_saw(self) -> AbstractContextManager:
        return self._cache(simulated=True)

    def _cache(self, simulated: bool) -> AbstractContextManager:
        """Count positions as the engine does. If `simulated`, use the cache of the latest rollouts, unless that of the
        rollouts in a loss is in use.
        """
        scales_L3 = self.hook.scales_L3
        if scales_L3 is None and simulated:
            scales_L3 = self._scales_in_force
        return self.hook.as_engine(scales_L3)

    def extend_batch(self, batch: Batch) -> None:
        if self.trainer.args.simulate_kv_cache:
            batch.tensors[SCALES_IN_FORCE] = self._scales_in_force.expand(len(batch.tensors[PROMPT_IDS]), -1, -1)
        batch.record["kv_scales"] = self.in_force.values.tolist()
        saturated_L2, self.kv_state = self.kv_state.saturation(self.calibration)
        if saturated_L2 is not None:
            fraction = saturated_L2[list(self.hook.kv_layers)].mean().item()
            batch.metrics["fp8/kv_saturation_fraction"] = highest(fraction)  # of the worst rank already
            batch.record["kv_saturation"] = saturated_L2.tolist()

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.hook.align(True)
        # Rollouts left by an earlier attempt may have scales although this one does not simulate
        if SCALES_IN_FORCE in inputs:
            scales_L3 = inputs[SCALES_IN_FORCE][0]
            self._in_engine.resume(scales_L3)
            if self.trainer.args.simulate_kv_cache:
                self.hook.simulate(scales_L3)

    def end_loss(self) -> None:
        self.hook.align(False)
        self.hook.simulate(None)

    def banner(self) -> str:
        args = self.trainer.args
        if args.simulate_kv_cache and not args.policy_calls_engine:  # the engine's kernels read its cache anyway
            return "k and v rounded as in the engine's cache"
        return ""

    def export_options(self) -> dict[str, object]:
        if self.trainer.vllm_generation.last_sync is None:
            raise ValueError(
                "save_fp8_model: the KV scales are calibrated at a sync, and there was none. Train first."
            )
        return {"kv_scales": self.in_force}

    def save(self, folder: str) -> None:
        _, self.kv_state = self.kv_state.observed(self.calibration)
        self.kv_state.save(folder, self.trainer.accelerator.process_index)

    def load(self, folder: str) -> None:
        self.kv_state = self.kv_state.loaded(folder, self.trainer.accelerator.process_index)

    @property
    def in_force(self) -> KVScales:
        """Return the scales that the engine got at the latest sync."""
        return self.trainer.vllm_generation.last_sync.carried[KV_SCALES]

    @property
    def _scales_in_force(self) -> torch.Tensor:
        return self.in_force.values.to(self.trainer.accelerator.device)

    def _first_prompts(self) -> list[list[int]]:
        rows = [row for row in islice(self.trainer.train_dataset, FIRST_ROWS) if row.get("prompt")]
        if not rows:  # as with environments that make their own
            raise ValueError(
                f"kv_cache_skip_layers='auto' looks at the first {FIRST_ROWS} rows of train_dataset, and none of them "
                "has a prompt. Name the layers instead, or set kv_cache_skip_layers=None."
            )
        # TRL 1.16 sets this for each batch; its tokenization picks the tools of a row's environment by it
        self.trainer._batch_environments = [row.get("environment") for row in rows]
        return self.trainer.prompt_token_ids([_with_images(row) for row in rows])


def _with_images(row: Mapping) -> str | list:
    """Return a row's prompt, its images within, as TRL puts them there."""
    images = row.get("images") or [row.get("image")]
    return row["prompt"] if images == [None] else prepare_multimodal_messages(row["prompt"], images=images)
