"""Rollout speed: tokens/s in BF16, with FP8 linears, and with an FP8 KV cache too,
as many sequences as the cache holds.

"fp8_linears_kv_followed" is the last of them with kernels that a trainer can share (fp8_forward="one_forward"),
"..._adapters" computes adapters of rank 32 beside all linears (fp8_base), "..._followed_adapters" does both.
All run the GEMM kernel that a trainer would choose on this device; "fp8_linears_kv_cutlass", "..._deep_gemm" and
"..._triton" run the one of that name (GPU). No weights are sent to any of these engines: "auditable" says whether a
sync could write what their kernels read.

    python -m benchmarks.bench_rollout [--size qwen3_8b] [--lengths 16384 4096 1024] [--precisions bf16 fp8_linears_kv]

A long rollout that is limited by its KV cache has sequences at every position of their responses at once. Each row is
a slice of that state: as many sequences as the cache holds, their positions evenly spread over the response, SLICE
tokens sampled for each. The tokens before are random ids, prefilled by one call and then read from the prefix cache,
so that the time is that of decoding, as `LLM.generate` takes it in training (temperature 1, log-probs of the sampled
tokens). What a slice leaves out: prefill of prompts, a few percent of a long rollout, and the idle end of a batch.

Weights are random, of a trained model's magnitude, and not vLLM's dummy ones, most of which round to zero in e4m3:
zeros draw less power, and the GPU clocks higher. Each precision is an engine in a process of its own; ratios are
over repeats in the same order. `weight_bytes` are the plan's; `parameter_bytes` those of the engine's parameters
(on CPU packed ones are missing).
"""

import argparse
import os
import tempfile
from contextlib import nullcontext

import torch
from accelerate import PartialState
from torch import nn

from testing import record

from . import harness, shapes


PROMPT = {"tiny": 16}
LENGTHS = {"tiny": [256, 128]}  # longest first: what the goals are about must fit into the budget
SLICE = {"tiny": 8}
SPARE_BLOCKS = 2
FOLLOWED, ADAPTERS = "followed", "adapters"
RANK = 32
# vLLM's name of a backend for linears -> its kernel
KERNELS = {
    "cutlass": "CutlassFp8BlockScaledMMKernel",
    "deep_gemm": "DeepGemmFp8BlockScaledMMKernel",
    "triton": "TritonFp8BlockScaledMMKernel",
}
ORDER = ("bf16", "fp8_linears_kv", "fp8_linears", f"fp8_linears_kv_{FOLLOWED}")
VARIANTS = (f"{FOLLOWED}_{ADAPTERS}", FOLLOWED, ADAPTERS, *KERNELS)
PARTS = (*ORDER, *(f"fp8_linears_kv_{name}" for name in VARIANTS if name != FOLLOWED))


def precision_and_variant(part: str) -> tuple[str, str | None]:
    """What is FP8, and what is different from an engine as the trainer starts it."""
    variant = next((name for name in VARIANTS if part.endswith(f"_{name}")), None)
    return part.removesuffix(f"_{variant}"), variant


