"""`trl-fp8 train`: GRPO with FP8 rollouts from a run config and flags, those of `trl grpo` and the FP8 ones.

The command checks what it can, once, and starts `accelerate launch`, which runs this module in each process. Clusters
that start accelerate themselves do the same with `accelerate launch ... -m trl_fp8.commands.train --config FILE`.
"""

import os
import sys
from argparse import Namespace
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from trl_fp8.planning.trainer_memory import BYTES, adapter_width
from trl_fp8.recipe.servable import require_servable
from trl_fp8.upstream.patches import substituted
from trl_fp8.upstream.quiet import quiet

from .interrupt import ended_by_ctrl_c
from .rewards import check_rewards, reward_functions


# What `accelerate launch` takes, and warns that it does, where nothing says how to launch
DEFAULTS = "--num_machines 1 --mixed_precision no --dynamo_backend no"


class Run(NamedTuple):
    """What a run is made of: the parsed dataclasses of the arguments, and what `FP8GRPOTrainer` gets of them."""

    script: Any
    args: Any
    trained: dict[str, Any]


def launch(words: list[str]) -> int:
    """Check everything, and start `accelerate launch` on this module.

    Returns the exit status: 2, after one line, for a mistake of the user's, here or in one of the processes, and 130
    after Ctrl-C. A single process takes the place of this one, so that status and signals are its own.
    """
    from trl_fp8.run.lines import slow_step

    try:
        if {"-h", "--help", "--help-all"}.intersection(words):
            from .arguments import help_text

            sys.stdout.write(help_text(words))
            return 0
        with slow_step("Checking the arguments, the model's config and the dataset."):
            launched = _launched(words)
    except (ValueError, OSError) as error:
        return refuse(error)
    from accelerate.commands import launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        with substituted(accelerate_launch, "simple_launcher", _become):
            accelerate_launch.launch_command(launched)
    except ChildFailedError as error:
        if 2 not in [failure.exitcode for failure in error.failures.values()]:
            raise
        return 2  # the process has said why
    except SignalException as error:
        os._exit(128 + error.sigval)  # the processes have ended; taking torch apart would take seconds
    return 0


def _become(args: Namespace) -> None:
    """In place of accelerate's launcher of one process, which waits for a child and makes 1 of its exit status."""
    from accelerate.utils import prepare_simple_launcher_cmd_env

    words, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(words[0], words, environment)  # noqa: S606, no shell: words are passed on as they are


def main() -> None:
    """What each process runs."""
    quiet()
    started = []  # the trainer, once there is one
    with ended_by_ctrl_c(lambda: _stopped(started) if os.environ.get("RANK", "0") == "0" else ""):
        _train(started)


