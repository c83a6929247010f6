"""On PYTHONPATH of every process under `make test ISA=avx2`: torch says that the CPU has neither AVX-512 nor
AMX, by which vLLM picks the extension that it loads and its kernels. What torch and oneDNN use themselves is
set by their own environment variables in the Makefile.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder


class WithoutAVX512(MetaPathFinder):
    """Changes `torch.cpu` when it is imported; nothing is imported before somebody asks for it."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            for feature in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
                setattr(module, f"_is_{feature}_supported", lambda: False)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, WithoutAVX512())
