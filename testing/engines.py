"""Real vLLM engines for the tests: the trainer's synced one, and a fresh one from a checkpoint on disk."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import ensure_master_addr_port
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.model_executor.layers.attention import MLAAttention
from vllm.platforms.cpu import CpuPlatform

from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.numerics import attention_layers
from trl_fp8.engine.vllm.part import EnginePart
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.engine.vllm.scale_copies import KVScaleCopies
from trl_fp8.export.export import published
from trl_fp8.features.kv_cache.engine_scales import EngineScales
from trl_fp8.features.one_forward.engine_kernels import KernelsPart
from trl_fp8.features.shared_base.engine_base import BasePart
from trl_fp8.features.shared_base.held_base import HeldBase, SharedBase
from trl_fp8.quantization.codec.kv_scales import QKV, KVScales
from trl_fp8.recipe.families import family_of
from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.sync import delivery
from trl_fp8.sync.weight_stream import weight_stream
from trl_fp8.sync.writer import Writer
from trl_fp8.upstream.vllm import engine_model

from .vision import picture


# Each engine would look through all modules again for kernels to put in the place of Triton's, half of its start
CpuPlatform.register_triton_kernel_overrides = staticmethod(cache(CpuPlatform.register_triton_kernel_overrides))
AnyPart = TypeVar("AnyPart", bound=EnginePart)
PROMPTS = [[4 + (7 * row + 13 * column) % 50 for column in range(length)] for row, length in enumerate((3, 9, 17, 33))]


def start(
    checkpoint: str,
    kv_scales: KVScales | None = None,
    generation=FP8VLLMGeneration,
    engine_kwargs: dict | None = None,
    sleep: bool = False,
    parts: Sequence[EnginePart] = (),
    model: torch.nn.Module | None = None,
    recipe: FP8Recipe | None = None,
    **recipe_flags,
):
    """Start a colocated engine for the model in `checkpoint`, not yet synced; `.model` is the fp32 policy.

    `parts`: beside those of an FP8 KV cache and of kernels that are only compared.
    """
    model = model or AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if torch.cuda.is_available():
        model = model.cuda()
        engine_kwargs = {"enforce_eager": True, "gpu_memory_utilization": 0.2} | (engine_kwargs or {})
    recipe = recipe or recipe_for_model(model, **({"expert_kernels": torch.cuda.is_available()} | recipe_flags))
    of_cache = [EngineScales(lambda: kv_scales)] if recipe.fp8_kv_cache else []
    kernels = [] if any(isinstance(part, KernelsPart) for part in parts) else [KernelsPart()]
    return generation(
        recipe=recipe,
        parts=[*of_cache, *kernels, *parts],
        engine_kwargs=engine_kwargs,
        model=model,
        accelerator=Accelerator(cpu=not torch.cuda.is_available()),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        max_model_length=64,
        max_num_seqs=8,
        max_completion_length=8,
        enable_sleep_mode=sleep,
    )


def scales_of(generation: FP8VLLMGeneration) -> EngineScales:
    """Return the scales of a generation's FP8 KV cache; its `calibrate` gives those of the next sync."""
    return generation.delivery.carried


def part_of(generation: FP8VLLMGeneration, kind: type[AnyPart]) -> AnyPart:
    """Return the only part of this kind."""
    [part] = [part for part in generation.parts if isinstance(part, kind)]
    return part


