"""The choice of a kernel for FP8 linears: its logic with kernels that are made up, its check with a real one."""

import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from accelerate import PartialState
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledDynamicMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

from testing import engines, tiny_models
from trl_fp8.engine.vllm import gemms
from trl_fp8.engine.vllm.cpu.reference_linear import ReferenceFp8BlockKernel, register_cpu_kernel
from trl_fp8.engine.vllm.gemms import Gemm, fastest, pinned_gemm
from trl_fp8.engine.vllm.numerics import SMALL_BATCH, kernel_scaling
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.quantization.formats import FORMATS
from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.recipe import FP8Recipe, recipe_for_model
from trl_fp8.upstream.vllm import engine_model


SHAPES = {(512, 256): 2, (256, 128): 10}
DECODING = 64  # rows that decide, where there is one number of them


@dataclass
class Kernel:
    """A candidate whose calls take `times[shape]`."""

    name: str
    times: dict = field(default_factory=dict)
    broken: Exception | None = None
    called: list = field(default_factory=list)

    def check(self):
        if self.broken:
            raise self.broken

    def seconds(self, shape, rows):
        self.called.append((rows, shape))
        time = self.times[shape]
        if isinstance(time, Exception):
            raise time
        return time


@pytest.fixture(autouse=True)
def accelerates_logger():
    PartialState()


def kernels(**times):
    return [Kernel(name, dict(zip(SHAPES, each, strict=True))) for name, each in times.items()]


def test_the_fastest_over_all_layers_is_taken():
    """The second is faster at one shape, and slower where most layers are."""
    candidates = kernels(cutlass=(8e-6, 2e-6), triton=(1e-6, 4e-6))
    assert fastest(candidates, SHAPES, [DECODING]).name == "cutlass"
    assert fastest(candidates, dict.fromkeys(SHAPES, 1), [DECODING]).name == "triton"


@dataclass
class ByRows(Kernel):
    """A candidate whose calls take `times[rows]`."""

    def seconds(self, shape, rows):
        self.called.append(rows)
        return self.times[rows]


def test_each_number_of_rows_that_decides_counts_as_much():
    """In seconds the one with less at 256 rows would win, at 64 rows alone the other two."""
    times = {"swapped": (2, 9, 40), "large": (4, 9, 39), "middle": (4, 8, 60)}
    candidates = [ByRows(name, dict(zip((8, 64, 256), each, strict=True))) for name, each in times.items()]
    assert fastest(candidates, SHAPES, [8, 64, 256]).name == "swapped"
    assert fastest(candidates, SHAPES, [64, 256]).name == "large"
    assert fastest(candidates, SHAPES, [64]).name == "middle"


@pytest.mark.parametrize(
    ("user", "decides"),
    [
        (None, [8, 64, 256]),
        ({"max_num_seqs": 64}, [8, 64]),
        ({"max_num_seqs": 32}, [8, 32]),
        ({"max_num_seqs": 4}, [4]),
        ({"max_num_seqs": None}, [8, 64, 256]),
    ],
)
def test_no_more_rows_decide_than_an_engine_decodes(user, decides, monkeypatch):
    seen = []
    monkeypatch.setattr(gemms, "fastest", lambda candidates, shapes, rows, agree: seen.append(rows) or candidates[0])
    policy = tiny_models.build("qwen3")
    pinned_gemm(("cutlass",), recipe_for_model(policy), policy, torch.device("cpu"), user, list, 256)
    assert seen == [decides]


def test_one_candidate_is_not_timed():
    [only] = kernels(triton=(1e-6, 1e-6))
    assert fastest([only], SHAPES, [DECODING]) is only and only.called == []


def test_a_kernel_that_fails_its_check_is_named_and_not_timed(caplog):
    first, second = kernels(cutlass=(1e-6, 1e-6), triton=(2e-6, 2e-6))
    first.broken = RuntimeError("3 of 9 outputs are wrong")
    with caplog.at_level(logging.INFO):
        assert fastest([first, second], SHAPES, [DECODING]) is second
    assert first.called == []
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "linear_backend='cutlass' is not used: RuntimeError: 3 of 9 outputs are wrong" in warned


