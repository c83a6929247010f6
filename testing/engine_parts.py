"""Single layers of vLLM on CUDA, configured as an engine is whose trainer shares its kernels; no engine is started."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor
from transformers import AutoConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from trl_fp8.engine.vllm.platform import platform_of
from trl_fp8.features.one_forward.engine_invariance import CUDA
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.quantization.codec.e4m3 import E4M3
from trl_fp8.recipe.recipe import FP8Recipe


BLOCK, LONGEST = 16, 4096  # slots of a page, max_model_len
NUMBERS = count()


@contextmanager
def configured(folder: str) -> Iterator[VllmConfig]:
    """Give vLLM's layers inside the block the settings of a shared engine, on the GPU and in BF16."""
    recipe = FP8Recipe(fp8_modules=("a",), kept_modules={"lm_head": "output head"})
    platform = platform_of(torch.device("cuda"))
    sizes = {"max_num_seqs": 64, "max_model_len": LONGEST}
    user = {"enforce_eager": True, "block_size": BLOCK, "hf_overrides": {"max_position_embeddings": LONGEST}}
    part = SharedKernelsPart()
    with part.starting(platform, recipe):
        model = AutoConfig.from_pretrained(folder)
        engine_args = platform.arguments(recipe, model, **sizes, parts=[part], user=user)
        config = EngineArgs(model=folder, skip_tokenizer_init=True, **(sizes | engine_args)).create_engine_config()
        CUDA.require(config)
        config.kernel_config.ir_op_priority.set_default()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("cuda"):
            yield config


class PagedAttention:
    """An attention layer with a cache, called as vLLM's model runner calls it.

    Shape letters: N new tokens of all sequences, R sequences, H query heads, G key heads, D head size.
    """

    def __init__(
        self, config: VllmConfig, head_size: int, fp8: bool, window: int | None, softcap: float | None, scales: Tensor
    ):
        from trl_fp8.features.one_forward.engine_flash_attention import InvariantFlashAttention

        self.config, self.heads, self.groups = config, 8, 2
        cache = replace(config.cache_config, cache_dtype="fp8" if fp8 else "auto")
        self.layer = Attention(
            self.heads,
            head_size,
            head_size**-0.5,
            self.groups,
            cache_config=cache,
            logits_soft_cap=softcap,
            per_layer_sliding_window=window,
            prefix=f"model.layers.{next(NUMBERS)}.self_attn.attn",
            attn_backend=InvariantFlashAttention,
        )
        dtype = torch.uint8 if fp8 else torch.bfloat16
        self.layer.kv_cache = torch.zeros(2 * LONGEST // BLOCK, self.groups, BLOCK, 2 * head_size, dtype=dtype)
        for name, scale in zip("qkv", scales, strict=True):
            getattr(self.layer, f"_{name}_scale").copy_(scale if fp8 else torch.ones(()))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], seen: list[int], table: Tensor
    ) -> Tensor:
        """Return the output `[N, H, D]` for the last `lengths` of `seen` tokens of sequences with pages `table`."""
        layer, starts = self.layer, torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)
        positions = [torch.arange(end - length, end) for length, end in zip(lengths, seen, strict=True)]
        pairs = zip(table, positions, strict=True)
        slots = torch.cat([row[at // BLOCK].long() * BLOCK + at % BLOCK for row, at in pairs])
        batch = CommonAttentionMetadata(
            query_start_loc=starts.to(query.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seen, dtype=torch.int32),
            num_reqs=len(lengths),
            num_actual_tokens=len(query),
            max_query_len=max(lengths),
            max_seq_len=max(seen),
            block_table_tensor=table,
            slot_mapping=slots,
        )
        spec = layer.get_kv_cache_spec(self.config)
        builder = layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], self.config, query.device)
        rounded = query
        if layer.query_quant is not None:
            rounded = layer.query_quant(query.flatten(1), layer._q_scale)[0].view(query.shape)
            assert rounded.dtype == E4M3
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        output = torch.empty_like(query)
        return layer.impl.forward(layer, rounded, key, value, layer.kv_cache, builder.build(0, batch), output)
