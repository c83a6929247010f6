"""Plain tensors in place of an engine's, for tests of a sync without an engine."""

from types import SimpleNamespace

import torch

from trl_fp8.recipe.from_model import persistent_buffers
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.sync.weight_stream import weight_stream


def layout_for(model: torch.nn.Module, recipe: FP8Recipe) -> Layout:
    """Return a layout of zeros, in the form and on the device of what is sent."""
    pieces = []
    for name, tensor in weight_stream(model.named_parameters(), recipe, buffers=persistent_buffers(model)):
        pieces.append(Piece(name, SimpleNamespace(tensor=torch.zeros_like(tensor)), "tensor", tensor.dtype))
    return Layout(pieces)