def test_kernels_for_other_devices_cause_no_warning(caplog):
    first, second = kernels(deep_gemm=(1e-6, 1e-6), triton=(2e-6, 2e-6))
    first.broken = ValueError("Currently, only Hopper and Blackwell GPUs are supported.")
    with caplog.at_level(logging.INFO):
        assert fastest([first, second], SHAPES, [DECODING]) is second
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert "linear_backend='deep_gemm' is left out: Currently, only Hopper" in caplog.text


def test_a_kernel_that_fails_while_it_is_timed_is_dropped(caplog):
    candidates = kernels(cutlass=(1e-6, RuntimeError("out of shared memory")), triton=(2e-6, 2e-6))
    assert fastest(candidates, SHAPES, [DECODING]).name == "triton"
    assert "'cutlass' is not used: RuntimeError: out of shared memory" in caplog.text
    assert candidates[0].called == [(DECODING, (512, 256)), (DECODING, (256, 128))]


def test_if_none_is_left_the_reason_of_each_is_said():
    first, second = kernels(cutlass=(1e-6, 1e-6), triton=(2e-6, 2e-6))
    first.broken, second.broken = ValueError("not for this GPU"), TypeError("unexpected argument")
    with pytest.raises(RuntimeError, match=r"(?s)cutlass: not for this GPU\n  triton: TypeError: unexpected argument"):
        fastest([first, second], SHAPES, [DECODING])


def test_the_log_has_the_time_of_each_shape_and_number_of_rows(caplog):
    candidates = kernels(cutlass=(3e-6, 3e-6), triton=(2e-6, 2e-6))
    with caplog.at_level(logging.INFO):
        fastest(candidates, SHAPES, [8, DECODING])
    lines = [line.split() for line in caplog.text.splitlines()]
    for rows, times in (("8", ["3.0", "2.0"]), ("64", ["3.0", "2.0"])):
        assert ["2", "512", "256", rows, *times] in lines and ["10", "256", "128", rows, *times] in lines


def agreed(ranks):
    """`fastest` on each of `ranks`, lists of candidates, one after another: what the others say is looked up."""
    said, chosen = [[] for _ in ranks], []
    for _ in range(4):  # until all collectives of all ranks are known
        chosen = []
        for rank, candidates in enumerate(ranks):
            turn = iter(range(9))

            def agree(values, rank=rank, turn=turn):
                call = next(turn)
                said[rank][call:] = [values]
                others = [each[call] for each in said if len(each) > call]
                return [max(column) for column in zip(*others, strict=True)]

            chosen.append(fastest(candidates, SHAPES, [DECODING], agree).name)
    assert len({len(each) for each in said}) == 1, "ranks make another number of collectives: they would hang"
    return chosen


def test_all_ranks_take_the_kernel_whose_slowest_rank_is_fastest():
    ranks = [kernels(cutlass=(1e-6, 1e-6), triton=(2e-6, 2e-6)), kernels(cutlass=(9e-6, 9e-6), triton=(2e-6, 2e-6))]
    assert [fastest(each, SHAPES, [DECODING]).name for each in ranks] == ["cutlass", "triton"]
    assert agreed(ranks) == ["triton", "triton"]


def test_no_rank_takes_a_kernel_that_failed_on_one():
    ranks = [kernels(cutlass=(1e-6, 1e-6), triton=(2e-6, 2e-6)) for _ in range(2)]
    ranks[1][0].broken = RuntimeError("wrong")
    assert agreed(ranks) == ["triton", "triton"]
    with pytest.raises(RuntimeError, match="triton: failed on another rank"):
        fastest(ranks[1], SHAPES, [DECODING], lambda values: [1.0] * len(values))


@pytest.mark.parametrize(
    "format_name, scale_format", [(name, each) for name, spec in FORMATS.items() for each in spec.scale_formats]
)
def test_the_reference_kernel_passes_the_check(format_name, scale_format):
    register_cpu_kernel()
    reference(format_name, scale_format).check()


def reference(format_name="blocks", scale_format="pow2", batch_invariant=True):
    return Gemm("auto", FORMATS[format_name], scale_format, torch.device("cpu"), tiny_models.config(), batch_invariant)


