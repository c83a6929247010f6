"""Kernels that engine and trainer share on CUDA, part by part: a row's bits in one batch are its bits in another.

Each test names the part, so that one run says which is not equal. Written from vLLM's source and not yet run: no GPU
was at hand. That names, arguments and shapes fit was seen on fake tensors (`gpu/dry_run.py`).
"""

from itertools import accumulate

import pytest
import torch
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

from testing import engines, tiny_models
from testing.processes import free_port
from trl_fp8.engine.vllm.gemms import Gemm
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.one_forward.followed_attention import flash_gradients, in_flash_attention, plain_gradients
from trl_fp8.quantization.formats import BLOCKS
from trl_fp8.upstream.vllm import engine_config, engine_model


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = (1, 7, 64, 300, 4096)
POSITIONS = (3, 4095, 32767)
LENGTHS = (5, 300, 1, 129, 777)


def values(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)  # there: some of them are hundreds of megabytes
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def require_rows_alike(compute, *inputs, rows=ROWS):
    """The first rows alone have the bits that they have in a batch of the most."""
    whole = compute(*(tensor[: rows[-1]] for tensor in inputs))
    wholes = whole if isinstance(whole, tuple) else (whole,)
    for count in rows:
        found = compute(*(tensor[:count].clone() for tensor in inputs))
        for one, all_rows in zip(found if isinstance(found, tuple) else (found,), wholes, strict=True):
            differ = int((one != all_rows[:count]).sum())
            assert differ == 0, f"{differ} of {one.numel()} values of {count} rows differ"


# Before the group is made: an engine makes its own, and takes it down
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_router_and_experts(architecture, fp8, checkpoint):
    from vllm.forward_context import set_forward_context

    generation = engines.start(
        checkpoint(architecture, num_experts=8),
        engines.some_scales(2, 1),
        parts=[SharedKernelsPart()],
        expert_kernels=fp8,
    )
    generation.sync_weights()
    block, rows = engine_model(generation.llm).model.layers[1], (1, 7, 64, 300, 1024)
    experts = block.mlp if hasattr(block, "mlp") else block.block_sparse_moe
    x = values(rows[-1], generation.model.config.hidden_size)
    with torch.no_grad(), set_forward_context(None, engine_config(generation.llm)):
        require_rows_alike(lambda x: experts.gate(x)[0], x, rows=rows)
        require_rows_alike(experts, x, rows=rows)
    engines.shutdown(generation.llm)


@pytest.fixture(scope="module")
def group():
    """A process group of one rank: to make one takes longer than most tests of this file."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "nccl")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def config(checkpoint, group):
    """vLLM's configuration, in a process group of one rank."""
    from testing.engine_parts import configured

    with configured(checkpoint("qwen3")) as configuration, torch.no_grad():
        yield configuration


def norm_of(size, kind):
    from vllm.model_executor.layers import layernorm

    norm = getattr(layernorm, kind)(size, eps=1e-6)
    norm.weight.data.copy_(1 + values(size, seed=9) / 4)
    return norm


NORMS = pytest.mark.parametrize("kind", ["RMSNorm", "GemmaRMSNorm"])


@NORMS
@pytest.mark.parametrize("size", [4096, 2560, 896])
def test_norm(config, size, kind):
    require_rows_alike(norm_of(size, kind), 3 * values(4096, size))


def test_norm_of_heads(config):
    """Norm queries as they lie in the output of a fused linear layer."""
    norm = norm_of(128, "RMSNorm")
    require_rows_alike(lambda x: norm(x[:, :4096].view(-1, 32, 128)), values(4096, 6144))


@NORMS
@pytest.mark.parametrize("size", [4096, 896])
def test_norm_with_a_residual_is_a_sum_in_bf16_and_the_norm(config, size, kind):
    norm, x, residual = norm_of(size, kind), values(4096, size), 10 * values(4096, size, seed=1)
    for rows in ROWS:
        summed = x[:rows] + residual[:rows]
        normalized, new_residual = norm(x[:rows].clone(), residual[:rows].clone())
        assert torch.equal(new_residual, summed)
        assert torch.equal(normalized, norm(summed))
    assert not torch.equal(norm(x.float() + residual.float()).bfloat16(), norm(x + residual))