def positions(blocks: int, block: int, prompt: int, response: int, tokens: int, most: int) -> list[int]:
    """Tokens before the slice, for as many sequences as fit into `blocks` blocks of `block` tokens, at most `most`."""
    for count in range(most, 0, -1):
        spread = [prompt + int((index + 0.5) / count * (response - tokens)) for index in range(count)]
        if sum(-(-(length + tokens) // block) for length in spread) <= blocks - SPARE_BLOCKS:
            return spread
    raise ValueError(
        f"a KV cache of {blocks} blocks of {block} tokens does not hold one sequence of {prompt} + {response} tokens. "
        "Raise --utilization or lower --lengths."
    )


def start(options: argparse.Namespace, folder: str):
    """An engine with the precision of this part, and the plan for it."""
    precision, variant = precision_and_variant(options.part)
    if variant == "deep_gemm":  # off for all others; compiled as it is called, not for every shape beforehand
        os.environ.update(VLLM_USE_DEEP_GEMM="1", VLLM_DEEP_GEMM_WARMUP="skip")

    from vllm import LLM

    from trl_fp8.engine.vllm.gemms import pinned_gemm
    from trl_fp8.engine.vllm.part import EnginePart
    from trl_fp8.engine.vllm.platform import platform_of
    from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
    from trl_fp8.features.shared_base.engine_adapters import adapters_installed
    from trl_fp8.planning.plan import plan_for_model
    from trl_fp8.recipe.from_model import outline_of
    from trl_fp8.recipe.recipe import recipe_for_model

    model = shapes.on_meta(folder)
    recipe = recipe_for_model(model, **shapes.PRECISIONS[precision])
    sizes = {"max_num_seqs": options.most, "max_model_len": options.prompt + max(options.lengths)}
    platform = platform_of()
    user = ({"block_size": 32} if platform.name == "cpu" else {}) | (
        {"linear_backend": variant} if variant in KERNELS else {}
    )
    user |= options.engine_kwargs
    shared, with_adapters = (variant in (only, VARIANTS[0]) for only in (FOLLOWED, ADAPTERS))
    part = SharedKernelsPart() if shared else EnginePart()
    arguments = platform.arguments(recipe, model.config, **sizes, parts=[part], user=user)
    PartialState()
    shapes.as_a_single_rank()
    ranks = {recipe.engine_name(name): RANK for name in outline_of(model).linears if name != "lm_head"}
    room = adapters_installed(recipe.linears, ranks) if with_adapters else nullcontext()
    with platform.ready(recipe), part.starting(platform, recipe), room:
        device, backends = torch.device(platform.name), platform.linear_backends(recipe)
        arguments |= pinned_gemm(backends, recipe, model, device, user, list, options.most, shared)
        llm = LLM(
            model=folder,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",
            gpu_memory_utilization=options.utilization,
            max_num_batched_tokens=4096,  # as TRL
            skip_tokenizer_init=True,
            **sizes,
            **arguments,
        )
    return llm, plan_for_model(model, recipe)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Fill an engine's parameters in place: weights of deviation 0.02, whatever they are stored in; norms stay 1."""
    from trl_fp8.engine.vllm.numerics import attention_layers

    for name, parameter in model.named_parameters():
        if name.endswith("_scale_inv"):
            parameter.fill_(2.0**-13)
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.copy_(torch.randn_like(parameter, dtype=torch.bfloat16).mul_(0.02 * 2**13).clamp_(-448, 448))
        elif parameter.dim() < 2:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    for layer in attention_layers(model).values():
        for which in "qkv":
            getattr(layer, f"_{which}_scale").fill_(2.0**-5)
            setattr(layer, f"_{which}_scale_float", 2.0**-5)
            if which != "q":
                getattr(layer, f"_{which}_scale_cpu").fill_(2.0**-5)


def kernels_of(model: nn.Module, part: str) -> dict:
    """Which kernels run the engine's FP8 linears, and whether a trainer's audit could read their weights back.

    Raises:
        RuntimeError: They are not those of `part`: vLLM falls back to others where one does not take a layer.
    """
    from trl_fp8.engine.vllm.numerics import fp8_kernels, require_auditable

    found, expected = dict(fp8_kernels(model)), KERNELS.get(precision_and_variant(part)[1])
    if expected is not None and set(found) != {expected}:
        raise RuntimeError(f"{part}: expected are linears on {expected}, found are {found}.")
    try:
        require_auditable(model)
    except RuntimeError as reason:
        print(reason, flush=True)
        return {"kernels": found, "auditable": False}
    return {"kernels": found, "auditable": True}


def measure(options: argparse.Namespace) -> None:
    """Start the engine of one precision and emit a row for each response length."""
    from trl_fp8.upstream.vllm import engine_model

    run = harness.Run("rollout", options)
    with tempfile.TemporaryDirectory() as folder:
        begun = run.left
        llm, plan = start(options, shapes.write_folder(options.size, folder, options.layers))
        model, cache = engine_model(llm), llm.llm_engine.vllm_config.cache_config
        found = kernels_of(model, options.part)
        randomize(model)
        harness.emit(
            found
            | {
                "kv_tokens": cache.num_gpu_blocks * cache.block_size,
                "kv_bytes_per_token": plan.cache.token_bytes(fp8=True),
                "weight_bytes": plan.bytes_after,
                "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
                "start_seconds": begun - run.left,
            }
        )
        took = 0.0
        for response in options.lengths:
            if took and run.left < took:  # the next one takes about as long as the last
                harness.skip(f"responses of {response}")
                continue
            before = run.left
            harness.emit(rollout(llm, options, response))
            took = before - run.left


def rollout(llm, options: argparse.Namespace, response: int) -> dict:
    """tokens/s of a slice at one response length, after a first slice that is not counted."""
    cache, tokens = llm.llm_engine.vllm_config.cache_config, min(options.slice, response // 2)
    most = dict(zip(options.lengths, options.sequences, strict=True)).get(response, options.most)
    sizes = options.prompt, response, tokens, most
    spread = positions(cache.num_gpu_blocks, cache.block_size, *sizes)
    ids = shapes.random_tokens(options.size, len(spread), max(spread), seed=response)
    prompts = [{"prompt_token_ids": row[:length].tolist()} for row, length in zip(ids, spread, strict=True)]
    assert llm.reset_prefix_cache()
    prefill = shapes.seconds_of(lambda: generate(llm, prompts, 1))
    rates = []
    for _ in range(options.repeats + 1):
        outputs = []
        seconds = shapes.seconds_of(lambda found=outputs: found.extend(generate(llm, prompts, tokens)))
        missed = [len(o.prompt_token_ids) - (o.num_cached_tokens or 0) for o in outputs]
        if max(missed) > 2 * cache.block_size:
            raise RuntimeError(
                f"{max(missed)} tokens of a prompt were not in the prefix cache, so that the time would hold a "
                f"prefill: the KV cache of {cache.num_gpu_blocks} blocks does not hold "
                f"{len(spread)} sequences after all."
            )
        rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    return {
        "response": response,
        "sequences": len(spread),
        "limit": "kv_cache" if len(spread) < most else "sequences",
        "mean_context": sum(spread) / len(spread) + tokens / 2,
        "slice_tokens": tokens,
        "tokens_per_second": rates[1:],
        "prefill_tokens_per_second": sum(spread) / prefill,
    }


def generate(llm, prompts: list[dict], tokens: int) -> list:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    return llm.generate(prompts, sampling, use_tqdm=False)


def summarize(engines: dict[str, dict]) -> dict:
    """Spreads of all engines, and each one's ratio to BF16 where both were measured."""
    found, bf16 = {}, engines.get("bf16", {})
    for name, engine in engines.items():
        rows = {
            response: row | {"tokens_per_second": record.spread(row["tokens_per_second"])}
            for response, row in engine["lengths"].items()
        }
        found[name] = {key: value for key, value in engine.items() if key != "lengths"} | {"lengths": rows}
        if name == "bf16" or not bf16:
            continue
        found[name]["kv_tokens_over_bf16"] = engine["kv_tokens"] / bf16["kv_tokens"]
        found[name]["tokens_per_second_over_bf16"] = {
            response: harness.ratios(row["tokens_per_second"], bf16["lengths"][response]["tokens_per_second"])
            for response, row in engine["lengths"].items()
            if response in bf16["lengths"]
        }
    return found


def main() -> None:
    parser = harness.parser(__doc__, budget=460)
    parser.add_argument("--precisions", nargs="+", choices=PARTS, default=ORDER)
    parser.add_argument("--lengths", nargs="+", type=int, help="response lengths, longest first")
    parser.add_argument("--prompt", type=int, help="prompt tokens")
    parser.add_argument("--slice", type=int, help="tokens sampled for each sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--most",
        type=int,
        default=1024 if shapes.DEVICE == "cuda" else 8,
        help="most sequences at a time (max_num_seqs)",
    )
    parser.add_argument(
        "--utilization", type=float, default=0.35, help="the engine's share of the GPU, beside a trainer"
    )
    parser.add_argument("--sequences", type=int, nargs="+", help="at each of --lengths; else as many as fit")
    parser.add_argument("--layers", type=int, help="fewer than the model has, to start faster")
    options = parser.parse_args()
    options.lengths = options.lengths or LENGTHS.get(options.size, [16384, 4096, 1024])
    options.prompt = options.prompt or PROMPT.get(options.size, 512)
    options.slice = options.slice or SLICE.get(options.size, 256)
    options.sequences = options.sequences or [options.most] * len(options.lengths)
    if options.part:
        return measure(options)
    engines: dict[str, dict] = {}
    settings = {"utilization": options.utilization, "prompt": options.prompt, "layers": options.layers}
    run = harness.Run("rollout", options, options.repeats, **settings)
    for index, name in enumerate(options.precisions):
        for row in run.rows(name, len(options.precisions) - index):
            if "response" in row:
                engines[name]["lengths"][str(row["response"])] = row
            else:
                engines[name] = row | {"lengths": {}}
            run.results["engines"] = summarize(engines)
    run.finish()


if __name__ == "__main__":
    main()
