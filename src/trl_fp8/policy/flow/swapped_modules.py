"""Modules of a policy that stay the objects they are and compute something else: only their class is exchanged.

So parameters, names, state dict, hooks, PEFT wrappers and sharding stay as they are.
"""

from functools import cache

from torch import nn


class SwappedModules:
    """What was installed together, and is removed together.

    Attributes:
        modules: Name -> module, in model order.
    """

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules

    def invalidate(self) -> None:
        """Drop every kept weight. To be called after each optimizer step, checkpoint load, merge and unmerge."""
        for module in self.modules.values():
            module._quantized.clear()

    def remove(self) -> None:
        """Turn the modules back into what they were."""
        for module in self.modules.values():
            for name in type(module).attributes:
                module.__dict__.pop(name, None)
            module.__class__ = type(module).before


@cache
def swapped_class(mixin: type, cls: type[nn.Module], prefix: str, attributes: tuple[str, ...] = ()) -> type:
    """`cls` with `mixin` before it, and what `SwappedModules.remove` needs: the class, and attributes to delete."""
    members = {"__module__": cls.__module__, "before": cls, "attributes": attributes}
    return type(f"{prefix}{cls.__name__}", (mixin, cls), members)