def test_a_kernel_whose_batch_shows_is_found_where_a_trainer_shares_it(monkeypatch):
    """One BF16 step in one output of larger batches."""
    register_cpu_kernel()
    apply = ReferenceFp8BlockKernel.apply_block_scaled_mm

    def step(self, A, *args, **named):
        product = apply(self, A, *args, **named)
        if len(A) > 130:  # more than are compared with FP64
            product[3].view(torch.int16)[int(product[3].abs().argmax())] ^= 1
        return product

    monkeypatch.setattr(ReferenceFp8BlockKernel, "apply_block_scaled_mm", step)
    with pytest.raises(RuntimeError, match="1 of 1792 outputs of 7 rows differ in a batch of 300"):
        reference().check()
    reference(batch_invariant=False).check()


BREAKS = {
    "a scale of another block": lambda A, B, As, Bs: (A, B, As, Bs.flip(1)),
    "scales of activations one group off": lambda A, B, As, Bs: (A, B, As.roll(1, 1), Bs),
    "one code": lambda A, B, As, Bs: (A, one_code_off(B), As, Bs),
    "no scale of activations": lambda A, B, As, Bs: (A, B, torch.ones_like(As), Bs),
    "not a number": lambda A, B, As, Bs: (A, B, As, Bs * torch.nan),
}


def one_code_off(codes):
    codes = codes.clone()
    codes.view(torch.uint8)[3, int(codes[3].float().abs().argmax())] ^= 0x80  # the sign of a row's largest
    return codes


@pytest.mark.parametrize("broken", BREAKS)
def test_a_kernel_that_computes_something_else_is_found(broken, monkeypatch):
    register_cpu_kernel()
    apply = ReferenceFp8BlockKernel.apply_block_scaled_mm
    monkeypatch.setattr(
        ReferenceFp8BlockKernel,
        "apply_block_scaled_mm",
        lambda self, *args, **named: apply(self, *BREAKS[broken](*args, **named)),
    )
    with pytest.raises(RuntimeError, match=r"outputs are wrong, first at \[\d+, \d+\]: .* expected"):
        reference().check()


def test_other_activation_scales_than_numerics_says_are_found(monkeypatch):
    register_cpu_kernel()
    scaling = gemms.kernel_scaling
    monkeypatch.setattr(gemms, "kernel_scaling", lambda kernel, rows: scaling(kernel)._replace(scale_format="pow2"))
    with pytest.raises(RuntimeError, match="outputs are wrong"):
        reference().check()


class PowersOfTwo(ReferenceFp8BlockKernel):
    """Quantizes activations as DeepGEMM's kernel does."""

    def __init__(self, config):
        super().__init__(config)
        self.quant_fp8 = QuantFP8(static=False, group_shape=self.quant_fp8.group_shape, use_ue8m0=True)


class Dynamic(Fp8BlockScaledDynamicMMLinearKernel):
    """Takes one kernel for small batches and another for large ones, as vLLM's does on Hopper."""

    base_type, fallback_type, small = ReferenceFp8BlockKernel, PowersOfTwo, SMALL_BATCH

    def process_weights_after_loading(self, layer):
        self.fallback.process_weights_after_loading(layer)

    def apply_block_scaled_mm(self, *_, **__):
        raise AssertionError

    def apply_weights(self, layer, x):
        return (self.base if len(x) < self.small else self.fallback).apply_weights(layer, x)


Dynamic.__name__ = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"


@pytest.fixture
def dynamic(monkeypatch):
    """`Dynamic` in the place of the reference kernel."""
    register_cpu_kernel()
    start = gemms.init_fp8_linear_kernel
    monkeypatch.setattr(gemms, "init_fp8_linear_kernel", lambda *args, **named: Dynamic(start(*args, **named).config))


def test_a_kernel_that_changes_with_the_batch_is_checked_at_both_and_never_shared(dynamic, monkeypatch):
    reference(batch_invariant=False).check()
    with pytest.raises(ValueError, match="takes another kernel below 32 rows, .* 'deep_gemm' gives them"):
        reference(batch_invariant=True).check()
    for small in (0, 1000):  # it quantizes otherwise than numerics.py says
        monkeypatch.setattr(Dynamic, "small", small)
        with pytest.raises(RuntimeError, match="outputs are wrong"):
            reference(batch_invariant=False).check()


def test_a_kernel_that_changes_with_the_batch_quantizes_large_ones_as_deep_gemm(dynamic):
    kernel, _ = reference(batch_invariant=False).kernel_and_layer((256, 128))
    assert kernel_scaling(kernel).scale_format == kernel_scaling(kernel, 32).scale_format == "pow2"
    assert kernel_scaling(kernel, 31).scale_format == "fp32"


