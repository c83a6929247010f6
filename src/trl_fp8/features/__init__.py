"""The features, which are optional, one folder each. Deleting a folder and its line here removes the feature.

For each hook the trainer calls all features in the order of `FOLDERS`. The run log comes after the KV cache, because
it writes what the cache records, and before the correction, because it reads the ratio that a correction replaces.
Truncated sampling comes last, because its output head replaces that of the feature one_forward.
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
