"""The rewards of a run: TRL's by their names, others by a dotted path."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_fp8.run.lines import did_you_mean


VERIFIED = ("accuracy_reward", "reasoning_accuracy_reward")  # they compare answers with math-verify
OF_MESSAGES = (*VERIFIED, "think_format_reward")  # they read the content of a completion's message
OVERLONG = "soft_overlong_punishment"
NAMES = (*OF_MESSAGES, "get_soft_overlong_punishment", OVERLONG)


def require_rewards(script: Any) -> None:
    """Raise `ValueError` for unknown rewards, without importing their modules."""
    if not script.reward_funcs and not script.reward_model_name_or_path:
        raise ValueError(f"reward_funcs is not set. Use some of {', '.join(NAMES)}, or a path as in my_module.reward.")
    if str(Path.cwd()) not in sys.path:  # import modules from the working directory, as `trl grpo` does
        sys.path.insert(0, str(Path.cwd()))
    for path in map(str, script.reward_funcs or ()):
        module = path.rpartition(".")[0]
        if not module and path not in NAMES:
            known = f". Use some of {', '.join(NAMES)}, or the path of a function, as in my_module.reward."
            raise ValueError(f"reward_funcs: there is no {path!r}{did_you_mean(path, NAMES, known)}")
        if module and not _is_installed(module):
            raise ValueError(f"reward_funcs: {path!r}: no module {module!r} is installed, or in {Path.cwd()}.")
        if path in VERIFIED and not _is_installed("math_verify"):
            raise ValueError(
                f"reward_funcs: {path} compares answers with math-verify, which is not installed: "
                "pip install 'trl-fp8[recipes]'"
            )


def reward_functions(script: Any, max_completion_length: int) -> list[Callable | str]:
    """Return the rewards of a run. `ValueError` if a module has no such function."""
    from trl import rewards

    # TRL makes these two rewards from a longest completion and a buffer before it, both in tokens
    lengths = {
        OVERLONG: (max_completion_length, script.overlong_buffer),
        "get_soft_overlong_punishment": (1280, 256),  # the values of `trl grpo`
    }
    found = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for path in map(str, script.reward_funcs or ()):
        if path in lengths:
            found.append(rewards.get_soft_overlong_punishment(*lengths[path]))
            continue
        module, _, name = path.rpartition(".")
        try:
            functions = import_module(module) if module else rewards
        except (ValueError, OSError) as error:  # raised by the user's module: its traceback helps, a line does not
            raise RuntimeError(f"reward_funcs: {module} cannot be imported.") from error
        if name not in dir(functions):
            raise ValueError(f"reward_funcs: {module} has no {name!r}{did_you_mean(name, dir(functions))}")
        found.append(getattr(functions, name))
    return found


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