def test_a_quantizer_that_vllm_compiled_counts_as_torch_operations(monkeypatch):
    """With compilation on vLLM wraps `forward_native` of a quantizer whose own kernel is off."""
    register_cpu_kernel()
    kernel, _ = reference("tensor", "fp32").kernel_and_layer((256, 128))
    quant = kernel.quant_fp8
    assert kernel_scaling(kernel).reciprocal
    monkeypatch.setattr(quant, "_forward_method", torch.compile(quant.forward_native))
    assert kernel_scaling(kernel).reciprocal
    monkeypatch.setattr(quant, "_forward_method", quant.forward_cuda)
    assert not kernel_scaling(kernel).reciprocal


def test_a_division_by_a_scale_and_a_product_with_its_reciprocal_pass_one_check(dynamic, monkeypatch):
    """FlashInfer computes x * (448 / amax), vLLM x / (amax / 448): near a tie these are two codes."""
    apply, off = ReferenceFp8BlockKernel.apply_weights, []

    def multiplied(self, layer, x):
        if type(self) is not ReferenceFp8BlockKernel:
            return apply(self, layer, x)
        groups = x.float().unflatten(-1, (-1, 128))
        factors = 448 / groups.abs().amax(-1, keepdim=True) * off[-1]
        return self.apply_block_scaled_mm(
            (groups * factors).to(E4M3).flatten(-2), layer.weight, 1 / factors[..., 0], layer.weight_scale_inv
        )

    monkeypatch.setattr(ReferenceFp8BlockKernel, "apply_weights", multiplied)
    for factor in (1.0, 1 + 2**-22, 1 - 2**-22):
        off.append(factor)
        reference(batch_invariant=False).check()
    off.append(1 - 2**-5)
    with pytest.raises(RuntimeError, match="outputs are wrong"):
        reference(batch_invariant=False).check()


def test_a_kernel_that_stores_scales_otherwise_is_found_before_an_engine_starts(monkeypatch):
    def packs(self, layer):
        layer.weight_scale_inv = torch.nn.Parameter(layer.weight_scale_inv.int(), requires_grad=False)

    register_cpu_kernel()
    monkeypatch.setattr(ReferenceFp8BlockKernel, "process_weights_after_loading", packs)
    with pytest.raises(ValueError, match="keeps weight_scale_inv as torch.int32"):
        reference().check()


def test_the_user_asks_for_one_of_them_or_for_something_else(monkeypatch):
    asked = []
    monkeypatch.setattr(gemms, "fastest", lambda candidates, *_: asked.append(candidates) or candidates[-1])
    policy = tiny_models.build("qwen3")
    recipe = recipe_for_model(policy)

    def pinned(user, recipe=recipe):
        return pinned_gemm(("cutlass", "triton"), recipe, policy, torch.device("cpu"), user, list, 256)

    assert pinned(None) == pinned({"seed": 1}) == pinned({"linear_backend": "triton"}) == {"linear_backend": "triton"}
    assert pinned({"linear_backend": "cutlass"}) == {"linear_backend": "cutlass"}
    assert [[each.name for each in candidates] for candidates in asked] == [
        ["cutlass", "triton"],
        ["cutlass", "triton"],
        ["triton"],
        ["cutlass"],
    ]
    assert pinned({"linear_backend": "marlin"}) == pinned(None, FP8Recipe(fp8_modules=())) == {}
    assert len(asked) == 4
    # vLLM would prefer an argument `linear_backend` to the entry of the user's kernel_config
    assert pinned({"kernel_config": {"linear_backend": "cutlass"}}) == {"linear_backend": "cutlass"}
    assert pinned({"kernel_config": {"linear_backend": "marlin"}}) == {}
    assert pinned({"kernel_config": {"moe_backend": "triton"}}) == pinned(None)


