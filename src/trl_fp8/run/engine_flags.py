"""Flags of the colocated vLLM engine and of its FP8 weights, and the check of `generation_kwargs`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_fp8.quantization.formats import BLOCKS, FORMATS, format_named

from .feature import FlagGroup, flag


# Arguments of vLLM that the trainer sets itself (the first line is TRL's own list)
RESERVED_ENGINE_KWARGS = frozenset(
    """
    model max_model_len tensor_parallel_size distributed_executor_backend seed logprobs_mode enable_sleep_mode
    quantization hf_overrides load_format kv_cache_dtype kv_cache_dtype_skip_layers model_impl trust_remote_code
    enable_return_routed_experts aux_output_config mm_device_do_normalize return_sampling_mask
    """.split()
)
# Public fields of vLLM 0.31's SamplingParams
VLLM_NAMES = frozenset(
    """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids
    """.split()
)
# transformers' name of a setting -> the flag to set instead
_INSTEAD = {
    "eos_token_id": "generation_kwargs={'stop_token_ids': [...]}",
    "max_length": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "num_return_sequences": "num_generations",
    "stop_strings": "generation_kwargs={'stop': [...]}",
}
_KEEPS_OLD_KEYS = (
    "it keeps results for prompts outside of the engine's own cache, where no sync deletes them: rollouts would read "
    "keys and values of older weights. Remove it"
)
# Argument of vLLM that is refused if it is set and not false -> why, and what to do
REFUSED_ENGINE_KWARGS = {
    "kv_transfer_config": _KEEPS_OLD_KEYS,
    "kv_offloading_size": _KEEPS_OLD_KEYS,
    "ec_transfer_config": _KEEPS_OLD_KEYS,
    "enable_lora": "the trainer sends adapters to the engine itself, and vLLM's own LoRA would rename the layers "
    "that it writes to. Remove it; with fp8_base=True adapters stay apart from their base",
    "enable_expert_parallel": "ranks would hold different experts, and the audit expects a part of every expert. "
    "Remove it; vllm_tensor_parallel_size splits each expert",
}
SERVER_TRANSPORTS = ("auto", "broadcast", "cuda_ipc")
# Sampling parameter that the trainer sets -> why users cannot set it
_SET_BY_TRAINER = {
    "n": "num_generations decides how many completions a prompt has",
    "seed": "all completions of a prompt would be the same; the config's own seed decides what is sampled",
    "logprobs": "the correction reads the log-prob of the sampled token",
}


@dataclass
class WeightFlags(FlagGroup):
    """Flags of the engine's FP8 weights and of their scales."""

    OFF_VALUES = {"fp8_weights": False}

    fp8_weights: bool = flag(
        True,
        "Whether the engine runs the policy's linear layers in FP8 (W8A8). Weights are quantized from the policy at "
        "every sync.",
    )
    fp8_weight_format: str = flag(
        "blocks", "Format of FP8 weights: " + " ".join(f"{name!r}: {spec.help}" for name, spec in FORMATS.items())
    )
    fp8_scale_format: str = flag(
        "pow2",
        "Format of the weight scales: 'pow2' (powers of two: exact in BF16, and lossless where vLLM's "
        "DeepGEMM path requantizes) or 'fp32' (amax / 448).",
    )
    fp8_ignored_modules: list[str] | None = flag(
        None,
        "Linear layers and experts to keep in high precision, by exact name, e.g. "
        "'model.layers.0.mlp.down_proj' or 'model.layers.0.mlp.experts'. Layers that vLLM fuses with a named one "
        "(q, k, v and gate, up) are kept too.",
    )

    def recipe_fields(self) -> dict[str, Any]:
        return {
            "fp8_weights": self.fp8_weights,
            "weight_format": self.fp8_weight_format,
            "scale_format": self.fp8_scale_format,
            "tensor_parallel_size": self.vllm_tensor_parallel_size,
            "ignored_modules": tuple(self.fp8_ignored_modules or ()),
        }

    def resolve(self) -> None:
        weight_format = format_named(self.fp8_weight_format)
        if weight_format is not BLOCKS and not self.fp8_weights:
            raise ValueError(
                f"fp8_weight_format={self.fp8_weight_format!r} with fp8_weights=False: there are no FP8 weights that "
                "it would concern. Set fp8_weights=True, or remove it."
            )
        try:
            weight_format.require_scale_format(self.fp8_scale_format)
        except ValueError as error:
            # The message begins with "scale_format=", the name without the prefix of the flag
            raise ValueError(f"fp8_{error}") from None


