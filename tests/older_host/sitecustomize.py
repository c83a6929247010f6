"""On PYTHONPATH of every process under `make test ISA=avx2`: torch says that the CPU has no AVX-512, by
which vLLM picks the extension that it loads. What torch and oneDNN use themselves is set by their own
environment variables in the Makefile.
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
            module._is_avx512_supported = module._is_avx512_bf16_supported = lambda: False

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, WithoutAVX512())