def test_rotary(config):
    """Tokens alone and between others; queries and keys by themselves and as columns of a wider tensor."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = get_rope(128, 40960, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}).cuda()
    assert rope._forward_method.__name__ == "forward_cuda"
    positions = torch.randint(0, 40960, (4096,), device="cuda")
    positions[: len(POSITIONS)] = torch.tensor(POSITIONS, device="cuda")
    qkv = values(4096, 6144)
    apart = [qkv[:, :4096].contiguous(), qkv[:, 4096:5120].contiguous()]
    whole = rope(positions, *(one.clone() for one in apart))
    wide = qkv.clone()
    rope(positions, wide[:, :4096], wide[:, 4096:5120])
    assert torch.equal(wide[:, :4096], whole[0]) and torch.equal(wide[:, 4096:5120], whole[1])
    require_rows_alike(lambda at, q, k: rope(at, q.clone(), k.clone()), positions, *apart)
    cache = rope.cos_sin_cache[list(POSITIONS)].float()
    assert (cache.square().view(3, 2, 64).sum(1) - 1).abs().max() < 2**-6  # a cosine and a sine, in BF16


@pytest.mark.parametrize("backend", ["cutlass", "deep_gemm", "triton"])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (256, 128), (24576, 1536)], ids=str)
def test_fp8_gemm(backend, shape):
    """The last shape is one for which vLLM has measured tiles of Triton."""
    gemm = Gemm(backend, BLOCKS, "pow2", torch.device("cuda", torch.cuda.current_device()), tiny_models.config())
    try:
        kernel, layer = gemm.kernel_and_layer(shape)
    except ValueError as reason:
        pytest.skip(str(reason))
    kernel.process_weights_after_loading(layer)
    layer.weight.view(torch.uint8).bitwise_xor_(torch.randint(0, 2, shape, device="cuda").mul_(0x80).to(torch.uint8))
    with torch.no_grad():
        require_rows_alike(lambda x: kernel.apply_weights(layer, x), values(4096, shape[1]))


HEADS = [(151936, 4096), (151936, 2048), (152064, 3584)]  # Qwen3-8B's, Qwen3-1.7B's and Qwen2.5-7B's
NARROW = [(128, 2048), (96, 4096), (32, 12288)]  # a router, and the A of adapters of rank 32
COLUMNS = [(12288, 2048), (2048, 6144), (6144, 96)]  # two for which vLLM has measured tiles, and the B of an adapter


@pytest.mark.parametrize("shape", HEADS + NARROW + COLUMNS, ids=str)
def test_unquantized_head_router_and_adapter(config, shape):
    """vLLM has measured tiles by the number of rows for the second head, on Hopper."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    layer, x = SimpleNamespace(weight=values(*shape)), values(4096, shape[1], seed=1)
    method = UnquantizedEmbeddingMethod() if shape in HEADS else UnquantizedLinearMethod()
    require_rows_alike(lambda x: method.apply(layer, x), x, rows=(1, 16, 64, 65, 4096))
    exact = x[:64].double() @ layer.weight.double().T
    # a rounding to BF16, and far more than FP32 sums lose: a wrong mask or a wrong step of K loses whole terms
    bound = 2.0**-9 * exact.abs() + 2.0**-10 * (x[:64].abs().double() @ layer.weight.abs().double().T)
    assert ((method.apply(layer, x[:64]).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["SiluAndMul", "GeluAndMul"])
def test_activation(config, kind):
    from vllm.model_executor.layers import activation

    act = getattr(activation, kind)()
    assert act._forward_method.__name__ == "forward_cuda"
    require_rows_alike(act, 4 * values(4096, 24576))


ATTENTION = pytest.mark.parametrize(
    ("head_size", "window", "softcap"),
    [(128, None, None), (64, None, None), (256, None, None), (128, 64, None), (256, 64, None), (128, None, 30.0)],
    ids=str,
)
CACHE = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


def sequences(config, head_size, fp8, window, softcap):
    from testing.engine_parts import BLOCK, LONGEST, PagedAttention

    scales = torch.tensor([0.5, 0.25, 0.125], device="cuda", dtype=torch.float32)
    paged = PagedAttention(config, head_size, fp8, window, softcap, scales)
    tokens = sum(LENGTHS)
    qkv = [3 * values(tokens, n, head_size, seed=n + i) for i, n in enumerate((paged.heads, *2 * (paged.groups,)))]
    pages = torch.randperm(2 * LONGEST // BLOCK, device="cuda")
    table = pages[: len(LENGTHS) * (1024 // BLOCK)].view(len(LENGTHS), -1).to(torch.int32)
    return paged, qkv, table, scales if fp8 else None


@CACHE
@ATTENTION
def test_attention_of_decode_is_that_of_prefill(config, head_size, fp8, window, softcap):
    """Single queries over scattered pages, all sequences together and each alone."""
    paged, qkv, table, _ = sequences(config, head_size, fp8, window, softcap)
    whole = paged(*qkv, list(LENGTHS), list(LENGTHS), table)
    ends = list(accumulate(LENGTHS))
    for back in (0, 1, 40):
        rows = [row for row, length in enumerate(LENGTHS) if length > back]
        for batch in [rows, *([row] for row in rows)]:
            at = torch.tensor([ends[row] - 1 - back for row in batch], device="cuda")
            seen = [LENGTHS[row] - back for row in batch]
            found = paged(*(one[at] for one in qkv), [1] * len(batch), seen, table[batch])
            assert torch.equal(found, whole[at]), f"{back} from the end, sequences {batch}"


@CACHE
@ATTENTION
def test_attention_of_the_trainer_is_that_of_prefill(config, head_size, fp8, window, softcap):
    from trl_fp8.features.one_forward.engine_flash_attention import PackedAttention

    paged, qkv, table, scales = sequences(config, head_size, fp8, window, softcap)
    whole = paged(*qkv, list(LENGTHS), list(LENGTHS), table)
    attend = PackedAttention(paged.layer)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    output, lse, rounded = attend(*qkv, starts, max(LENGTHS), scales)
    assert torch.equal(output, whole)
    assert attend.window == window and attend.softcap == softcap
    for one, original in zip(rounded, qkv, strict=True):
        assert (
            torch.equal(one, original) is not fp8 and (one - original).abs().max() <= original.abs().max() / 16 + 2**-6
        )
    first = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)  # a first token sees itself alone
    own = (rounded[0][first].float() * rounded[1][first].float().repeat_interleave(4, 1)).sum(-1) * attend.scaling
    own = softcap * torch.tanh(own / softcap) if softcap else own
    assert (lse[:, first].T - own).abs().max() < 1e-3 * own.abs().max()


@pytest.mark.parametrize(("head_size", "window"), [(128, None), (64, None), (128, 64), (256, None)], ids=str)
def test_attention_backward_is_the_plain_one(head_size, window):
    """FlashAttention rounds p and ds to BF16, 2^-9 of each; many of them add up to a few times that of the largest."""
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    rounded = [values(sum(LENGTHS), n, head_size, seed=n + i) for i, n in enumerate((8, 2, 2))]
    gradient, options = values(sum(LENGTHS), 8, head_size, seed=5), (starts, max(LENGTHS), head_size**-0.5, window)
    assert in_flash_attention(rounded[0], None)
    lengths = (starts, starts, max(LENGTHS), max(LENGTHS), 0.0, True)
    seen = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0, "scale": options[2]}
    softmax = torch.ops.aten._flash_attention_forward(*rounded, *lengths, False, **seen)[:2]
    plain = plain_gradients(rounded, softmax[1], gradient, *options, None)
    for softmax_or_none in (softmax, None):
        for one, right in zip(flash_gradients(rounded, softmax_or_none, gradient, *options), plain, strict=True):
            assert (one.float() - right).abs().max() <= 2**-6 * right.abs().max()
            assert (one.float() - right).norm() <= 2**-7 * right.norm()