@dataclass
class EngineFlags(FlagGroup):
    """Flags of the vLLM engine."""

    AS_JSON = ("vllm_engine_kwargs",)

    vllm_engine_kwargs: dict | str | None = flag(
        None,
        "Further keyword arguments of `vllm.LLM` for the colocated engine, e.g. "
        "'{\"enforce_eager\": true}'. What the trainer sets itself (quantization, KV cache type, parallelism, "
        "seed, ...) is refused; dictionaries within are merged with the trainer's, setting by setting.",
    )
    use_vllm: bool | None = flag(
        None,
        "Whether to generate completions with vLLM. Not set: True if anything is FP8, else False, as in TRL.",
    )

    vllm_server_transport: str = flag(
        "auto",
        "How a whole policy travels to vLLM servers. 'auto': by files, else HTTP bodies. 'broadcast': from GPU to GPU "
        "by NCCL (gloo on CPU). 'cuda_ipc': in the memory of a GPU that both see. Patches travel as with 'auto'.",
    )

    def resolve(self) -> None:
        if self.use_vllm is None:
            self.use_vllm = True if self.any_fp8 else self.trl_default("use_vllm")
        if self.vllm_server_transport not in SERVER_TRANSPORTS:
            raise ValueError(
                f"vllm_server_transport={self.vllm_server_transport!r}: it is one of {', '.join(SERVER_TRANSPORTS)}."
            )

    def check(self) -> None:
        if self.vllm_server_transport != "auto" and not (self.own_engine and self.vllm_mode == "server"):
            raise ValueError(
                f"vllm_server_transport={self.vllm_server_transport!r} with vllm_mode={self.vllm_mode!r} and "
                f"fp8_weights={self.fp8_weights}: it says how weights travel to a server of trl-fp8 serve. Set "
                "vllm_mode='server' and something FP8, or remove it."
            )
        if self.any_fp8:
            self._check_rollouts()
        if self.own_engine:
            self._check_memory_and_context()
            self._check_engine_kwargs()
            check_generation_kwargs(self.generation_kwargs or {}, self.temperature)

    def _check_rollouts(self) -> None:
        if not self.use_vllm:
            off_values = {}  # flag -> the value that switches FP8 off
            for group in self.groups():
                off_values |= group.OFF_VALUES
            flags = ", ".join(f"{name}={getattr(self, name)!r}" for name in off_values)
            off = " with ".join(f"{name}={value!r}" for name, value in off_values.items())
            raise ValueError(
                f"use_vllm=False with {flags}: FP8 rollouts run in vLLM. Set use_vllm=True, or switch FP8 off: {off}."
            )
        if self.vllm_mode == "server":
            self._check_server()
        if self.fsdp and int(self.fsdp_plugin_args.get("fsdp_version", 2)) == 1:
            raise ValueError(fsdp1_message("fsdp_config={'version': 1}", "fsdp_config={'version': 2}"))

    def _check_server(self) -> None:
        """Raise `ValueError` for flags that belong to the server's command, or that do not work with a server."""
        if self.vllm_engine_kwargs:
            raise ValueError(
                f"vllm_engine_kwargs={self.vllm_engine_kwargs!r} with vllm_mode='server': the engine starts in the "
                "server. Pass them to trl-fp8 serve as vLLM's own options, and remove them here."
            )
        if "," in (self.vllm_server_base_url or "") and self.policy_calls_engine:
            raise ValueError(
                f"vllm_server_base_url={self.vllm_server_base_url!r} with fp8_forward='one_forward': it has been "
                "tried with one server. Set vllm_server_base_url to the address of one, or fp8_forward='off'."
            )
        if self.vllm_enable_sleep_mode:
            raise ValueError(
                "vllm_enable_sleep_mode=True with vllm_mode='server' and FP8: it needs an engine in the trainer's "
                "process, which frees memory for it. Set vllm_mode='colocate', or vllm_enable_sleep_mode=False."
            )

    def _check_memory_and_context(self) -> None:
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise ValueError(
                f"vllm_gpu_memory_utilization={self.vllm_gpu_memory_utilization}: it is the share of a GPU's memory "
                "that the engine takes, above 0 and up to 1. Set it to 0.3, for example."
            )
        if self.vllm_max_model_length is not None and self.vllm_max_model_length <= self.max_completion_length:
            raise ValueError(
                f"vllm_max_model_length={self.vllm_max_model_length} with max_completion_length="
                f"{self.max_completion_length}: the engine's context holds a prompt and its completion, and leaves no "
                "room for a prompt. Raise vllm_max_model_length to the longest prompt's tokens plus "
                "max_completion_length, or leave it out."
            )

    def _check_engine_kwargs(self) -> None:
        names = ("use_transformers_continuous_batching", "transformers_continuous_batching_config")
        ignored = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name)]
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)} with use_vllm={self.use_vllm}: rollouts come from vLLM, which has continuous "
                "batching of its own, and transformers' would be ignored. Remove it, or take rollouts from "
                "transformers (fp8_weights=False, kv_cache_dtype='auto', use_vllm=False)."
            )
        if self.vllm_model_impl == "transformers":
            raise ValueError(
                "vllm_model_impl='transformers': a sync knows where tensors are in vLLM's own class of a model, and "
                "transformers' class has them elsewhere. Set vllm_model_impl='vllm'. If vLLM has no class for the "
                "model, it uses transformers' even then."
            )
        engine_kwargs = self.vllm_engine_kwargs or {}
        reserved = sorted(RESERVED_ENGINE_KWARGS & engine_kwargs.keys())
        if reserved:
            raise ValueError(
                f"vllm_engine_kwargs sets {reserved}, which the trainer sets itself. Remove them; use the config's "
                "own flags (kv_cache_dtype, vllm_max_model_length, vllm_tensor_parallel_size, seed, ...)."
            )
        additional = engine_kwargs.get("additional_config", {})
        if not isinstance(additional, dict) or "trl_fp8" in additional:
            raise ValueError(
                f"vllm_engine_kwargs sets additional_config={additional!r}: the trainer writes under 'trl_fp8' in it "
                "what vLLM has to know of adapters and kernels before it reuses compiled code. Pass a dictionary "
                "without 'trl_fp8'; it is merged with the trainer's."
            )
        for name in REFUSED_ENGINE_KWARGS.keys() & engine_kwargs.keys():
            if engine_kwargs[name]:
                raise ValueError(
                    f"vllm_engine_kwargs sets {name}={engine_kwargs[name]!r}: {REFUSED_ENGINE_KWARGS[name]}."
                )


