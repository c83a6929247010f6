"""The optional capabilities, one folder each. Deleting a folder and its line here removes the capability.

The trainer calls the hooks of all features in this order. The run log comes after the KV cache, whose records it
writes, and before the correction, which replaces the ratio that it reads. Truncated sampling comes last: its output
head takes the place of one forward's.
"""

from functools import cache
from importlib import import_module

from trl_fp8.run.feature import Registration


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
def registrations() -> tuple[Registration, ...]:
    """Return the registrations of all features, in the order of `FOLDERS`."""
    return tuple(import_module(f"{__name__}.{folder}").REGISTRATION for folder in FOLDERS)