@pytest.mark.engine
def test_the_engine_runs_the_shapes_that_are_timed(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    held = Counter()
    for module in engine_model(generation.llm).modules():
        if getattr(getattr(module, "quant_method", None), "fp8_linear", None) is not None:
            held[tuple(module.weight.shape)] += 1
    engines.shutdown(generation.llm)
    assert generation.recipe.gemms(outline_of(generation.model)) == held and len(held) == 2


def test_shapes_are_those_of_one_ranks_shards():
    """4 heads and 2 KV heads of 128: with 4 ranks each holds one head of q, and of k and v a copy."""
    policy = tiny_models.build("qwen3", hidden_size=512, intermediate_size=1024, head_dim=128)
    qkv_o_gate_up_down = {
        1: [(1024, 512), (512, 512), (2048, 512), (512, 1024)],
        2: [(512, 512), (512, 256), (1024, 512), (512, 512)],
        4: [(384, 512), (512, 128), (512, 512), (512, 256)],
    }
    for ranks, shapes in qkv_o_gate_up_down.items():
        recipe = recipe_for_model(policy, tensor_parallel_size=ranks)
        assert recipe.gemms(outline_of(policy)) == Counter(2 * shapes)


@pytest.mark.parametrize("found", [None, "/usr/local/cuda/bin/nvcc"])
def test_a_host_without_nvcc_is_told_what_it_loses(found, monkeypatch, caplog):
    monkeypatch.setattr(gemms.shutil, "which", lambda name, path=None: found)
    first, second = kernels(deep_gemm=(1e-6, 1e-6), triton=(2e-6, 2e-6))
    first.broken = RuntimeError("cannot compile")
    assert fastest([first, second], SHAPES, [DECODING]) is second
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "'deep_gemm' is not used: RuntimeError: cannot compile" in warned
    assert ("This host has no nvcc, so it loses DeepGEMM" in warned) is (found is None)


@pytest.fixture
def cuda_hosts(tmp_path, monkeypatch):
    """A host without CUDA; returns the folder of its site-packages, and a function that puts an nvcc into a folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gemms, "TOOLKIT", str(tmp_path / "cuda"))
    site = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [str(site)])

    def install(folder):
        folder.mkdir(parents=True)
        (folder / "nvcc").touch(mode=0o755)

    return site, install


def test_pips_nvcc_is_used_where_there_is_no_other(cuda_hosts, monkeypatch):
    site, install = cuda_hosts
    assert not gemms.find_nvcc() and "CUDA_HOME" not in os.environ
    install(site / "nvidia" / "cu13" / "bin")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    for _ in range(2):
        assert gemms.find_nvcc()
        assert os.environ["CUDA_HOME"] == str(site / "nvidia" / "cu13")
        assert os.environ["NVCC_APPEND_FLAGS"] == "-lineinfo -DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"


@pytest.mark.parametrize("place", ["bin", "cuda/bin", "mine/bin"])
def test_a_hosts_own_nvcc_is_left_alone(place, cuda_hosts, tmp_path, monkeypatch):
    site, install = cuda_hosts
    install(site / "nvidia" / "cu13" / "bin")
    install(tmp_path / place)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "mine"))
    assert gemms.find_nvcc()
    assert "CUDA_HOME" not in os.environ and "NVCC_APPEND_FLAGS" not in os.environ


def test_flashinfer_that_vllm_does_not_take_is_named_with_a_remedy(monkeypatch):
    monkeypatch.setattr(gemms, "find_spec", lambda name: name == "flashinfer")
    monkeypatch.setattr(gemms, "has_flashinfer", lambda: False)
    gemm = Gemm("flashinfer_cutlass", FORMATS["mxfp8"], "pow2", torch.device("cpu"), tiny_models.config())
    with pytest.raises(ValueError, match=r"only if nvcc.* on PATH before .*site-packages/nvidia/cu13/bin"):
        gemm.kernel_and_layer((256, 128))


def test_nvcc_is_found_before_deep_gemm_is_imported(cuda_hosts, monkeypatch):
    site, install = cuda_hosts
    install(site / "nvidia" / "cu13" / "bin")
    seen = []
    monkeypatch.setattr(
        gemms, "init_fp8_linear_kernel", lambda *_, **__: seen.append(os.environ.get("CUDA_HOME")) or object()
    )
    device, shape = torch.device("cpu"), (256, 128)
    for name in ("triton", "deep_gemm"):
        Gemm(name, FORMATS["blocks"], "pow2", device, tiny_models.config()).kernel_and_layer(shape)
    assert seen == [None, str(site / "nvidia" / "cu13")]
