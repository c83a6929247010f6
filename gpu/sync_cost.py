"""What a sync launches on a GPU, and how many bytes that reads and writes: counted, nothing executes.

    python -m gpu.sync_cost                     prints the tables of docs/performance.md; a minute, no GPU
    python -m gpu.sync_cost --models Qwen3-8B --layers 2 --json found.json

`Delivery` syncs policies of published shapes into vLLM's model of them, on fake tensors: they have a shape, a dtype
and a device, and no memory. This project's code runs as on a GPU up to each kernel; values are made up where it reads
them. TRL's sync is vLLM's own `load_weights`, parameter by parameter into its BF16 model. vLLM's CPU build will do: a
sync writes to parameters, whose shapes do not depend on the kernels that read them.

A launch is a Triton kernel, an operation of torch that is more than a view, or a copy between host and device. Each
tensor that it is given or returns counts once, one that is changed in place twice. Lists are divided as torch does it
(MultiTensorApply.cuh and Shape.cu in ATen/native/cuda).
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.dry_run import SHAPES, policy_on_meta


if TYPE_CHECKING:
    from trl_fp8.recipe.recipe import FP8Recipe


CAPABILITY = (9, 0)
CHUNK, BLOCKS, TENSORS = 65536, 320, {1: 110, 2: 64}  # elements; chunks, tensors in each of so many lists, per launch
CONCATENATED = 128  # tensors per launch
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "detach", "_unsafe_view", "alias"}
NOT_READ = {"copy_", "fill_", "zero_", "_foreach_copy_"}  # what these change
STATISTICS = "statistics"
CHECK, TRL = "the check before each generation", "TRL's BF16 sync"


@dataclass
class Cost:
    """Of one part of a sync."""

    bytes: int = 0
    launches: Counter[str] = field(default_factory=Counter)  # by name


class Counted(TorchDispatchMode):
    """Adds up launches on the pretended device, by the innermost `part` that is entered.

    Attributes:
        costs: Part -> its cost.
        pointed_at: Bytes of the tensors whose addresses the next Triton kernel gets in a table.
    """

    def __init__(self):
        super().__init__()
        self.costs: dict[str, Cost] = {}
        self.parts, self.pointed_at, self.fp8_weights = ["other"], 0, 0

    def add(self, name: str, nbytes: int, launches: int = 1) -> None:
        cost = self.costs.setdefault(self.parts[-1], Cost())
        cost.bytes += nbytes
        cost.launches[name] += launches

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator._schema.name.partition("::")[2]
        given, returned = _tensors(args, kwargs), _tensors(result)
        if (
            operator.is_view
            or name in NO_LAUNCH
            or operator.namespace == "prim"
            or not any(map(_on_device, given + returned))
        ):
            return result
        changed = [
            tensor
            for argument, value in zip(operator._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        ids = {id(tensor) for tensor in changed}
        read = [tensor for tensor in given if name not in NOT_READ or id(tensor) not in ids]
        written = changed + [tensor for tensor in returned if id(tensor) not in ids]
        self.add(name, sum(tensor.nbytes for tensor in read + written), _launches(name, args))
        return result

    def triton(self, kernel, *args, grid, warmup, **kwargs) -> None:
        """In the place of `JITFunction.run`."""
        name = kernel._fn_name.rpartition(".")[2]
        self.add(name, self.pointed_at + sum(tensor.nbytes for tensor in _tensors(args, kwargs)))
        self.pointed_at = 0


def _tensors(*values: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cuda", "meta")


def _launches(name: str, args: tuple) -> int:
    if name in ("cat", "stack"):
        return -(-len(args[0]) // CONCATENATED)
    if not name.startswith("_foreach_"):
        return 1
    lists = [each for each in args if isinstance(each, list | tuple)]
    if len({tensor.dtype for tensor in _tensors(lists)}) > 1:  # one after the other
        return len(lists[0])
    reduces, in_place = name == "_foreach_max", name.endswith("_")
    depth = max(len(lists), 1 if reduces or in_place else 2)  # lists, that of the results too
    # A reduction fills its results first, and joins those of parts at last
    return multi_tensor_launches([tensor.numel() for tensor in args[0]], depth) + 2 * reduces


def multi_tensor_launches(sizes: list[int], depth: int) -> int:
    """Launches for `depth` lists of tensors of so many elements: each takes so many chunks, of so many tensors."""
    launches = tensors = blocks = 0
    for size in sizes:
        tensors, chunks = tensors + 1, -(-size // CHUNK)
        for chunk in range(1, chunks + 1):
            blocks += 1
            if blocks == BLOCKS or (tensors == TENSORS[depth] and chunk == chunks):
                launches, blocks, tensors = launches + 1, 0, int(chunk < chunks)
    return launches + (blocks > 0)


def _indexed(tensor: torch.Tensor, index: object) -> torch.Tensor:
    index, dim = index if isinstance(index, tuple) else (index,), 0
    rest = tensor.dim() - sum(each is not ... and each is not None for each in index)
    for each in index:
        if each is ...:
            dim += rest
        elif each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            tensor, dim = torch.ops.aten.slice(tensor, dim, each.start, each.stop), dim + 1
        else:
            tensor = tensor.select(dim, each)
    return tensor


class PretendedEngine:
    """`sync.delivery.Engine` of a model of vLLM's that no engine runs."""

    def __init__(self, model: nn.Module, recipe: "FP8Recipe"):
        from trl_fp8.engine.vllm.layout import engine_layout

        self.layout = engine_layout(model, recipe.linears)

    def wake(self) -> None: ...

    def arrive(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...


class PretendedScales:
    """`sync.delivery.CarriedValue`: the KV scales of such a model, all of them 1."""

    name = "KV cache scales"

    def __init__(self, model: nn.Module):
        from trl_fp8.engine.vllm.numerics import attention_layers

        self._layers = attention_layers(model)
        ones = torch.ones(max(self._layers) + 1, 3)
        self.value = SimpleNamespace(values=ones, scale=lambda layer, which: 1.0)

    def prepare(self) -> None: ...

    def write(self) -> None:
        from trl_fp8.engine.vllm.scale_copies import KVScaleCopies

        KVScaleCopies(self._layers).write(self.value)

    def verify(self) -> None:
        from trl_fp8.engine.vllm.scale_copies import KVScaleCopies

        KVScaleCopies(self._layers).verify(self.value)

    def digest(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64)


def vllm_model(folder: str, recipe: "FP8Recipe", config) -> nn.Module:
    """vLLM's model of a policy, without memory."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from trl_fp8.engine.vllm.platform import Cpu

    sizes = {"max_num_seqs": 8, "max_model_len": 1024}
    platform = Cpu()
    arguments = {"model": folder, "skip_tokenizer_init": True, "distributed_executor_backend": "external_launcher"}
    arguments |= sizes | platform.arguments(recipe, config, **sizes)
    made = EngineArgs(**arguments).create_engine_config()
    with (
        platform.ready(recipe),
        set_current_vllm_config(made),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        return initialize_model(vllm_config=made, model_config=made.model_config)


def on_pretended_device(model: nn.Module) -> nn.Module:
    """Fake tensors in the place of a model's own, and what vLLM's CPU build has otherwise than on a GPU."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, device="cuda"), requires_grad=False
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cuda")
        if isinstance(module, RoutedExperts):
            module.quant_method.fp8_backend = Fp8MoeBackend.TRITON
        if isinstance(module, Attention):
            module._k_scale_cpu, module._v_scale_cpu = torch.ones(()), torch.ones(())
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                delattr(module, name)  # what a checkpoint's scales come in, as after a load
    return model


def become_a_gpu(counted: Counted) -> None:
    """Of torch and Triton, as much as this project asks for; and what a build of torch without CUDA cannot do to
    tensors of such a device. All that is read is one, but checksums and flags, which are zero.
    """
    from triton.runtime.jit import JITFunction

    def read(tensor: torch.Tensor) -> list:
        if _on_device(tensor):
            counted.add("copy to the host", tensor.nbytes)
        row: list = [0 if tensor.dtype == torch.int64 else 1.0] * tensor.shape[-1]
        if counted.parts[-1] == STATISTICS:  # sums, flags, and the smallest scale of each FP8 weight
            row[: -counted.fp8_weights] = [0.0] * (len(row) - counted.fp8_weights)
        return row if tensor.dim() == 1 else [row] * tensor.shape[0]

    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: device
    FakeTensor.data_ptr = lambda tensor: id(tensor)  # it is only compared with itself
    FakeTensor.tolist, FakeTensor.item = read, lambda tensor: 0.0  # the scale of a block that is as good as zero
    FakeTensor.__getitem__, FakeTensor.__invert__ = _indexed, lambda tensor: torch.bitwise_not(tensor)
    JITFunction.run = lambda kernel, *args, **kwargs: counted.triton(kernel, *args, **kwargs)


def name_parts(counted: Counted) -> None:
    """Which functions of the project are which part."""
    from trl_fp8.quantization.kernels import block_kernels
    from trl_fp8.quantization.kernels import checksum_kernels as checksums
    from trl_fp8.sync import delivery, writer

    block_kernels.block_warps = lambda *_: block_kernels.WARPS[0]  # there is no device to time them on

    def wrap(owner: object, attribute: str, part: str) -> None:
        function = getattr(owner, attribute)

        def named(*args, **kwargs):
            with counted.part(part):
                return function(*args, **kwargs)

        setattr(owner, attribute, named)

    def launch_over(table, *args, **kwargs) -> None:
        counted.pointed_at = sum(tensor.nbytes for tensor in table.tensors)
        launch(table, *args, **kwargs)

    launch, checksums._launch = checksums._launch, launch_over
    wrap(writer, "quantize_into", "FP8 weights: quantized, written, summed up")
    wrap(writer.Writer, "_flush", "other tensors: written")
    wrap(writer, "digests_of_sent", "other tensors: summed up")
    wrap(writer.Writer, "_error_of", STATISTICS)
    wrap(writer.Writer, "inspect", STATISTICS)
    wrap(delivery, "audit", "what is held: summed up, compared")
    for name in ("write", "verify"):
        wrap(PretendedScales, name, "KV scales: written, read back")


def count(name: str, dtype: torch.dtype, layers: int | None, folder: Path, counted: Counted) -> dict[str, Cost]:
    """Parts of a sync that is not the first, the check before a generation, and TRL's sync."""
    from trl_fp8.recipe.recipe import recipe_for_model
    from trl_fp8.sync.delivery import InPlaceDelivery

    policy = policy_on_meta(folder, name, layers).to(dtype)
    recipe = recipe_for_model(policy, expert_kernels=True)
    bf16 = recipe_for_model(policy, fp8_weights=False, kv_cache_dtype="auto")
    model, trls = (vllm_model(str(folder), each, policy.config) for each in (recipe, bf16))
    counted.costs, counted.fp8_weights = {}, len(recipe.fp8_tensors)
    with counted, counted.part(TRL):
        for parameter_name, parameter in policy.named_parameters():
            trls.load_weights([(parameter_name, parameter)])
    trls_cost = counted.costs
    with FakeTensorMode(allow_non_fake_inputs=True), counted:
        model, policy = on_pretended_device(model), on_pretended_device(policy)
        delivery = InPlaceDelivery(PretendedEngine(model, recipe), policy, recipe, carried=PretendedScales(model))
        for _ in range(2):  # the first also makes what is kept
            counted.costs = {}
            delivery.deliver(lambda: nullcontext(policy.named_parameters()))
        costs, counted.costs = counted.costs, {}
        delivery.verify()
    return costs | {CHECK: total(counted.costs)} | trls_cost


def total(costs: dict[str, Cost]) -> Cost:
    return Cost(sum(each.bytes for each in costs.values()), sum((each.launches for each in costs.values()), Counter()))


def counted_for(models: list[str], layers: int | None) -> dict[str, dict[str, dict[str, Cost]]]:
    """Model -> dtype of its policy -> part -> cost; in this process, which then has a GPU for good."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")  # what vLLM's external launcher reads
    counted, found = Counted(), {}
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        become_a_gpu(counted)
        name_parts(counted)
        for name in models:
            found[name] = {}
            for dtype in (torch.bfloat16, torch.float32):
                label = str(dtype).removeprefix("torch.")
                found[name][label] = count(name, dtype, layers, Path(folder) / name, counted)
    return found


def tables(found: dict[str, dict[str, dict[str, Cost]]]) -> str:
    """The page's Markdown: launches and GB of each part, for each model and dtype."""
    lines = []
    for name, of_model in found.items():
        rows = {}
        for costs in of_model.values():
            whole = {part: cost for part, cost in costs.items() if part not in (CHECK, TRL)}
            whole |= {"**a sync**": total(whole), CHECK: costs[CHECK], TRL: costs[TRL]}
            for part, cost in whole.items():
                rows.setdefault(part, []).append(f"{cost.launches.total():,} | {cost.bytes / 1e9:.1f}")
        head = " | ".join(f"{dtype}: launches | GB" for dtype in of_model)
        lines += [f"| {name} | {head} |", "|---" * (1 + 2 * len(of_model)) + "|"]
        lines += [f"| {part} | {' | '.join(cells)} |" for part, cells in rows.items()] + [""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than published, for a quick look")
    parser.add_argument("--json", type=Path, help="file for everything that was counted")
    arguments = parser.parse_args()
    found = counted_for(arguments.models, arguments.layers)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1, default=vars))
    print(tables(found))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
