"""`FP8GRPOConfig`: TRL's `GRPOConfig` plus the flags that say what is FP8.

Each flag is described once, in its `help`; docs/configuration.md is generated from here. Three defaults of TRL's own
depend on whether anything is FP8, so they are declared as None and resolved in `__post_init__`: with every FP8 flag
off the config is TRL's, field for field.
"""

from dataclasses import dataclass, field, fields

from torch import nn
from trl import GRPOConfig

from trl_fp8.correction.importance import RolloutCorrection
from trl_fp8.correction.presets import correction_from
from trl_fp8.flags.forward import ForwardFlags
from trl_fp8.flags.kv_cache import KVCacheFlags
from trl_fp8.flags.router import RouterFlags
from trl_fp8.flags.sampling import check_generation_kwargs
from trl_fp8.quantization.e4m3 import check_scale_format
from trl_fp8.quantization.formats import FORMATS, format_named
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.run.launch import fsdp1_message


# What the trainer sets itself when it starts vLLM (the first line is TRL's own list).
RESERVED_ENGINE_KWARGS = (
    *("model", "tensor_parallel_size", "distributed_executor_backend", "seed", "logprobs_mode", "enable_sleep_mode"),
    *("quantization", "hf_overrides", "load_format", "kv_cache_dtype", "kv_cache_dtype_skip_layers"),
    *("model_impl", "trust_remote_code", "enable_return_routed_experts", "aux_output_config"),
)