def check_generation_kwargs(generation_kwargs: Mapping[str, Any], temperature: float) -> None:
    """Raise `ValueError` for a name that vLLM's `SamplingParams` lacks, or that the trainer sets.

    Also raise it for a temperature other than the config's `temperature`, by which the trainer divides its logits.
    """
    set_by_trainer = [name for name in generation_kwargs if name in _SET_BY_TRAINER]
    if set_by_trainer:
        reasons = "; ".join(f"{name}: {_SET_BY_TRAINER[name]}" for name in set_by_trainer)
        raise ValueError(
            f"generation_kwargs sets {set_by_trainer}, which the trainer sets itself ({reasons}). Remove them."
        )
    engine_temperature = generation_kwargs.get("temperature", temperature)
    if engine_temperature != temperature:
        raise ValueError(
            f"generation_kwargs sets temperature={engine_temperature}, and the config temperature={temperature}: "
            "rollouts and the trainer's log-probs would be of two distributions. Set "
            f"temperature={engine_temperature} in the config instead."
        )
    unknown = [name for name in generation_kwargs if name not in VLLM_NAMES]
    if unknown:
        replacements = [f"{_INSTEAD[name]} for {name}" for name in unknown if name in _INSTEAD]
        remedy = "Remove them."
        if replacements:
            remedy = f"Use {', '.join(replacements)}; remove them from generation_kwargs."
        raise ValueError(
            f"generation_kwargs sets {unknown}, but rollouts come from vLLM, whose SamplingParams has no such names "
            f"(transformers' GenerationConfig may have; vLLM always samples). {remedy}"
        )


def fsdp1_message(setting: str, remedy: str) -> str:
    """Return the error for FSDP1. `setting` is the flag or the launcher's setting that selects it."""
    return (
        f"{setting} selects FSDP1, under which TRL 1.16 leaves embeddings, final norm and output head out of the "
        f"weight sync, so the engine would sample from a wrong policy. Use FSDP2: {remedy}."
    )
