"""The optional capabilities, one folder each. Deleting a folder and its line here removes the capability.

The trainer calls the hooks of all features in this order: the run log writes what the KV cache recorded of a batch,
the correction replaces the ratio that the log has read, and truncated sampling scores with an output head of its own
in the place of one forward's.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from trl_fp8.run.registration import Registration


FOLDERS = (
    "shared_base",
    "kv_cache",
    "router_replay",
    "run_log",
    "correction",
    "one_forward",
    "truncated_sampling",
)


@cache
def registrations() -> "tuple[Registration, ...]":
    """What the features registered, in the order of `FOLDERS`."""
    return tuple(import_module(f"{__name__}.{folder}").REGISTRATION for folder in FOLDERS)
