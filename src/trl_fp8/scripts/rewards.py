"""The rewards of a run: TRL's by their names, others by a dotted path."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_fp8.run.lines import did_you_mean


VERIFIED = ("accuracy_reward", "reasoning_accuracy_reward")  # rewards that compare answers with math-verify
MESSAGE_REWARDS = (*VERIFIED, "think_format_reward")  # rewards that read the content of a completion's message
OVERLONG = "soft_overlong_punishment"
NAMES = (*MESSAGE_REWARDS, "get_soft_overlong_punishment", OVERLONG)


def require_rewards(script: Any) -> None:
    """Raise `ValueError` for unknown rewards.

    The modules of rewards are not imported, but the packages that contain these modules are. Inserts the working
    directory into `sys.path`.
    """
    if not script.reward_funcs and not script.reward_model_name_or_path:
        raise ValueError(f"reward_funcs is not set. Use some of {', '.join(NAMES)}, or a path as in my_module.reward.")
    if str(Path.cwd()) not in sys.path:  # import modules from the working directory, as `trl grpo` does
        sys.path.insert(0, str(Path.cwd()))
    for path in map(str, script.reward_funcs or ()):
        module = path.rpartition(".")[0]
        if not module and path not in NAMES:
            advice = f". Use some of {', '.join(NAMES)}, or the path of a function, as in my_module.reward."
            raise ValueError(f"reward_funcs: there is no {path!r}{did_you_mean(path, NAMES, otherwise=advice)}")
        if module and not _is_installed(module):
            raise ValueError(
                f"reward_funcs: {path!r}: there is no module {module!r}, neither installed nor in {Path.cwd()}."
            )
        if path in VERIFIED and not _is_installed("math_verify"):
            raise ValueError(
                f"reward_funcs: {path} compares answers with math-verify, which is not installed: "
                "pip install 'trl-fp8[recipes]'"
            )


def reward_functions(script: Any, max_completion_length: int) -> list[Callable | str]:
    """Return the rewards of a run: functions, and the name of a reward model. Raise `ValueError` for unknown ones."""
    from trl import rewards

    # (max_completion_len, soft_punish_cache) of TRL's get_soft_overlong_punishment, in tokens
    lengths = {
        OVERLONG: (max_completion_length, script.overlong_buffer),
        "get_soft_overlong_punishment": (1280, 256),  # the values of `trl grpo`
    }
    functions = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for path in map(str, script.reward_funcs or ()):
        if path in lengths:
            functions.append(rewards.get_soft_overlong_punishment(*lengths[path]))
            continue
        module_name, _, name = path.rpartition(".")
        try:
            module = import_module(module_name) if module_name else rewards
        except (ValueError, OSError) as error:
            # RuntimeError: callers print a ValueError or OSError as one line, and the user needs the traceback of
            # their module
            raise RuntimeError(f"reward_funcs: {module_name} cannot be imported.") from error
        if name not in dir(module):
            raise ValueError(f"reward_funcs: {module_name} has no {name!r}{did_you_mean(name, dir(module))}")
        functions.append(getattr(module, name))
    return functions


def _is_installed(module: str) -> bool:
    """Return whether a module can be found. This imports its parent packages, and raises the errors of their code."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        parts = module.split(".")
        own_names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}  # the module's and its packages'
        if error.name in own_names:
            return False
        raise  # a library that a package imports is not installed
    except (ValueError, OSError) as error:  # see `reward_functions`
        raise RuntimeError(f"reward_funcs: a package of {module} cannot be imported.") from error