@dataclass
class FP8GRPOConfig(ForwardFlags, RouterFlags, KVCacheFlags, GRPOConfig):
    """Configuration of `FP8GRPOTrainer`: every field of `trl.GRPOConfig`, and the ones below.

    Raises:
        ValueError: From `__post_init__`, if a flag's value is unknown or does not go with another; the message names
            flag, value, reason and remedy.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["rollout_correction", "vllm_engine_kwargs"]

    fp8_weights: bool = field(
        default=True,
        metadata={
            "help": "Whether the engine runs the policy's linear layers in FP8 (W8A8). Weights are quantized from the "
            "policy at every sync."
        },
    )
    fp8_weight_format: str = field(
        default="blocks",
        metadata={"help": "Format of FP8 weights: " + " ".join(f"{name!r}: {f.help}" for name, f in FORMATS.items())},
    )
    fp8_scale_format: str = field(
        default="pow2",
        metadata={
            "help": "Format of the weight scales: 'pow2' (powers of two: exact in BF16, and lossless where vLLM's "
            "DeepGEMM path requantizes) or 'fp32' (amax / 448)."
        },
    )
    fp8_ignored_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Linear layers and experts to keep in high precision, by exact name, e.g. "
            "'model.layers.0.mlp.down_proj' or 'model.layers.0.mlp.experts'. Layers that vLLM fuses with a named one "
            "(q, k, v and gate, up) are kept too."
        },
    )
    rollout_correction: dict | str | None = field(
        default=None,
        metadata={
            "help": "Correction of the rollout's mismatch beyond TRL's four modes: the name of a preset (e.g. "
            "'fp8_geometric_token_tis', 'nemo_icepop', 'monitor') or the fields of `RolloutCorrection` as JSON, e.g. "
            '\'{"level": "token", "bound_max": 2.0, "reject": ["token_veto:1e-4:"]}\'. Not set: what '
            "`vllm_importance_sampling_mode` says. See docs/rollout_correction.md."
        },
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further keyword arguments of `vllm.LLM` for the colocated engine, e.g. "
            "'{\"enforce_eager\": true}'. What the trainer sets itself (quantization, KV cache type, parallelism, "
            "seed, ...) is refused; dictionaries within are merged with the trainer's, setting by setting."
        },
    )
    fp8_run_log: bool = field(
        default=True,
        metadata={
            "help": "Whether output_dir/fp8_run.jsonl is written, from which `trl-fp8 report` draws: facts of the "
            "run, its logs, and of each generation a histogram of log-ratios, some pairs of log-probs and the KV "
            "scales (a few KiB)."
        },
    )

    # Defaults of TRL's that depend on the flags above; None means "not set by the user"
    use_vllm: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to generate completions with vLLM. Not set: True if anything is FP8, else "
            "False, as in TRL."
        },
    )
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "How the mismatch between rollout and trainer log-probs is corrected: 'token_truncate', "
            "'token_mask', 'sequence_truncate' or 'sequence_mask' (TRL's four modes). Not set: 'token_truncate' if "
            "anything is FP8, else 'sequence_mask', as in TRL."
        },
    )
    vllm_importance_sampling_clip_max: float | str | None = field(
        default="auto",
        metadata={
            "help": "Upper bound of the importance ratio, or None for no upper bound. 'auto': 2.0 if anything is FP8, "
            "else 3.0, as in TRL."
        },
    )

    @property
    def any_fp8(self) -> bool:
        return self.fp8_weights or self.kv_cache_dtype != "auto"

    @property
    def own_engine(self) -> bool:
        """Whether rollouts need this project's engine and not TRL's."""
        return self.any_fp8 or self.routes_returned

    def __post_init__(self):
        self._check_values()
        mode_set_by_user = self.vllm_importance_sampling_mode is not None
        self._resolve_defaults()
        super().__post_init__()
        self.check_router(self.use_vllm, self.vllm_mode, self._blind_pass)
        if self.any_fp8:
            self._check_rollouts()
        if self.own_engine:
            self._check_engine_kwargs()
            check_generation_kwargs(self.generation_kwargs or {}, self.temperature)
        if self.any_fp8 or self.rollout_correction is not None:
            self._check_sampling()
            self._check_correction(mode_set_by_user)

    @property
    def correction(self) -> RolloutCorrection | None:
        """The correction in force; None where TRL does without one, or does it alone (nothing FP8, no preset)."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        if self.rollout_correction is not None:
            return correction_from(self.rollout_correction)
        if not self.any_fp8:
            return None
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        return RolloutCorrection.from_trl_mode(self.vllm_importance_sampling_mode, *bounds)

    def recipe_for(self, model: nn.Module, kv_cache_skip_layers: tuple[int, ...] = ()) -> FP8Recipe:
        """Which tensors of `model` are FP8 under these flags, on this machine; `kv_cache_skip_layers` with 'auto'
        resolved.
        """
        return recipe_for_model(
            model,
            fp8_weights=self.fp8_weights,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_cache_skip_layers=self.skip_layers or kv_cache_skip_layers,
            weight_format=self.fp8_weight_format,
            scale_format=self.fp8_scale_format,
            kv_scale_margin=self.kv_scale_margin,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            ignored_modules=tuple(self.fp8_ignored_modules or ()),
            expert_kernels=self.device.type != "cpu",
        )

    @property
    def _blind_pass(self) -> str | None:
        """The flag and value for which TRL's old-log-prob pass does not see every token of the rollouts."""
        if not self.vllm_importance_sampling_correction:
            return "vllm_importance_sampling_correction=False"
        return "mask_truncated_completions=True" if self.mask_truncated_completions else None

    def _check_values(self) -> None:
        self.check_kv_cache(self._blind_pass)
        self.check_forward(self.fp8_weights, self.fp16)
        format_named(self.fp8_weight_format)
        try:
            check_scale_format(self.fp8_scale_format)
        except ValueError as error:
            raise ValueError(f"fp8_{error}") from None

    def _resolve_defaults(self) -> None:
        trl_defaults = {item.name: item.default for item in fields(GRPOConfig)}
        if self.simulate_kv_cache is None:
            nothing_larger = self.fp8_forward == "full" or not self.fp8_weights
            self.simulate_kv_cache = self.kv_cache_dtype == "fp8" and nothing_larger
        self.check_attention_weights()
        if self.kv_calibration is None:
            self.kv_calibration = "rollout" if self._blind_pass is None else "policy"
        if self.use_vllm is None:
            self.use_vllm = True if self.any_fp8 else trl_defaults["use_vllm"]
        if self.vllm_importance_sampling_mode is None:
            name = "vllm_importance_sampling_mode"
            self.vllm_importance_sampling_mode = "token_truncate" if self.any_fp8 else trl_defaults[name]
        if self.vllm_importance_sampling_clip_max == "auto":
            name = "vllm_importance_sampling_clip_max"
            self.vllm_importance_sampling_clip_max = 2.0 if self.any_fp8 else trl_defaults[name]
        elif isinstance(self.vllm_importance_sampling_clip_max, str):
            self.vllm_importance_sampling_clip_max = float(self.vllm_importance_sampling_clip_max)

    def _check_rollouts(self) -> None:
        flags = f"fp8_weights={self.fp8_weights}, kv_cache_dtype={self.kv_cache_dtype!r}"
        off = "fp8_weights=False with kv_cache_dtype='auto'"
        if not self.use_vllm:
            raise ValueError(
                f"use_vllm=False with {flags}: FP8 rollouts run in vLLM. Set use_vllm=True, or switch FP8 off: {off}."
            )
        if self.vllm_mode != "colocate":
            raise ValueError(
                f"vllm_mode={self.vllm_mode!r} with {flags}: the trainer reads every FP8 weight and KV scale back "
                "from the engine after each sync, which it can do in its own process only, and TRL's transfer to a "
                "server neither quantizes weights nor carries KV scales. Set vllm_mode='colocate' "
                "(vllm_enable_sleep_mode=True frees its memory during the optimizer step), or keep the "
                f"server in BF16: {off}."
            )
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        if self.vllm_importance_sampling_mode not in modes:
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} is not a correction mode. Use "
                f"one of {list(modes)}."
            )
        if self.fsdp and int(self.fsdp_plugin_args.get("fsdp_version", 2)) == 1:
            raise ValueError(fsdp1_message("fsdp_config={'version': 1}", "fsdp_config={'version': 2}"))

    def _check_sampling(self) -> None:
        """Correction compares log-probs of the full softmax; truncated sampling renormalizes those of the rollout."""
        if not self.vllm_importance_sampling_correction:
            return
        neutral_fields = {
            "top_p": (1.0,),
            "top_k": (0, -1, None),
            "min_p": (None, 0.0),
            "repetition_penalty": (1.0,),
            "vllm_structured_outputs_regex": (None,),
        }
        neutral = neutral_fields | {  # the rest can only be in generation_kwargs
            "presence_penalty": (0.0,),
            "frequency_penalty": (0.0,),
            "min_tokens": (0,),
            **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"), (None,)),
        }
        given = {name: getattr(self, name) for name in neutral_fields} | (self.generation_kwargs or {})
        changing = {name: value for name, value in given.items() if name in neutral and value not in neutral[name]}
        if changing:
            listed = ", ".join(f"{name}={value!r}" for name, value in changing.items())
            raise ValueError(
                f"{listed} with vllm_importance_sampling_correction=True: vLLM's log-probs are then those of another "
                "distribution (renormalized over the tokens that survive), the trainer's are not, so every importance "
                "ratio would be off. Sample from the full distribution (top_p=1.0, top_k=0, min_p=None, "
                "repetition_penalty=1.0, no other restriction), or set vllm_importance_sampling_correction=False and "
                "accept uncorrected FP8 rollouts."
            )

    def _check_correction(self, mode_set_by_user: bool) -> None:
        given = f"rollout_correction={self.rollout_correction!r}"
        if self.rollout_correction is not None and mode_set_by_user:
            raise ValueError(
                f"{given} and vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} both choose the "
                "correction. Remove one of them."
            )
        if self.rollout_correction is not None and not (self.use_vllm and self.vllm_importance_sampling_correction):
            raise ValueError(
                f"{given} with use_vllm={self.use_vllm}, vllm_importance_sampling_correction="
                f"{self.vllm_importance_sampling_correction}: there is nothing to correct. Set both to True, or "
                "remove rollout_correction (its preset 'monitor' only measures)."
            )
        try:
            correction = self.correction
        except ValueError as error:
            flag = given if self.rollout_correction is not None else "vllm_importance_sampling_mode and clip bounds"
            raise ValueError(f"{flag}: {error}") from None
        if correction is not None and self.loss_type == "vespo" and not correction.fits_vespo:
            raise ValueError(
                f"loss_type='vespo' with a correction at level={correction.level!r}: VESPO sums log-weights over the "
                "tokens, which would count a sequence's ratio once per token. Use level 'token' or 'geometric'."
            )

    def _check_engine_kwargs(self) -> None:
        if self.vllm_model_impl == "transformers":
            raise ValueError(
                "vllm_model_impl='transformers' wraps the model's class for the whole process, and the trainer's own "
                "model of that class then fails in a colocated engine. Set vllm_model_impl='vllm'."
            )
        reserved = sorted(set(self.vllm_engine_kwargs or {}) & set(RESERVED_ENGINE_KWARGS))
        if reserved:
            raise ValueError(
                f"vllm_engine_kwargs sets {reserved}, which the trainer sets itself. Remove them; use the config's "
                "own flags (kv_cache_dtype, vllm_tensor_parallel_size, vllm_enable_sleep_mode, seed, ...)."
            )
        if (self.vllm_engine_kwargs or {}).get("enable_expert_parallel"):
            raise ValueError(
                "vllm_engine_kwargs sets enable_expert_parallel=True: ranks would hold different experts, and the "
                "audit knows parts of every expert only. Remove it; vllm_tensor_parallel_size splits each expert."
            )
