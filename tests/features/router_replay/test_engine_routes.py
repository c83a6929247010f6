"""The engine's routers, read: every token of every rollout, in its place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.outputs import CompletionOutput

from testing import engines, tiny_models
from testing.rollouts import agreement, sample
from trl_fp8.engine.vllm.platform import Cpu, Cuda
from trl_fp8.engine.vllm.rollout_llm import RolloutLLM
from trl_fp8.features.router_replay import engine_routes as routes
from trl_fp8.features.router_replay.engine_routes import RouteLog, RouterCapture, returned_routes
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.recipe.recipe import FP8Recipe


without_repetitions = routes._without_repetitions


@pytest.fixture
def started():
    running = []

    def start(checkpoint, **options):
        options = {"fp8_weights": False, "kv_cache_dtype": "auto", "parts": [RouteLog()]} | options
        running.append(engines.start(checkpoint, **options))
        running[-1].sync_weights()
        return running[-1]

    yield start
    for generation in running:
        engines.shutdown(generation.llm)


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_every_token_has_the_experts_that_a_bf16_policy_would_choose(architecture, checkpoint, started):
    """Prompts and completions, prefill and decoding;
    without FP8 only ties to a BF16 rounding are decided otherwise.
    """
    folder = checkpoint(architecture, **{"num_local_experts" if architecture == "mixtral" else "num_experts": 8})
    generation = started(folder)
    sequences = sample(generation)
    found = engines.part_of(generation, RouteLog).notes_on(sequences)
    assert [rows.shape for rows in found] == [(len(tokens) - 1, 2, 2) for tokens in sequences]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert agreement(model, sequences, found) > 0.95
    assert agreement(model, sequences, found, shift=1) < 0.5  # so an error of one place is seen


@pytest.mark.engine
def test_dense_layers_have_no_route(tmp_path, started):
    generation = started(tiny_models.save_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0]))
    found = engines.part_of(generation, RouteLog).notes_on(sample(generation))
    assert all((rows[:, 0] == NOWHERE).all() and (rows[:, 1] >= 0).all() for rows in found)


@pytest.mark.engine
def test_prefills_in_chunks_and_preempted_requests_keep_their_places(checkpoint, started, monkeypatch):
    """33 prompt tokens in steps of 16, and a cache too small for all requests, so that some are computed twice."""
    folder = checkpoint("qwen3_moe")
    block = 2 * 2 * 2 * 64 * 2 * 32  # bytes of 32 tokens: layers, k and v, heads, head size, BF16
    kwargs = {"max_num_batched_tokens": 16, "block_size": 32, "kv_cache_memory_bytes": 4 * block}
    generation = started(folder, engine_kwargs=kwargs)
    read = []
    monkeypatch.setattr(
        routes, "_without_repetitions", lambda chunks: read.append(chunks) or without_repetitions(chunks)
    )
    sequences = sample(generation, max_tokens=24)
    log = engines.part_of(generation, RouteLog)
    computed = [[start for start, _ in chunks] for chunks in read]
    assert any(16 in starts for starts in computed)  # a second chunk of the longest prompt
    assert any(starts.count(0) > 1 for starts in computed)  # a request that began again
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert agreement(model, sequences, log.notes_on(sequences)) > 0.95


def output(prompt, completion, routes=None):
    """What `LLM.generate` returns for one request, as far as it is read here."""
    finished = CompletionOutput(0, "", completion, None, None, routed_experts=routes)
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[finished], request_id="0")


def numbered(tokens, first=0):
    """Routes that say which position of which call they are."""
    rows = np.arange(first, first + len(tokens) - 1, dtype=np.uint8)
    return np.broadcast_to(rows[:, None, None], (len(rows), 1, 1))


def test_a_conversation_has_each_tokens_first_route():
    log = RouteLog(returned_routes)
    log.generated([output([1, 2], [3, 4], numbered([1, 2, 3, 4]))])
    log.generated([output([1, 2, 3, 4, 9, 9], [5, 6], numbered(range(8), first=100))])
    whole = [1, 2, 3, 4, 9, 9, 5, 6]
    assert log.notes_on([whole])[0].ravel().tolist() == [0, 1, 2, 103, 104, 105, 106]
    assert log.notes_on([whole[:-1]])[0].ravel().tolist() == [0, 1, 2, 103, 104, 105]  # cut at max_completion_length
    # a tool's result after the last generation was never fed to the engine
    assert log.notes_on([[*whole, 9, 9]])[0].ravel().tolist() == [0, 1, 2, 103, 104, 105, 106, NOWHERE, NOWHERE]


def test_equal_rollouts_of_one_call_keep_their_own_routes():
    log = RouteLog(returned_routes)
    log.generated([output([1, 2], [3], numbered([1, 2, 3])), output([1, 2], [3], numbered([1, 2, 3], first=50))])
    assert [rows.ravel().tolist() for rows in log.notes_on([[1, 2, 3], [1, 2, 3]])] == [[0, 1], [50, 51]]
    log.begin()
    assert log.records == [] and log.calls == 0


def test_rollouts_of_another_engine_are_refused():
    log = RouteLog(returned_routes)
    log.generated([output([1, 2], [3], numbered([1, 2, 3]))])
    with pytest.raises(RuntimeError, match="1 of 2 rollouts were not generated by the trainer's engine"):
        log.notes_on([[1, 2, 3], [1, 2, 4]])


def test_routes_that_are_missing_or_shifted_are_refused():
    log = RouteLog(returned_routes)
    with pytest.raises(RuntimeError, match="returned no routed experts"):
        log.generated([output([1, 2], [3])])
    with pytest.raises(RuntimeError, match="routes for 3 tokens of a rollout, and computed 2"):
        log.generated([output([1, 2], [3], numbered([1, 2, 3, 4]))])


@pytest.mark.engine
def test_a_dense_engine_has_nothing_to_read(checkpoint):
    generation = engines.start(checkpoint("qwen3"))
    with pytest.raises(ValueError, match="no routers"):
        RouterCapture(generation.llm)
    engines.shutdown(generation.llm)


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM returns routes there")
def test_an_engine_that_cannot_return_routes_says_which_flag_asked(checkpoint):
    arguments = {"model": checkpoint("qwen3_moe"), "enforce_eager": True, "max_model_len": 64}
    with pytest.raises(ValueError, match=r"router_replay: vLLM cannot return .*Model Runner V2.*router_replay='off'"):
        RolloutLLM(parts=[RouteLog()], enable_return_routed_experts=True, **arguments)


HOPPER, CPU = Cuda((9, 0)), Cpu()


def arguments(platform, tensor_parallel_size=1, **options):
    """What an engine of experts is told."""
    experts = ("model.layers.0.mlp.experts",)
    recipe = FP8Recipe((), fp8_experts=experts, kv_cache_dtype="auto", tensor_parallel_size=tensor_parallel_size)
    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    return platform.arguments(recipe, tiny_models.config("qwen3_moe"), **sizes, **options)


def test_engine_arguments_ask_for_routes_where_vllm_returns_them():
    on_gpu = arguments(HOPPER, parts=[RouteLog()])
    assert on_gpu["enable_return_routed_experts"] and on_gpu["enable_prefix_caching"]
    assert on_gpu["moe_backend"] == "triton"
    assert "enable_prefix_caching" not in arguments(HOPPER)
    on_cpu = arguments(CPU, parts=[RouteLog()])
    assert on_cpu["enable_prefix_caching"] is False and "enable_return_routed_experts" not in on_cpu
    for platform, cached in ((CPU, True), (HOPPER, False)):
        with pytest.raises(ValueError, match=f"enable_prefix_caching={cached} with router_replay"):
            arguments(platform, parts=[RouteLog()], user={"enable_prefix_caching": cached})


def test_routes_on_a_gpu_are_returned_by_batches_that_are_scheduled_one_by_one():
    """A batch in flight when the prefix cache is reset would fail the second generation."""
    assert arguments(HOPPER, parts=[RouteLog()])["async_scheduling"] is False
    assert "async_scheduling" not in arguments(HOPPER)
    assert "async_scheduling" not in arguments(CPU, parts=[RouteLog()])
    with pytest.raises(ValueError, match="async_scheduling=True with router_replay.*Remove it, or set"):
        arguments(HOPPER, parts=[RouteLog()], user={"async_scheduling": True})
    assert arguments(HOPPER, parts=[RouteLog()], user={"async_scheduling": False})["async_scheduling"] is False


def test_ranks_that_share_an_engine_on_gpus_have_no_routes():
    with pytest.raises(
        ValueError, match="router_replay with vllm_tensor_parallel_size=2 on cuda.*router_replay='off'"
    ):
        arguments(HOPPER, 2, parts=[RouteLog()])
    assert arguments(HOPPER, 2) and arguments(CPU, 2, parts=[RouteLog()])
