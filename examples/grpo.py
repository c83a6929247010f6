# /// script
# dependencies = [
#     "trl-fp8",
#     "math-verify",
#     "peft",
#     "vllm==0.31.*",
# ]
# ///
"""GRPO with FP8 rollouts on math problems: any model and dataset, from a recipe in examples/configs.

    accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml \
        examples/grpo.py --config examples/configs/qwen3_8b_base_8xh100.yaml

The dataset needs a column with the problem (text or messages) and one with the solution. Flags after the recipe
override it, e.g. `--kv_cache_dtype auto` or `--use_peft`. It is `trl grpo` with `FP8GRPOTrainer`, except that the
penalty on overlong completions follows `max_completion_length`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer


@dataclass
class MathArguments(ScriptArguments):
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy_reward"],
        metadata={
            "help": "Rewards, summed with `reward_weights`: 'accuracy_reward' (the answer in \\boxed{}), "
            "'reasoning_accuracy_reward' (the one after </think>), 'think_format_reward', 'soft_overlong_punishment'."
        },
    )
    overlong_buffer: int = field(
        default=512,
        metadata={"help": "Tokens before max_completion_length over which 'soft_overlong_punishment' falls to -1."},
    )
    prompt_column: str = field(default="prompt", metadata={"help": "The dataset's column with the problem."})
    solution_column: str = field(default="solution", metadata={"help": "The dataset's column with the solution."})
    solution_marker: str | None = field(
        default=None, metadata={"help": "Text in the solution behind which the answer stands: '####' in GSM8K."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System message put before every prompt."})


def reward_functions(script: MathArguments, max_completion_length: int) -> list[Callable]:
    overlong = get_soft_overlong_punishment(max_completion_length, script.overlong_buffer)
    verified = {"accuracy_reward": accuracy_reward, "reasoning_accuracy_reward": reasoning_accuracy_reward}
    known = verified | {"think_format_reward": think_format_reward, "soft_overlong_punishment": overlong}
    if unknown := [name for name in script.reward_funcs if name not in known]:
        raise ValueError(
            f"reward_funcs={unknown} are not known here. Use some of {list(known)}, or add yours to `known`."
        )
    if verified.keys() & set(script.reward_funcs) and find_spec("math_verify") is None:
        raise ValueError(
            f"reward_funcs={script.reward_funcs} compare answers with math-verify: pip install math-verify"
        )
    return [known[name] for name in script.reward_funcs]


def as_messages(row: dict, script: MathArguments) -> dict:
    """The row's problem as messages, as TRL's rewards expect, and its solution; an answer behind a marker is boxed."""
    prompt, solution = row[script.prompt_column], row[script.solution_column]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if script.system_prompt:
        messages = [{"role": "system", "content": script.system_prompt}, *messages]
    if script.solution_marker:
        solution = f"\\boxed{{{solution.rpartition(script.solution_marker)[2].strip()}}}"
    return {"prompt": messages, "solution": solution}


def main(script: MathArguments, args: FP8GRPOConfig, model: ModelConfig) -> None:
    rewards = reward_functions(script, args.max_completion_length)

    # Dataset
    dataset = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    dataset = dataset.map(as_messages, fn_kwargs={"script": script})

    # Training
    loading = dict(revision=model.model_revision, dtype=model.dtype, attn_implementation=model.attn_implementation)
    args.model_init_kwargs = loading | (args.model_init_kwargs or {})
    trainer = FP8GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=dataset[script.dataset_train_split],
        eval_dataset=dataset[script.dataset_test_split] if args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    # Policy in high precision
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)


if __name__ == "__main__":
    parser = TrlParser((MathArguments, FP8GRPOConfig, ModelConfig))
    if not torch.cuda.is_available():
        parser.set_defaults(use_cpu=True, bf16=False)  # many CPUs emulate BF16
    main(*parser.parse_args_and_config())
