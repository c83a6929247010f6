"""What arms are called where people read of them."""

from collections.abc import Sequence


TASKS = {"automaton": "automaton", "addition": "addition", "addition_moe": "addition by experts"}
ROLLOUTS = {"bf16": "BF16", "full_flow": "one forward", "mxfp8": "MXFP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
CORRECTIONS = {"tis": "TIS", "mis": "MIS", "icepop": "IcePop", "geometric": "geometric band and TIS"}


def rollouts(arm: str) -> str:
    name = arm.split("-")[1]
    return ROLLOUTS.get(name, name)


def correction(arm: str) -> str:
    name = arm.split("-")[2]
    return CORRECTIONS.get(name, name)


def precision(arm: str) -> str:
    """Of the trainer, where it is not TRL's."""
    return {"bf16_emulated": "BF16 emulated", "fp16_emulated": "FP16 emulated"}.get(arm.split("-")[3], "")


def pressure(arm: str) -> str:
    rate, updates = arm.rsplit("-", 1)[1].split("x")
    return f"learning rate x{rate}, updates x{updates}"


def task(arm: str) -> str:
    return TASKS[arm.partition("-")[0]]


def short(arm: str, beside: Sequence[str] = ()) -> str:
    """Rollouts, correction and precision; and the task if it is not that of the arms `beside`."""
    corrected = "" if correction(arm) == "none" else correction(arm)
    elsewhere = task(arm) if {task(arm)} != {task(arm), *map(task, beside)} else ""
    return " ".join(filter(None, (rollouts(arm), corrected, precision(arm), elsewhere)))
