"""`FP8VLLMGeneration`: TRL's `VLLMGeneration` with an FP8 engine, a reload-based sync and an audit.

start:    LLM(dummy weights, quantization_config, kv_cache_dtype)   arguments.engine_arguments
sync:     policy finite? -> calibrate KV scales -> reload [weight_stream -> ledger] -> audit -> verify KV scales
          -> reset prefix cache                     any failure: abort, and refuse to generate until a whole sync
generate: TRL's own, behind that refusal; weights and KV scales are compared with the last sync's when the
          engine is awake
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

import torch
import trl.generation.vllm_generation as trl_generation
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from trl_fp8.engine.protocol import SyncReport
from trl_fp8.engine.vllm.cpu.attention import reference_attention
from trl_fp8.engine.vllm.cpu.experts import register_cpu_experts
from trl_fp8.engine.vllm.cpu.linear import register_cpu_kernel
from trl_fp8.engine.vllm.cpu.ops import register_cpu_ops
from trl_fp8.quantization.kernel_check import require_exact_kernels
from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.ledger import Ledger, Seal, require_auditable
from trl_fp8.sync.policy_checks import require_finite, require_servable
from trl_fp8.sync.replicas import Replicas, all_reduce_max
from trl_fp8.sync.weight_stream import Named, Share, StreamReport, WeightStream
from trl_fp8.upstream import vllm as upstream
from trl_fp8.upstream.patches import substituted

from . import rounding
from .arguments import Device, engine_arguments
from .kv_scales import fp8_attention_layers, verify_kv_scales
from .layout import engine_layout
from .names import require_same_names
from .numerics import engine_numerics, fp8_experts
from .rollout_llm import RolloutLLM


logger = get_logger(__name__)


class FP8VLLMGeneration(VLLMGeneration):
    """Colocated vLLM engine whose weights and KV cache follow a recipe.

    Args:
        recipe: What is FP8 (with nothing FP8: a BF16 engine through the same sync, which is what CPU needs).
        calibrate: Called once per sync if the KV cache is FP8; returns the scales of the current policy, the same on
            every rank.
        engine_kwargs: The user's `vllm_engine_kwargs`.
        share: Gets each weight that a sync quantized, so that the trainer need not do it again.
        return_routes: Whether `llm.routes` remembers the experts that a mixture of experts' routers choose.
        match_rounding: The trainer reproduces the engine's numerics, so pin vLLM's BF16 rounding points.
        **kwargs: As for TRL's `VLLMGeneration`.

    Attributes:
        last_sync: `SyncReport` of the latest sync, or None.
        audit_failures: Number of syncs that failed their audit (each raised).
        numerics: `EngineNumerics`: how the engine computes.
    """

    def __init__(
        self,
        *,
        recipe: FP8Recipe,
        calibrate: Callable[[], KVScales] | None = None,
        engine_kwargs: dict | None = None,
        share: Share | None = None,
        return_routes: bool = False,
        match_rounding: bool = False,
        **kwargs,
    ):
        self.recipe = recipe
        self.calibrate = calibrate
        self.engine_kwargs = engine_kwargs
        self.share = share
        self.return_routes = return_routes
        self.match_rounding = match_rounding
        self.last_sync: SyncReport | None = None
        self.audit_failures = 0
        self._engine_is_whole = False
        self._seal: Seal | None = None
        self._replicas: Replicas | None = None
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        require_servable(self.model)
        on_cpu = self.accelerator.device.type == "cpu"
        device = Device("cpu") if on_cpu else Device("cuda", torch.cuda.get_device_capability())
        if on_cpu:
            register_cpu_kernel()
            register_cpu_experts()
            register_cpu_ops()
        overrides = engine_arguments(
            self.recipe,
            self.model.config,
            device,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_length,
            return_routes=self.return_routes,
            match_rounding=self.match_rounding,
            user=self.engine_kwargs,
        )
        require_exact_kernels(self.accelerator.device)
        upstream.forget_rotary_embeddings()
        if self.return_routes:
            overrides["routes_from"] = "routers" if on_cpu else "vllm"
        with (
            reference_attention() if on_cpu and self.recipe.fp8_kv_cache else nullcontext(),
            substituted(trl_generation, "LLM", lambda **kwargs: RolloutLLM(**(kwargs | overrides))),
        ):
            super()._init_vllm()
        if self.match_rounding:
            (rounding.CPU if on_cpu else rounding.CUDA).require(upstream.engine_config(self.llm))
        engine = upstream.engine_model(self.llm)
        self.numerics = engine_numerics(engine)
        require_auditable(self.numerics.kernels)
        buffers = {self.recipe.engine_name(name) for name, _ in persistent_buffers(self.model)}
        self._layout = engine_layout(engine, buffers)
        require_same_names(self.model, self.recipe, self._layout)
        if self.accelerator.num_processes > 1:
            self._replicas = Replicas(self.accelerator.process_index, self.tensor_parallel_size, all_reduce_max)
        if self.recipe.fp8_kv_cache:
            fp8_attention_layers(engine, self.recipe.kv_cache_skip_layers)
        logger.info(f"engine: {self.numerics}")
        if self._layout.unreadable:
            reasons = sorted(set(self._layout.unreadable.values()))
            if on_cpu:  # vLLM 0.31 packs experts at the first load only: after a sync they would compute with noise
                raise ValueError(
                    f"vLLM's CPU kernels pack tensors of this model, where a sync cannot reach: {'; '.join(reasons)}. "
                    "Run on a GPU, or choose another model."
                )
            logger.warning(
                f"{len(self._layout.unreadable)} high-precision tensors are synced but cannot be read back by the "
                f"audit: {'; '.join(reasons)}."
            )

    def _iter_named_params(self) -> Iterator[Named]:
        """TRL's iteration; adapters that it merged are unmerged even if it is abandoned half-way."""
        for module in self.model.modules():  # after a forward without backward FSDP2 leaves some parameters unsharded
            if isinstance(module, FSDPModule):
                module.reshard()
        try:
            for name, parameter in super()._iter_named_params():
                if ".modules_to_save." not in name:  # of adapters that are not active, such as TRL's reference
                    yield name, parameter
        finally:
            if is_peft_model(self.model) and any(getattr(layer, "merged", False) for layer in self.model.modules()):
                self.model.unmerge_adapter()

    def sync_weights(self) -> None:
        """Bring the engine to the policy's current weights and KV scales, and prove it.

        Raises:
            ValueError: The policy holds NaN or infinities (nothing was sent), or its q, k, v cannot be calibrated.
            RuntimeError: The reload failed (retried once on a single process), or the audit found a difference. The
                engine refuses to generate until a sync succeeds.
        """
        start = time.perf_counter()
        require_finite(self.model, self._replicas and self._replicas.reduce_max)
        self._wake_weights()
        checked = time.perf_counter()
        kv_scales = self.calibrate() if self.recipe.fp8_kv_cache else None
        calibrated = time.perf_counter()
        self._engine_is_whole = False
        try:
            ledger, stream = self._reload(kv_scales)
        except RuntimeError as error:
            if self._replicas:  # the other ranks may be through: a lone retry would hang
                raise
            logger.warning(f"weight sync failed and is repeated once: {error}")
            ledger, stream = self._reload(kv_scales)
        audited = self._audit(ledger, kv_scales)
        self._engine_is_whole, self._seal = True, ledger.seal
        relative_error, dead_blocks = stream.read()
        self.last_sync = SyncReport(
            seconds=time.perf_counter() - start,
            quantize_seconds=stream.seconds,
            calibration_seconds=calibrated - checked,
            audited_tensors=audited,
            bytes_sent=stream.bytes_sent,
            fp8_weights=stream.fp8_weights,
            weight_relative_error=relative_error,
            dead_blocks=dead_blocks,
            kv_scales=kv_scales,
        )

    def generate(
        self,
        prompts: list[list[int]],
        images: list | None,
        num_generations: int,
        profiler: AbstractContextManager | None = None,
    ) -> tuple:
        """As TRL's, but only from an engine that holds what its last sync was audited to have brought, KV scales
        included.
        """
        if self.enable_sleep_mode and self.llm.weights_kept:
            self._wake_weights()  # the weights of the last sync: TRL would sync again
        will_sync = self.enable_sleep_mode and self._llm_weights_sleeping
        if not (self._engine_is_whole or will_sync):
            raise RuntimeError(
                "the engine holds no complete policy: weights were never synced, or the last sync failed. Call "
                "sync_weights() first."
            )
        return super().generate(prompts, images, num_generations, self._verified(profiler or nullcontext()))

    @contextmanager
    def _verified(self, profiler: AbstractContextManager) -> Iterator[None]:
        """TRL enters `profiler` after waking the KV cache and right before sampling."""
        self._verify_engine()
        with profiler:
            yield

    def _verify_engine(self) -> None:
        """Compare the engine's weights and KV scales with what the last sync was audited to have brought."""
        try:
            self._seal.require_unbroken()
            self._verify_kv_scales(self.last_sync.kv_scales)
        except RuntimeError:
            self.audit_failures += 1
            self._engine_is_whole = False
            raise

    def _verify_kv_scales(self, kv_scales: KVScales | None) -> None:
        if kv_scales is not None:
            verify_kv_scales(upstream.engine_model(self.llm), kv_scales, self.recipe.kv_cache_skip_layers)

    def _wake_weights(self) -> None:
        if self.enable_sleep_mode:
            trl_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

    def _reload(self, kv_scales: KVScales | None) -> tuple[Ledger, StreamReport]:
        """One pass of the whole model into the engine. On any error the engine's own tensors are put back."""
        ledger = Ledger(self._layout, self._replicas)
        try:
            with closing(self._iter_named_params()) as parameters:
                merged = is_peft_model(self.model)
                # vLLM reads the tensors of a fused layer when it has all of them
                short_lived = merged or self._dist.is_zero3
                stream = WeightStream(
                    parameters,
                    self.recipe,
                    kv_scales,
                    copy=short_lived,
                    round_here=False,
                    buffers=persistent_buffers(self.model),
                    share=None if merged else self.share,  # the trainer's own base is another weight then
                )
                upstream.reload_weights(self.llm, self._transport(stream.timed(ledger.record(stream))))
        except BaseException:
            upstream.abort_reload(self.llm)
            raise
        upstream.rebuild_expert_kernels(fp8_experts(upstream.engine_model(self.llm)))
        return ledger, stream.report

    def _transport(self, stream: Iterator[Named]) -> Iterator[Named]:
        """What lies between the ledger and the engine. Colocated: nothing."""
        return stream

    def _audit(self, ledger: Ledger, kv_scales: KVScales | None) -> int:
        try:
            audited = ledger.audit(kv_scales)
            self._verify_kv_scales(kv_scales)
        except RuntimeError:
            self.audit_failures += 1
            raise
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight sync, because requests are still running: cached "
                "prefixes of the old weights would be reused. Finish or abort running requests before the sync."
            )
        return audited