def start_on_base(
    checkpoint: str, lora: LoraConfig, expert_kernels: bool = False, parts: Sequence[EnginePart] = (), **options
):
    """Call `start` with a policy that has adapters on a base that it shares with the engine."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    recipe = recipe_for_model(model, expert_kernels=expert_kernels)
    base = HeldBase(model, recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = get_peft_model(model, lora).to(device)
    return start(
        checkpoint, model=model, recipe=recipe, parts=[*parts, BasePart(SharedBase(model, base, device))], **options
    )


def fresh_log_probs(folder: Path, generation: FP8VLLMGeneration, kv_scales: KVScales | None) -> list[tuple]:
    """Write what `generation` was last sent to `folder`, and return the `loaded_log_probs` of that checkpoint."""
    write_checkpoint(folder, generation, kv_scales)
    return loaded_log_probs(folder, generation.recipe, generation.pinned | (generation.engine_kwargs or {}))


def loaded_log_probs(folder: Path, recipe: FP8Recipe, engine_kwargs: dict | None = None) -> list[tuple]:
    """Return `log_probs` of an engine that loads a checkpoint by itself."""
    with loaded(folder, recipe, engine_kwargs) as llm:
        return log_probs(llm)


@contextmanager
def loaded(folder: Path, recipe: FP8Recipe, engine_kwargs: dict | None = None) -> Iterator[LLM]:
    """Yield an engine that loads a checkpoint by itself. No other engine may run."""
    ensure_master_addr_port()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    llm = load(folder, recipe, engine_kwargs)
    try:
        yield llm
    finally:
        shutdown(llm)


def write_checkpoint(folder: Path, generation: FP8VLLMGeneration, kv_scales: KVScales | None) -> None:
    """Write the policy of `generation` as an FP8 checkpoint."""
    source = Path(generation.model.name_or_path)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": generation.recipe.quantization_config}
    config |= family_of(config["model_type"]).engine_fields(config)
    (folder / "config.json").write_text(json.dumps(config))
    model = generation.model
    stream = weight_stream(model.named_parameters(), generation.recipe, kv_scales, persistent_buffers(model))
    stream = published(stream, generation.recipe)
    save_file({name: tensor.contiguous().clone() for name, tensor in stream}, folder / "model.safetensors")


def load(folder: Path, recipe: FP8Recipe, engine_kwargs: dict | None = None) -> LLM:
    """Start an engine with the weights of an FP8 checkpoint, of which this process is the rank in its environment."""
    platform, sizes = platform_of(), {"max_num_seqs": 8, "max_model_len": 64}
    arguments = platform.arguments(recipe, AutoConfig.from_pretrained(folder), **sizes, user=engine_kwargs)
    arguments |= {"load_format": "auto", "kv_cache_dtype": recipe.kv_cache_dtype}
    arguments = {"max_num_batched_tokens": 4096} | arguments  # as TRL: the compiler fuses by it
    arguments.pop("hf_overrides", None)  # the checkpoint's own config says it
    with platform.ready(recipe):
        llm = LLM(
            model=str(folder),
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",
            tensor_parallel_size=recipe.tensor_parallel_size,
            **sizes,
            **arguments,
        )
    _load_latent_scales(llm, folder, recipe)
    return llm


def _load_latent_scales(llm: LLM, folder: Path, recipe: FP8Recipe) -> None:
    """Give MLA's layers the KV scales of a checkpoint, as vLLM 0.31 does not with `quant_method` "fp8"."""
    layers = attention_layers(engine_model(llm)) if recipe.fp8_kv_cache else {}
    latent = {n: layer for n, layer in layers.items() if isinstance(layer, MLAAttention)}
    if latent:
        stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        scales = [[stored.get(f"model.layers.{n}.self_attn.{which}_scale", 1.0) for which in QKV] for n in layers]
        fp8 = {n: layer for n, layer in latent.items() if n not in recipe.kv_cache_skip_layers}
        KVScaleCopies(fp8).write(KVScales(torch.tensor(scales)))


def log_probs(llm: LLM) -> list[tuple]:
    """Return greedy tokens and the log-probs of tokens and prompts: equal only if engines are, bit for bit."""
    parameters = SamplingParams(temperature=0.0, max_tokens=16, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    results, prompts = [], [{"prompt_token_ids": ids} for ids in PROMPTS]
    if llm.renderer.mm_processor is not None:
        text = (engine_model(llm).get_placeholder_str("image", 0) or "[IMG]") + "1+2="
        prompts += [{"prompt": text, "multi_modal_data": {"image": picture(number)}} for number in range(2)]
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        completion = output.outputs[0]
        generated = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        results.append((tuple(completion.token_ids), tuple(generated), tuple(row[t].logprob for row, t in rows)))
    return results


def shutdown(llm: LLM) -> None:
    """Shut down an in-process engine, so that another can start. On several ranks it stays beside the next one,
    of the same tensor parallel size: its end would be that of the trainer's process groups.
    """
    if PartialState().num_processes > 1:
        return
    llm.llm_engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()
    gc.collect()


def perturb(model: torch.nn.Module, seed: int) -> None:
    """Change the policy as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *dict(persistent_buffers(model)).values()]:
            tensor.add_(0.03 * torch.randn(tensor.shape, generator=generator).to(tensor.device))


def tamper(
    *,
    stream: Callable[[Iterator], Iterator] | None = None,
    before: Callable[[Writer], None] | None = None,
    after: Callable[[Writer], None] | None = None,
) -> None:
    """Put `stream` between the policy's tensors and the writer, which `before` and `after` get in their
    hands before and after it writes. Without any of them nothing is tampered with any more.
    """

    class Tampered(Writer):
        def write(self, parameters, buffers=()):
            (before or (lambda writer: None))(self)
            super().write(stream(iter(parameters)) if stream else parameters, buffers)
            (after or (lambda writer: None))(self)

    delivery.Writer = Tampered if stream or before or after else Writer


def after_two_syncs(generation) -> list[tuple]:
    """Return `log_probs` after the second of two syncs of perturbed policies, which differ from the first's."""
    results = []
    for step in (1, 2):
        perturb(generation.model, seed=step)
        generation.sync_weights()
        results.append(log_probs(generation.llm))
    assert results[0] != results[1]
    return results[1]


def require_whole_audit(generation) -> None:
    """Require that every tensor was read back, and a scale for each FP8 weight, the experts' too."""
    parameters = len(list(generation.model.parameters())) + len(list(persistent_buffers(generation.model)))
    assert generation.last_sync.audited_tensors == parameters + len(generation.recipe.fp8_tensors)


def some_scales(layers: int, step: int) -> KVScales:
    """Return power-of-two scales of two layers, different for each layer, tensor and step, none of them 1."""
    exponents = torch.arange(layers * 3).view(layers, 3) % 6 - 9 + step
    return KVScales(torch.exp2(exponents.float()))
