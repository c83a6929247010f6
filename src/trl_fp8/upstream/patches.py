"""Replacing a name of another library, for the duration of one block."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def substituted(module: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """`module.name` is `replacement` inside the block, and what it was before after it, whatever happens.

    TRL 1.16: `trl.trainer.grpo_trainer.VLLMGeneration` (constructed at line 1107) and
    `trl.generation.vllm_generation.LLM` (line 347).
    """
    original = module.__dict__[name]
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
