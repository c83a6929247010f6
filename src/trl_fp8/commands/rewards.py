"""The rewards of `trl-fp8 train`: TRL's by their names, anybody's by a dotted path."""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

from .run_config import did_you_mean


VERIFIED = ("accuracy_reward", "reasoning_accuracy_reward")  # they compare answers with math-verify
OF_MESSAGES = (*VERIFIED, "think_format_reward")  # they read the content of a completion's message
OVERLONG = "soft_overlong_punishment"
NAMES = (*OF_MESSAGES, "get_soft_overlong_punishment", OVERLONG)


def check_rewards(asked: list[str], reward_model: str | None) -> None:
    """Raise `ValueError` for rewards that cannot be found or computed here; no module of a reward is imported, but
    its source is looked at.
    """
    if not asked and not reward_model:
        raise ValueError(f"reward_funcs is not set. Use some of {', '.join(NAMES)}, or a path as in my_module.reward.")
    for name in map(str, asked):
        module = name.rpartition(".")[0]
        if not module and name not in NAMES:
            known = f". Use some of {', '.join(NAMES)}, or the path of a function, as in my_module.reward."
            raise ValueError(f"reward_funcs: there is no {name!r}{did_you_mean(name, NAMES, known)}")
        if module and not _found(module):
            raise ValueError(f"reward_funcs: {name!r}: no module {module!r} is installed, or in {Path.cwd()}.")
        if module and (bound := _bound_in(module)) is not None:
            _require_function(module, name.rpartition(".")[2], bound)
    if (verified := set(VERIFIED) & set(asked)) and find_spec("math_verify") is None:
        raise ValueError(
            f"reward_funcs: {min(verified)} compares answers with math-verify, which is not installed: "
            "pip install 'trl-fp8[recipes]'"
        )


def reward_functions(asked: list[str], max_completion_length: int, overlong_buffer: int) -> list[Callable]:
    """The functions of the names in `asked`. `ValueError` if a module has no such function."""
    from trl.rewards import get_soft_overlong_punishment

    punishments = {
        OVERLONG: get_soft_overlong_punishment(max_completion_length, overlong_buffer),
        "get_soft_overlong_punishment": get_soft_overlong_punishment(1280, 256),  # as `trl grpo` has it
    }
    return [punishments.get(name) or _imported(name) for name in asked]


def _imported(path: str) -> Callable:
    module, _, name = path.rpartition(".")
    _look_here()
    try:
        functions = import_module(module or "trl.rewards")
    except (ValueError, OSError) as error:  # of the module itself: its traceback is what helps
        raise RuntimeError(f"reward_funcs: {module} cannot be imported.") from error
    _require_function(module, name, dir(functions))
    return getattr(functions, name)


def _require_function(module: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"reward_funcs: {module} has no {name!r}{did_you_mean(name, known)}")


def _bound_in(module: str) -> set[str] | None:
    """Names that the source of a module binds outside of functions and classes; None if it shows only a part."""
    source = find_spec(module).origin
    if source is None or not source.endswith(".py"):
        return None
    try:
        text = Path(source).read_text()
        symbols = symtable(text, source, "exec").get_symbols()
    except (SyntaxError, UnicodeDecodeError):  # the import shows where
        return None
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return None if "import *" in text or "__getattr__" in bound else bound  # a table has no names of a star


def _found(module: str) -> bool:
    _look_here()
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of what stands before the last dot
        return False


def _look_here() -> None:
    """Modules beside the user are found, as by `trl grpo`."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
