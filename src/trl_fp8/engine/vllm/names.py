"""The names under which an engine that was built holds tensors, against those under which the policy's are sent.

What `trl_fp8.servable` knows of is refused earlier; this finds what it does not know, before anything is trained.
"""

from torch import nn

from trl_fp8.recipe.from_model import outline_of
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.recipe.servable import unservable
from trl_fp8.sync.pieces import Layout


def require_same_names(model: nn.Module, recipe: FP8Recipe, layout: Layout) -> None:
    """Raise `ValueError` if an engine holds tensors under other names than the policy's; the message has some of them.

    The audit of a sync finds the same names, but a sync later, and cannot tell a model that vLLM holds differently
    from a tensor that got lost.
    """
    sent = {recipe.engine_name(name) for name in outline_of(model).parameters}
    sent |= {recipe.scale_name(name) for name in recipe.fp8_tensors}
    unknown = [name for name in sent if name not in layout.pieces and layout.unreadable_name(name) is None]
    filled = {layout.unreadable_name(name) or name for name in sent}
    empty = [name for name in (*layout.pieces, *layout.unreadable) if name not in filled]
    if unknown or empty:
        reason = (
            f"vLLM's class has {len(empty)} tensors under names that the policy does not have ({_some(empty)}), and "
            f"the policy {len(unknown)} that the class does not have ({_some(unknown)})"
        )
        raise ValueError(unservable(recipe.model_type, reason))


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "") if names else "none"