def _train(started: list) -> None:
    from .arguments import make_parser  # imports torch, which `ended_by_ctrl_c` has to come before

    try:
        run = prepare(make_parser().read(sys.argv[1:]))
        script, args = run.script, run.args
        rewards = reward_functions(script.reward_funcs or [], args.max_completion_length, script.overlong_buffer)
    except (ValueError, OSError) as error:
        sys.exit(_refused(error))
    from trl_fp8.run.progress import FP8ProgressCallback
    from trl_fp8.trainer import FP8GRPOTrainer

    if script.reward_model_name_or_path:
        rewards.insert(0, script.reward_model_name_or_path)
    callbacks = None if args.disable_tqdm else [FP8ProgressCallback()]
    try:
        trainer = FP8GRPOTrainer(reward_funcs=rewards, args=args, callbacks=callbacks, **run.trained)
    except (ValueError, OSError) as error:  # what the model, or the two together, do not allow
        sys.exit(_refused(error))
    started.append(trainer)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.print(f"Model saved to {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)


def _stopped(started: list) -> str:
    """Where Ctrl-C stopped a run, and how to go on."""
    if not started:
        return "stopped before the first step"
    from trl_fp8.run.checkpoints import LAST, checkpoint_to_resume

    (trainer,) = started
    args, at = trainer.args, f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
    checkpoint = checkpoint_to_resume(args.output_dir, "auto")
    if checkpoint is None:
        return f"{at}; there is no checkpoint yet, so the same command starts from the beginning"
    again = "" if str(args.resume_from_checkpoint).lower() in LAST else " and --resume_from_checkpoint auto"
    return f"{at}; go on with the same command{again}, from {checkpoint}"


def _refused(error: Exception) -> int:
    """`refuse` by one of the processes: a mistake of the user's is told once on each machine, for folders and disks
    are a machine's own; what is wrong with a process by itself.
    """
    same_on_all = not isinstance(error, OSError)
    return 2 if same_on_all and os.environ.get("LOCAL_RANK", "0") != "0" else refuse(error)


def prepare(asked: Any, processes: int | None = None) -> Run:
    """All of a run but its rewards and engine.

    Args:
        asked: What the user asks for, an `Asked` of arguments.py.
        processes: On all machines together, if they do not run yet; None in one of them.

    Raises:
        ValueError: Something is set that cannot be; the message names it, and what to set instead.
        OSError: A file, model or dataset is not there, or out of reach.
    """
    from trl import get_peft_config, get_quantization_config

    from trl_fp8.recipe.from_model import outline_of_pretrained
    from trl_fp8.run.checkpoints import checkpoint_to_resume, require_ranks
    from trl_fp8.run.launch import require_no_qlora, require_output

    from .model_config import model_config
    from .problems import load_problems

    _require_task(asked.values)
    script, args, model, mixture = asked.made(processes)
    if checkpoint := checkpoint_to_resume(args.output_dir, args.resume_from_checkpoint):
        require_ranks(checkpoint, args.world_size)
    name, weights = model.model_name_or_path, 0
    quantization = get_quantization_config(model)
    if args.own_engine:
        require_no_qlora(quantization)
    config = model_config(name, "model_name_or_path", model.model_revision)
    if args.own_engine and not (args.trust_remote_code and "auto_map" in config):
        try:
            require_servable(outline := outline_of_pretrained(name, model.model_revision))
        except ValueError as error:
            raise ValueError(f"model_name_or_path={name!r}: {error}") from error
        if model.use_peft:  # adapters in FP32 on all linear layers
            weights = 4 * model.lora_r * adapter_width(outline)
        else:
            weights = BYTES.get(model.dtype, min(BYTES.values())) * sum(map(prod, outline.parameters.values()))
    require_output(args, weights, weights)
    training, evaluation = load_problems(script, mixture, evaluated=args.eval_strategy != "no")
    loading = dict(revision=model.model_revision, dtype=model.dtype, attn_implementation=model.attn_implementation)
    if args.base_in_engine and not asked.sets("dtype"):
        del loading["dtype"]  # of the command line, FP32: what is beside an FP8 base is BF16 if nothing is said
    loading["trust_remote_code"] = args.trust_remote_code
    args.model_init_kwargs = loading | (args.model_init_kwargs or {})
    trained = {
        "model": name,
        "train_dataset": training,
        "eval_dataset": evaluation,
        "quantization_config": quantization,
        "peft_config": get_peft_config(model),
    }
    return Run(script, args, trained)


def _require_task(values: Namespace) -> None:
    """Raise `ValueError` for what a run cannot do without: a model, a dataset, and rewards that are there."""
    if not values.model_name_or_path:
        raise ValueError(
            "model_name_or_path is not set. Give a model, as in --model_name_or_path Qwen/Qwen3-4B, or a run config, "
            "as in --config examples/configs/qwen3_4b_1xh200.yaml."
        )
    named = values.dataset_name
    if bool(named) == bool(values.datasets):
        which = f"dataset_name={named!r} and datasets are both set" if named else "dataset_name is not set"
        raise ValueError(f"{which}. Give one of them, as in --dataset_name trl-lib/DeepMath-103K.")
    check_rewards(values.reward_funcs or [], values.reward_model_name_or_path)


def _launched(words: list[str]) -> Namespace:
    """What `accelerate launch` gets: its own words, and behind the module all words, of which the module reads its."""
    from .arguments import make_parser, parse_launch

    asked = make_parser().read(words)
    of_file, of_words = asked.launch_words
    script = [*of_file, *of_words, "--module", __name__, *words]
    stated = parse_launch(script)
    launcher = _launcher(asked.values.accelerate_config or stated.config_file)
    processes = _processes(stated.num_processes, launcher)
    prepare(asked, processes)
    first = ["--config_file", launcher] if launcher else f"--num_processes {processes} {DEFAULTS}".split()
    launched = parse_launch([*first, *script])
    if launched.training_script != __name__:
        raise ValueError(
            f"{launched.training_script!r} belongs to no flag of accelerate: it would get "
            f"{' '.join([*first, *of_file, *of_words])}. Put what accelerate shall do into a file, and give it with "
            "--accelerate_config."
        )
    return launched


def _launcher(asked: str | None) -> str | None:
    """The file of accelerate's configuration that is meant, or the user's own if there is one."""
    from accelerate.commands.config.config_args import default_config_file

    if asked is None:
        return default_config_file if Path(default_config_file).is_file() else None
    if Path(asked).is_file():
        return asked
    of_trl = {Path(file.name).stem: str(file) for file in files("trl.accelerate_configs").iterdir() if file.is_file()}
    if asked not in of_trl:
        raise ValueError(
            f"--accelerate_config {asked}: there is no such file, nor is it one of {', '.join(sorted(of_trl))}."
        )
    return of_trl[asked]


def _processes(asked: int | None, launcher: str | None) -> int:
    """How many `accelerate launch` will start, on all machines together."""
    import torch
    from accelerate.commands.config.config_args import load_config_from_file
    from yaml import YAMLError

    if asked is not None:
        return asked
    if launcher is None:
        return max(torch.cuda.device_count(), 1)
    try:
        return load_config_from_file(launcher).num_processes
    except (ValueError, TypeError, AttributeError, YAMLError) as error:
        raise ValueError(f"--accelerate_config {launcher}: {error}") from error


def refuse(error: Exception) -> int:
    """Tell a mistake of the user's in one line; returns the exit status."""
    sys.stderr.write(f"trl-fp8: {' '.join(str(error).split())}\n")
    return 2


if __name__ == "__main__":
    main()
