"""The trainer's side of the engine's FP8 KV cache: it calibrates the scales and simulates the rounding.

`KVCache` has one method for each hook of a step. In the order of a step:

    `before_turn`              keeps the coming prompts, over which a calibration may run the policy
    `calibrate`                computes scales at each sync, which sends them to the engine (engine_scales.py)
    `scoring`                  observes q, k and v of the old-log-prob pass, which decide the next scales

With `simulate_kv_cache` the trainer also rounds k and v (and q) as the engine's cache does:

    `scoring`, `reference`     round under the scales of the latest sync
    `extend_batch`             adds these scales to the batch, a copy for each sequence, because TRL shuffles sequences
    `begin_loss`               rounds under the scales in the batch
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


ROLLOUT_SCALES = "kv_scales"  # key of a batch. [B, L, 3] fp32: the scales of its rollouts, the same in every row
FIRST_ROWS = 16  # rows of the dataset in which kv_cache_skip_layers='auto' looks for outliers


class KVCache(Feature):
    """Calibrates and simulates the cache. Replaces kv_cache_skip_layers='auto' in the recipe by layer numbers."""

    def __init__(self, trainer, recipe: FP8Recipe):
        super().__init__(trainer)
        args = trainer.args
        reduce_max = all_reduce_max if trainer.accelerator.num_processes > 1 else None
        self.hook = hook_of(trainer.model)
        self.hook.skip(recipe.kv_cache_skip_layers)
        if args.skip_layers is None:  # kv_cache_skip_layers='auto'; without the flag `skip_layers` is ()
            tokens = self._first_prompts()
            with DistributedBackend(trainer.accelerator).gather_params(list(trainer.model.parameters())):
                error_L = observe_sequences(
                    trainer.model,
                    self.hook,
                    tokens,
                    fused_lm_head=trainer.has_fused_head,
                    reduce_max=reduce_max,
                    forward=trainer.packed_forward,
                ).logit_error_L
            recipe = args.recipe_for(trainer.model, kv_cache_skip_layers=tuple(outlier_layers(error_L)))
            self.hook.skip(recipe.kv_cache_skip_layers)
        trainer.recipe = recipe  # 'auto' is replaced by layer numbers
        self.reference_hook = hook_of(trainer.ref_model) if trainer.ref_model is not None else None
        if self.reference_hook:
            self.reference_hook.skip(recipe.kv_cache_skip_layers)
        self.calibration = Calibration(
            self.hook,
            mode=args.kv_calibration,
            margin=args.kv_scale_margin,
            max_tokens=args.kv_calibration_tokens,
            pad_token_id=trainer._tokenizer.pad_token_id,
            fused_lm_head=trainer.has_fused_head,
            has_images=recipe.decoder == WRAPPED,
            reduce_max=reduce_max,
            forward=trainer.packed_forward,
        )
        self.kv_state = KVState()
        self._engine_scales = None  # an `EngineScales`; `engine_part` sets it
        self._sent: list[KVScales] = []  # scales of each sync that this process made, the latest last
        self._factors: list[float] = []  # for each sync in `_sent`: factor on the margin in its scales, see `KVState`
        # True for training, False for evaluations -> the scales whose metrics were added last. Each is logged once
        self._logged: dict[bool, KVScales] = {}

    def engine_part(self):
        from .engine_scales import EngineScales  # needs vllm

        self._engine_scales = EngineScales(self.calibrate)
        return self._engine_scales

    def calibrate(self) -> KVScales:
        """Return new scales for the policy's present weights. Each sync calls this. Collective."""
        scales, self.kv_state = next_scales(self.kv_state, self.calibration, self.trainer.model_wrapped)
        return scales

    def engine_started(self, numerics: EngineNumerics, kernels: EngineKernels | None) -> None:
        self.hook.round_queries(numerics.query_rounded)
        if self.reference_hook is not None:
            self.reference_hook.round_queries(numerics.query_rounded)

    def before_generation(self, prompts: list) -> None:
        if self.trainer.rollout_func is not None:  # then TRL syncs without calling `before_turn`
            self.kv_state = self.kv_state.expecting(self.trainer.prompt_token_ids(prompts))

    def before_turn(self, prompt_ids: list[list[int]]) -> None:
        self.kv_state = self.kv_state.expecting(prompt_ids)

    def after_sync(self) -> None:
        scales = self.latest_scales
        # Scales are powers of two and rarely change. To save memory, `_sent` repeats the object of equal scales
        if self._sent and torch.equal(self._sent[-1].values, scales.values):
            scales = self._sent[-1]
        self._sent.append(scales)
        self._factors.append(self.kv_state.factor_in_use)

    def after_generation(self, rollouts: Rollouts) -> None:
        # Age 0 is never refused: these rollouts were sampled after the latest sync
        if rollouts.age >= max(1, len(self._sent)):
            raise RuntimeError(
                f"rollouts are {rollouts.age} syncs old, but this process has made only {len(self._sent)} syncs: the "
                "rollouts come from another run, or from before a resume."
            )
        # The rollouts may come from any of the latest `age` + 1 syncs. Count clipped values under the smallest scales
        # of these syncs, because the smallest scales clip most. Pass their smallest factor on the margin, too: if the
        # margin was doubled after these rollouts, they do not double it again
        latest = self.latest_scales
        candidates = [latest, *self._sent[-1 - rollouts.age : -1]]
        smallest = KVScales(torch.stack([scales.values for scales in candidates]).amin(0))
        training = self.trainer.model.training
        step = self.trainer.state.global_step if training else None
        factor = min(self._factors[-1 - rollouts.age :], default=None)
        self.kv_state = self.kv_state.after_rollouts(self.calibration, rollouts.sequences, smallest, step, factor)
        if self._logged.get(training) is latest:
            return
        self._logged[training] = latest
        scales = latest.values[list(latest.layers)]
        rollouts.metrics |= {
            "fp8/calibration_seconds": mean_of(self.trainer.vllm_generation.last_sync.prepare_seconds),
            "fp8/kv_scale_min": lowest(scales.min().item()),
            "fp8/kv_scale_max": highest(scales.max().item()),
            "fp8/kv_margin": highest(self.kv_state.margin_in_use),
        }

    @contextmanager
    def scoring(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        with self.kv_state.watching(self.hook), self._as_engine(self.trainer.args.simulate_kv_cache):
            yield

    @contextmanager
    def reference(self, mask: torch.Tensor, logits_to_keep: int) -> Iterator[None]:
        """Round the reference's k and v as the policy's: under the same scales, or not at all.

        The KL divergence compares two models, not two ways to round k and v.
        """
        with self._as_engine(self.trainer.args.simulate_kv_cache):  # sets `self.hook.scales_L3`, which is read below
            # Without a reference model the policy is the reference, with other adapters or none. The hook is the same
            hook = self.reference_hook or self.hook
            with hook.as_engine(self.hook.scales_L3):
                yield

    def as_rollouts_saw(self) -> AbstractContextManager:
        return self._as_engine(simulated=True)

    def _as_engine(self, simulated: bool) -> AbstractContextManager:
        """Count positions as the engine does inside the block, and set the scales under which the policy rounds k, v.

        Inside a loss the scales of `begin_loss` stay in force. Elsewhere the policy rounds under the scales of the
        latest sync if `simulated` is true, and does not round otherwise.
        """
        scales_L3 = self.hook.scales_L3
        if scales_L3 is None and simulated:
            scales_L3 = self._latest_scales_L3
        return self.hook.as_engine(scales_L3)

    def extend_batch(self, batch: Batch) -> None:
        if self.trainer.args.simulate_kv_cache:
            rows = len(batch.tensors[PROMPT_IDS])
            batch.tensors[ROLLOUT_SCALES] = self._latest_scales_L3.expand(rows, -1, -1)
        batch.record["kv_scales"] = self.latest_scales.values.tolist()
        saturated_L2, self.kv_state = self.kv_state.saturation(self.calibration)
        if saturated_L2 is not None:
            fp8_layers = [layer for layer in self.hook.kv_layers if layer not in self.hook.skip_layers]
            fraction = saturated_L2[fp8_layers].mean().item()
            batch.metrics["fp8/kv_saturation_fraction"] = highest(fraction)  # the same on all ranks
            batch.record["kv_saturation"] = saturated_L2.tolist()

    def begin_loss(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.hook.align(True)  # count positions as the engine does, as in `scoring`, even if nothing is simulated
        # A resumed run may begin with a loss on saved rollouts. If the saved run simulated the cache, the batch has
        # their scales. `send_weights` may deliver the policy before this loss, and sends these scales, because no sync
        # has calibrated any yet. This is so even if this run does not simulate the cache. After the first sync
        # `resume` does nothing
        if ROLLOUT_SCALES in inputs:
            scales_L3 = inputs[ROLLOUT_SCALES][0]
            self._engine_scales.resume(scales_L3)
            if self.trainer.args.simulate_kv_cache:
                self.hook.simulate(scales_L3)

    def end_loss(self) -> None:
        self.hook.align(False)
        self.hook.simulate(None)

    def banner(self) -> str:
        args = self.trainer.args
        # A policy that calls the engine's kernels always reads a rounded cache, so it needs no mention
        if args.simulate_kv_cache and not args.policy_calls_engine:
            return "k and v rounded as in the engine's cache"
        return ""

    def export_options(self) -> dict[str, object]:
        if self.trainer.vllm_generation.last_sync is None:
            raise ValueError(
                "save_fp8_model: the KV scales are calibrated at a sync, and there was none. Train first."
            )
        return {"kv_scales": self.latest_scales}

    def save(self, folder: str) -> None:
        _, self.kv_state = self.kv_state.observed(self.calibration)  # include what the latest forward has shown
        self.kv_state.save(folder, self.trainer.accelerator.process_index)

    def load(self, folder: str) -> None:
        self.kv_state = self.kv_state.loaded(folder, self.trainer.accelerator.process_index)

    @property
    def latest_scales(self) -> KVScales:
        """Return the scales that the latest sync sent to the engine."""
        return self.trainer.vllm_generation.last_sync.carried[KV_SCALES]

    @property
    def _latest_scales_L3(self) -> torch.Tensor:
        return self.latest_scales.values.to(self.trainer.accelerator.device)

    def _first_prompts(self) -> list[list[int]]:
        """Return the token ids of the first prompts of the dataset."""
        rows = [row for row in islice(self.trainer.train_dataset, FIRST_ROWS) if row.get("prompt")]
        if not rows:  # for example if environments make the prompts
            raise ValueError(
                f"kv_cache_skip_layers='auto' looks at the first {FIRST_ROWS} rows of train_dataset, and none of them "
                "has a prompt. Name the layers instead, or set kv_cache_skip_layers=None."
            )
        # TRL 1.16 sets this attribute for each batch. Tokenization looks up the tools of a row's environment in it
        self.trainer._batch_environments = [row.get("environment") for row in rows]
        prompts = []
        for row in rows:
            prompt = row["prompt"]
            images = row.get("images") or [row.get("image")]
            if images != [None]:  # put the images into the prompt, as TRL does
                prompt = prepare_multimodal_messages(prompt, images=images)
            prompts.append(prompt)
        return self.trainer.prompt_token_ids(prompts)
