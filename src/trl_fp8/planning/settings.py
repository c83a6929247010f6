"""What a plan is asked for: the words of a command line, and under them a recipe of TRL's, checked one by one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .capacity import LORA_RANK, Setup
from .roofline import GIB
from .trainer_memory import BYTES, Training


MOST = 2**20
CONTEXT, COMPLETIONS, MOST_PROMPT = 4096, 256, 512  # what is planned for where nothing is said
GROUP = 8  # TRL's num_generations
# TRL's defaults of what a recipe leaves out
_TRL = {"per_device_train_batch_size": 8, "max_completion_length": 512, "vllm_gpu_memory_utilization": 0.3}
_TRL |= {"vllm_tensor_parallel_size": 1, "lora_r": 16}


@dataclass(frozen=True)
class Settings:
    """Values by TRL's names. `words` come from the command line, under its own names, and win over the recipe's."""

    words: Mapping[str, Any]  # without those that were not given
    flags: Mapping[str, str]  # TRL's name -> its flag here
    recipe: Mapping[str, Any] | None = None  # None: there is none, and nothing has TRL's defaults

    def value(self, key: str, default: Any = None) -> Any:
        """`default` where neither command line nor recipe have the value; null is as if it were left out."""
        defaults = {} if self.recipe is None else _TRL
        found = self.words.get(key, (self.recipe or {}).get(key))
        return defaults.get(key, default) if found is None else found

    @property
    def assumed(self) -> list[str]:
        """Flags of the machine that neither command line nor recipe give."""
        return [self.flags[key] for key in ("num_processes", "gpu_memory") if self.value(key) is None]

    def shown(self, key: str) -> str:
        """Flag and value, for messages."""
        value = self.value(key)
        return f"{self.flags[key]} {value}" if key in self.words else f"{key}={value!r}"

    def number(
        self, key: str, default: float | None, least: float, most: float, wanted: str, whole: bool = True
    ) -> Any:
        """A number within bounds, of which `whole` numbers are integers. ValueError says what is `wanted`."""
        if (found := self.value(key, default)) is None:
            return None
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not least <= number <= most or (whole and number != int(number)):
            raise ValueError(f"{self.shown(key)}: {wanted}.")
        return int(number) if whole else number

    def truth(self, key: str, default: bool = False) -> bool:
        found = self.value(key, default)
        words = {"true": True, "false": False}
        found = words.get(found.lower(), found) if isinstance(found, str) else found
        if not isinstance(found, bool):
            raise ValueError(f"{self.shown(key)}: give true or false.")
        return found

    def any_number(self, key: str) -> float:
        whole = isinstance(self.value(key), int)
        return self.number(key, None, -math.inf, math.inf, "give a number", whole)

    def text(self, key: str) -> str:
        if not isinstance(found := self.value(key), str):
            raise ValueError(f"{self.shown(key)}: give a word.")
        return found

    def names(self, key: str) -> list[str] | None:
        """A list of names or numbers, or one of them."""
        found = self.value(key)
        found = [found] if isinstance(found, str | int) else found
        if found is not None and not (isinstance(found, list) and all(isinstance(one, str | int) for one in found)):
            raise ValueError(f"{self.shown(key)}: give a list of names.")
        return None if found is None else [str(one) for one in found]

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        if (found := self.value(key, default)) not in choices:
            raise ValueError(f"{self.shown(key)}: give one of {', '.join(choices)}.")
        return found

    def count(self, key: str, default: int | None, of: str, most: int = MOST) -> int | None:
        return self.number(key, default, 1, most, f"give a number of {of}, 1 or more")

    def setup(self, model_context: int) -> Setup:
        """What to plan for. `model_context`: most tokens of a sequence, 0 if not known.

        Raises:
            ValueError: A value is of no use, or does not go with another. The message names it and the remedy.
        """
        ranks = self.count("vllm_tensor_parallel_size", None, "GPUs that share an engine")
        gpus = self.count("num_processes", ranks or 1, "GPUs")
        if ranks is not None and gpus % ranks:
            raise ValueError(
                f"{self.shown('vllm_tensor_parallel_size')} on {gpus} GPUs: each engine runs on that many training "
                f"processes. Give --gpus {ranks}, or a multiple of it."
            )
        memory = self.number("gpu_memory", 80.0, 1, 4096, "give the GiB of one GPU, e.g. 24, 80 or 141", whole=False)
        share = self.number("vllm_gpu_memory_utilization", None, 0.01, 0.99, "give a share of a GPU, e.g. 0.5", False)
        completion = self.count("max_completion_length", None, "tokens")
        tokens = self._tokens(completion, model_context)
        prompt = tokens - completion if completion and completion < tokens else min(MOST_PROMPT, tokens // 2)
        fp8_base = self.truth("fp8_base")
        training = Training(
            gpus=gpus,
            lora_rank=self._lora_rank(fp8_base),
            dtype=self.choice("dtype", "bfloat16" if fp8_base else "float32", tuple(BYTES)),
            sequences=self.count("per_device_train_batch_size", 1, "sequences"),
            tokens=tokens,
            has_reference=self.number("beta", 0.0, 0, math.inf, "give the weight of the KL penalty", False) > 0,
            fp8_base=fp8_base,
        )
        sleeps = self.truth("vllm_enable_sleep_mode")
        completions = self._completions(training)
        group = self.count("num_generations", GROUP, "completions of a prompt")
        if self.recipe is not None and completions % group:
            raise ValueError(
                f"{completions} completions a generation (GPUs * per_device_train_batch_size * steps) with "
                f"num_generations={group}: TRL wants whole groups. Change gradient_accumulation_steps or --gpus."
            )
        shares_kernels = self.value("fp8_forward", "off") != "off"
        return Setup(training, memory * GIB, prompt, completions, group, ranks, share, sleeps, shares_kernels)

    def _tokens(self, completion: int | None, model_context: int) -> int:
        """Of the longest sequence."""
        wanted = "give the tokens of a prompt and its completion together, 2 or more"
        default = min(CONTEXT, model_context or CONTEXT) if completion is None else completion + MOST_PROMPT
        tokens = self.number("vllm_max_model_length", default, 2, 2**26, wanted)
        if model_context and tokens > model_context:
            named = "vllm_max_model_length" if self.value("vllm_max_model_length") else "max_completion_length"
            raise ValueError(
                f"{self.shown(named)}: the model's config promises {model_context:,} tokens, and vLLM refuses "
                f"more. Give {model_context} or less."
            )
        return tokens

    def _lora_rank(self, fp8_base: bool) -> int | None:
        """None: all weights are trained."""
        if "lora_r" not in self.words and not self.truth("use_peft"):
            if fp8_base and "fp8_base" not in self.words:
                raise ValueError(
                    f"{self.shown('fp8_base')} without adapters: an FP8 base is frozen, so nothing would be trained. "
                    "Set use_peft: true, or fp8_base: false."
                )
            if not fp8_base:
                return None
        return self.count("lora_r", LORA_RANK, "columns of an adapter, its rank", most=4096)

    def _completions(self, training: Training) -> int:
        """Of a generation, on all GPUs."""
        if self.recipe is None or "generation_batch_size" in self.words:
            return self.count("generation_batch_size", COMPLETIONS, "completions")
        steps = self.count("gradient_accumulation_steps", 1, "steps")
        steps = self.count("steps_per_generation", steps, "steps")
        return self.count("generation_batch_size", training.gpus * training.sequences * steps, "completions", 2**40)
