"""One rank of a distributed test: the module with FUNCTION FOLDER OPTIONS writes FOLDER/rank_<n>.json."""

import json
import os
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest.mock import patch


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState  # noqa: E402
from peft.tuners.lora.layer import Linear as LoraLinear  # noqa: E402
from requests.adapters import HTTPAdapter  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, TrainerCallback  # noqa: E402
from trl.distributed import DistributedBackend  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402

from testing import engines  # noqa: E402
from testing.chats import Keypad, chat_tokenizer, chats  # noqa: E402
from testing.reference_experts import offered_fp8_experts  # noqa: E402
from testing.runs import arguments, dataset, recorded, reward_digits, rows, trajectory  # noqa: E402
from testing.tiled_kernel import tiled_kernel, without_untiled  # noqa: E402
from trl_fp8 import FP8GRPOTrainer  # noqa: E402
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration  # noqa: E402
from trl_fp8.engine.vllm.sync_audit import SyncAuditCallback  # noqa: E402
from trl_fp8.engine.vllm_server.plugin import FOLDER  # noqa: E402
from trl_fp8.export.file_checksums import verify_export  # noqa: E402
from trl_fp8.features.shared_base.adapter_tensors import Slot  # noqa: E402
from trl_fp8.features.shared_base.shared_modules import SharedLinear  # noqa: E402
from trl_fp8.quantization.codec.digest import digest  # noqa: E402
from trl_fp8.quantization.codec.kv_scales import KV_SCALES  # noqa: E402
from trl_fp8.sync import shards, writer  # noqa: E402
from trl_fp8.sync.weight_stream import weight_stream  # noqa: E402
from trl_fp8.upstream.vllm import engine_model, forget_choices  # noqa: E402


TRAINERS: list[FP8GRPOTrainer] = []  # all of this rank: the end of an engine would be that of the process groups
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]  # and of fused layers not all


def train(folder: Path, checkpoint: str, lora: dict | None = None, resume: str | None = None, **flags) -> dict:
    """A short training run and one more sync; reports logs, what engine and policy hold, and how the gathers went."""
    trainer = make_trainer(folder, checkpoint, lora, **flags)
    gathers = Gathers()
    trainer.train(resume_from_checkpoint=resume)
    trainer.vllm_generation.sync_weights()
    return described(trainer) | gathers.report()


def train_against_a_server(folder: Path, checkpoint: str, url: str, transfer: str, fp8_weight_format: str) -> dict:
    """A short training run whose rollouts come from the server at `url`, which reads files in the folder `transfer`,
    one more sync, and the policy "saved".
    """
    os.environ[FOLDER] = transfer
    flags = {"use_cpu": False, "bf16": False, "max_steps": 2, "kv_calibration": "policy", "vllm_mode": "server"}
    flags |= {"vllm_server_base_url": url, "fp8_weight_format": fp8_weight_format}
    trainer = make_trainer(folder, checkpoint, **flags)
    gathers = Gathers()
    trainer.train()
    generation = trainer.vllm_generation
    generation.sync_weights()
    trainer.save_model(str(folder / "saved"))
    return {
        "saved": str(folder / "saved"),
        "log": rows(trainer),
        "kv_scales": generation.last_sync.carried[KV_SCALES].values.tolist(),
        "audit_failures": generation.audit_failures,
    } | gathers.report()


def resume_then_train_and_drift(folder: Path, checkpoint: str, resume: str, mixture: str, **flags) -> dict:
    """A resumed run, whose report is in "resumed", and one from the start, of the same flags. In "apart": runs whose
    ranks generate apart.

    Then the second rank's policy drifts apart before another sync, whose error is reported. In "mixture": runs of the
    checkpoint of that name, see `best_and_resumed`.
    """
    resumed = train(Path(resume).parents[1], checkpoint, resume=resume, **flags)
    trainer = make_trainer(folder, checkpoint, **flags)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    report = described(trainer) | {"resumed": resumed, "apart": generated_apart(folder / "apart", checkpoint)}
    if trainer.accelerator.process_index == 1:
        with torch.no_grad():
            trainer.model.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    try:
        trainer.vllm_generation.sync_weights()
    except RuntimeError as error:
        report |= {"drift": str(error), "drift_failures": trainer.vllm_generation.audit_failures}
    return report | {"mixture": best_and_resumed(folder / "mixture", mixture)}


def best_and_resumed(folder: Path, checkpoint: str, **flags) -> dict:
    """A run without an engine that loads its best model, of its first step, at its end; then one resumed from there.

    Reports names of weights: those that are "lost" in the best model, in the resumed model ("not resumed"), and those
    that training did not move ("same").
    """
    saves, best = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}, "eval_reward"
    flags |= {"use_vllm": False, "fp8_weights": False, "kv_cache_dtype": "auto", "learning_rate": 0.01} | saves
    best = {"load_best_model_at_end": True, "metric_for_best_model": best, "greater_is_better": True}
    first = make_trainer(folder, checkpoint, reward=earlier_is_better, **flags, **best)
    noted = noted_weights(first)
    first.train()
    found, score = whole_weights(first), first.state.best_model_checkpoint
    again = make_trainer(folder, checkpoint, reward=earlier_is_better, **flags)
    noted_again = noted_weights(again)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))
    return {
        "best": score,
        "lost": differing(found, noted[1]),
        "not resumed": differing(noted_again[3], noted[3]),
        "same": sorted(noted[1].keys() - set(differing(noted[1], noted[3]))),
        "same_log": trajectory(first) == trajectory(again),
    }


def earlier_is_better(completions, trainer_state, **kwargs):
    return [reward - 10 * trainer_state.global_step for reward in reward_digits(completions)]


def noted_weights(trainer: FP8GRPOTrainer) -> dict[int, dict[str, torch.Tensor]]:
    """Weights at each save from now on, by step."""
    noted = {}

    class Noted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            noted[state.global_step] = whole_weights(trainer)

    trainer.add_callback(Noted())
    return noted


def whole_weights(trainer: FP8GRPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of all weights, gathered."""
    whole = {}
    for name, weight in trainer.model.named_parameters():
        with DistributedBackend(trainer.accelerator).gather_params([weight]):
            weight = weight.detach()
            whole[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()
    return whole


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return sorted(name for name, tensor in one.items() if not torch.equal(tensor, other[name]))


def train_and_lora(
    folder: Path,
    checkpoint: str,
    mixture: str,
    lora: dict,
    lora_flags: dict,
    served: list[dict],
    base_flags: dict | None = None,
    asynchronous: bool = False,
    **flags,
) -> dict:
    """Runs one after another, also with adapters: the report is in "lora"; with adapters on a shared base, if there
    are flags for it: "base"; of `train_asynchronously`: "asynchronous"; against servers, see
    `train_against_a_server`: "served"; and of another checkpoint, see `best_and_resumed`: "mixture".

    After the first, the callback compares its engine ("sync_audit"), a rank fails in syncs ("failures"), then the
    policy is exported in FP8, and a fresh engine loads that ("fresh").
    """
    first = make_trainer(folder, checkpoint, **flags)
    gathers = Gathers()
    first.train()
    gathers.forget()
    first.vllm_generation.sync_weights()
    report = described(first) | gathers.report()
    report["sync_audit"] = compared(first)
    report["failures"] = failed(first)
    report["export"] = exported(first, folder / "fp8")
    first.accelerator.wait_for_everyone()
    llm = engines.load(folder / "fp8", first.recipe)
    report["fresh"] = {"log_probs": engines.log_probs(llm), "engine": engine_digest(llm)}
    engines.shutdown(first.vllm_generation.llm)
    if base_flags:
        report["base"] = shared_base(folder / "base", checkpoint, lora | {"target_modules": TARGETS}, **base_flags)
    report["lora"] = train(folder / "lora", checkpoint, lora, **lora_flags)
    if asynchronous:
        os.environ[FOLDER] = served[0]["transfer"]
        of_run = {"checkpoint": served[0]["checkpoint"], "url": served[0]["url"], "use_cpu": False}
        report["asynchronous"] = train_asynchronously(folder / "asynchronous", **of_run)
    report["served"] = [
        train_against_a_server(folder / f"served_{options['fp8_weight_format']}", **options) for options in served
    ]
    return report | {"mixture": best_and_resumed(folder / "mixture", mixture, use_cpu=False, bf16=False)}


def compared(trainer: FP8GRPOTrainer) -> dict:
    """What `SyncAuditCallback` finds in a whole engine, in one of whose first rank a norm is wrong, and whether it
    takes an output head for tied: one of other values than the embeddings, and one of theirs.
    """
    generation = trainer.vllm_generation
    audit = SyncAuditCallback(trainer, on_difference="warn")
    del generation.sync_weights, generation.generate  # other syncs of this worker are not audited
    report = {"healthy": audit.audit(), "tensors": len(audit._digests)}
    norm, head = (audit._layout.pieces[name] for name in ("model.norm.weight", "lm_head.weight"))
    embeddings = generation.model.get_input_embeddings()
    before = norm.of_engine().clone(), head.of_engine().clone()
    if trainer.accelerator.is_main_process:
        norm.of_engine().mul_(2)
    report["wrong"] = audit.audit()
    with patch.object(generation.model, "get_output_embeddings", lambda: embeddings):
        report["tied"] = [audit._is_tied(head)]
        head.of_engine().copy_(whole_weights(trainer)["model.embed_tokens.weight"])
        report["tied"].append(audit._is_tied(head))
    norm.of_engine().copy_(before[0])
    head.of_engine().copy_(before[1])
    return report


def shared_base(folder: Path, checkpoint: str, lora: dict, **flags) -> dict:
    """A run of adapters on an FP8 base, syncs in which a rank fails ("said"), and one more. Where ranks share an
    engine the model is given as an object, not by its name.
    """
    model = checkpoint
    if flags.get("vllm_tensor_parallel_size"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = make_trainer(folder, model, lora, fp8_base=True, **flags)
    before = adapters_by_hand(trainer)
    trainer.train()
    said = failed_adapters(trainer)
    generation = trainer.vllm_generation
    generation.sync_weights()
    generation.delivery.verify()
    after, expected = adapters_in_engine(trainer), adapters_by_hand(trainer)
    codes = [module.codes.qdata for module in trainer.model.modules() if isinstance(module, SharedLinear)]
    places = {tensor.data_ptr() for tensor in generation.engine.layout.held.values()}
    report = described(trainer) | {
        "said": said,
        "trained": all(not torch.equal(before[name], expected[name]) for name in before),
        "wrong": sorted(name for name in after if not torch.equal(after[name], expected[name])),
        "codes": len(codes),
        "codes_in_engine": sum(each.data_ptr() in places for each in codes),
        "parameters": {name: type(each).__name__ for name, each in trainer.model.named_parameters()},
        "audited": generation.last_sync.audited_tensors,
    }
    engines.shutdown(generation.llm)
    return report


def train_at_server(folder: Path, checkpoint: str, url: str, server: int, **flags) -> dict:
    """A run against a server, then what each rank raises in "errors" if the first one fails, in the end because the
    server (a process group) is killed in a generation.
    """
    flags |= {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 3}
    trainer = make_trainer(folder, checkpoint, **flags)
    trainer.train()
    generation = trainer.vllm_generation
    client = getattr(generation, "vllm_client", None)
    report = {
        "ranks": trainer.accelerator.num_processes,
        "log": rows(trainer),
        "audit_failures": generation.audit_failures,
        "fp8": generation.last_sync.fp8_weights,
        "policy": digest(torch.cat([each.detach().flatten() for each in trainer.model.parameters()])).item(),
    }

    def no_room(*args) -> None:
        raise OSError(28, "No space left on device")

    def no_client(*args) -> None:
        raise ConnectionError("planted")

    errors = {}
    for name, (owner, attribute, raising) in {
        "no room": (os, "posix_fallocate", no_room),
        "no client": (VLLMClient, "check_server", no_client),
    }.items():
        original = getattr(owner, attribute)
        if client is not None:
            setattr(owner, attribute, raising)
        errors[name] = raised(lambda name=name: make_trainer(folder / name, checkpoint, **flags))
        setattr(owner, attribute, original)
    generation.sync_weights()
    if client is not None:
        client.session.mount("http://", HTTPAdapter())  # TRL's tries for a minute
        post = client.session.post

        def killing(*args, **kwargs):
            with suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)
            return post(*args, **kwargs)

        client.session.post = killing
    errors["generate"] = raised(lambda: generation.generate([[4, 5, 6]] * 2, None, 1))
    errors["sync"] = raised(generation.sync_weights)
    return report | {"errors": errors}


def train_asynchronously(folder: Path, checkpoint: str, url: str, **flags) -> dict:
    """A run of the asynchronous trainer, whose first rank gives rollouts one version old to all."""
    from testing import async_rollouts
    from trl_fp8 import FP8AsyncGRPOConfig, FP8AsyncGRPOTrainer

    processing, data = async_rollouts.plain_chat_tokenizer(), async_rollouts.conversations()
    prompts = [processing(row["prompt"][0]["content"])["input_ids"] for row in data]
    worker = async_rollouts.LockStepWorker(url, prompts, lambda texts, row: reward_digits(texts), staleness=1)
    of_run = {"per_device_train_batch_size": 4, "bf16": False, "token_budget": -1, "vllm_server_base_url": url}
    args = arguments(folder / "run", FP8AsyncGRPOConfig, **of_run | flags)
    with async_rollouts.without_flash_attention():
        trainer = FP8AsyncGRPOTrainer(
            checkpoint, args=args, train_dataset=data, processing_class=processing, rollout_worker=worker
        )
        trainer.train()
    generation = trainer.vllm_generation
    weights = whole_weights(trainer)
    sent = dict(weight_stream(weights.items(), trainer.recipe))
    staged = generation.engine.layout.held
    return {
        "ranks": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "parameters": sorted({type(each).__name__ for each in trainer.model.parameters()}),
        "log": rows(trainer),
        "audit_failures": generation.audit_failures,
        "model_version": trainer.model_version,
        "kv_scales": generation.last_sync.carried[KV_SCALES].values.tolist(),
        "policy": digest(torch.cat([each.flatten() for each in weights.values()])).item(),
        "staged": len(staged),
        "wrong": [name for name, each in staged.items() if not torch.equal(each, sent[name].to(each.dtype))],
    }


def raised(action: Callable[[], object]) -> str:
    """Return the error of an action, or nothing."""
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def adapters_in_engine(trainer: FP8GRPOTrainer) -> dict[str, torch.Tensor]:
    """What the engine holds on this rank beside its linears, by its own names."""
    held = engine_model(trainer.vllm_generation.llm).named_parameters()
    return {name: tensor.detach().clone() for name, tensor in held if ".lora_" in name}


def adapters_by_hand(trainer: FP8GRPOTrainer) -> dict[str, torch.Tensor]:
    """The same of the policy's q, v, up and down projections, cut out for this rank of an engine."""
    ranks, config = trainer.args.vllm_tensor_parallel_size, trainer.model.config
    rank, r = trainer.accelerator.process_index % ranks, trainer.model.peft_config["default"].r
    q, kv, up = (
        config.num_attention_heads * config.head_dim // ranks,
        max(config.num_key_value_heads // ranks, 1) * config.head_dim,
        config.intermediate_size // ranks,
    )
    found = {}
    for number in range(config.num_hidden_layers):
        layer = trainer.model.get_submodule(f"base_model.model.model.layers.{number}")
        a, b = {}, {}
        for name, module in layer.named_modules():
            if isinstance(module, LoraLinear):
                kind, which = name.rpartition(".")[2], "default"
                whole = [gathers[which].weight.detach() for gathers in (module.lora_A, module.lora_B)]
                whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in whole]
                a[kind], b[kind] = whole[0], whole[1] * module.scaling[which]
        hidden, prefix = config.hidden_size, f"model.layers.{number}"
        kv_rows = slice(rank * kv, (rank + 1) * kv) if config.num_key_value_heads >= ranks else slice(None)
        qkv_a, qkv_b = torch.zeros(3 * r, hidden), torch.zeros(q + 2 * kv, 3 * r)
        qkv_a[:r], qkv_a[2 * r :] = a["q_proj"], a["v_proj"]
        qkv_b[:q, :r] = b["q_proj"][rank * q : (rank + 1) * q]
        qkv_b[q + kv :, 2 * r :] = b["v_proj"][kv_rows]
        up_a, up_b = torch.zeros(2 * r, hidden), torch.zeros(2 * up, 2 * r)
        up_a[r:], up_b[up:, r:] = a["up_proj"], b["up_proj"][rank * up : (rank + 1) * up]
        found |= {
            f"{prefix}.self_attn.qkv_proj.lora_a.weight": qkv_a,
            f"{prefix}.self_attn.qkv_proj.lora_b.weight": qkv_b,
            f"{prefix}.mlp.gate_up_proj.lora_a.weight": up_a,
            f"{prefix}.mlp.gate_up_proj.lora_b.weight": up_b,
            f"{prefix}.mlp.down_proj.lora_a.weight": a["down_proj"][:, rank * up : (rank + 1) * up],
            f"{prefix}.mlp.down_proj.lora_b.weight": b["down_proj"],
        }
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def failed_adapters(trainer: FP8GRPOTrainer) -> list[str]:
    """What each rank says when the second one has no memory for an adapter: to pad it, and to write it."""
    said = []
    for owner, name in ((Slot, "pad"), (writer.Writer, "_queue_copy")):
        original = getattr(owner, name)

        def full(*args, does=original):
            if trainer.accelerator.process_index == 1:
                raise torch.OutOfMemoryError("no memory for an adapter")
            return does(*args)

        setattr(owner, name, full)
        try:
            trainer.vllm_generation.sync_weights()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        finally:
            setattr(owner, name, original)
    return said


def failed(trainer: FP8GRPOTrainer) -> dict:
    """The second rank has no memory for one weight after another: what each rank then says, and what a sync mends."""
    generation, quantize, calls, said = trainer.vllm_generation, shards.quantize_into, [], []

    def full(*args, times: tuple[int, ...]):
        calls.append(1)
        if trainer.accelerator.process_index == 1 and len(calls) in times:
            raise torch.OutOfMemoryError("no memory for another tensor")
        return quantize(*args)

    def sync_with(*times: int) -> str:
        calls.clear()
        shards.quantize_into = writer.quantize_into = partial(full, times=times)
        try:
            generation.sync_weights()
            return ""
        except RuntimeError as error:
            return str(error)
        finally:
            shards.quantize_into = writer.quantize_into = quantize

    sync_with()
    whole = len(calls)
    for place in (1, 2, whole):
        said.append(sync_with(place, whole + place))  # a sync is tried twice
        try:
            generation.delivery.require_whole()
            said.append("whole")
        except RuntimeError as error:
            said.append(str(error))
    said.append(sync_with(3))
    generation.delivery.verify()
    return {"said": said, "engine": engine_digest(generation.llm), "audit_failures": generation.audit_failures}


TURNS = ((4, 1, 4), (2, 3, 2))  # in which each rank calls its engine, in each step


def generated_apart(folder: Path, checkpoint: str) -> dict:
    """Runs in which ranks call their engines `TURNS` times: with a tool, an environment and a function of the user's.

    After the last of them the second rank's engine is written to before both generate once more, and then sync.
    """
    sources = {
        "tools": {"tools": [Keypad().press]},
        "environment": {"environment_factory": Keypad},
        "rollout_func": {"rollout_func": in_turns},
    }
    flags = {"max_completion_length": 96, "vllm_max_model_length": 128, "generation_kwargs": {"max_tokens": 4}}
    report = {}
    for name, source in sources.items():
        options = {"processing_class": chat_tokenizer(calls="."), "reward_funcs": any_reward, "train_dataset": chats()}
        args = arguments(folder / name, per_device_train_batch_size=4, fp8_forward="one_forward", **flags)
        trainer = FP8GRPOTrainer(model=checkpoint, args=args, **(options | source))
        trainer._tool_call_loop = partial(in_as_many_turns, trainer, trainer._tool_call_loop)
        calls = recorded(trainer.vllm_generation, "generate", partial(step_of, trainer))
        trainer.train()
        report[name] = described(trainer) | {"calls": [*calls]}
    generation = trainer.vllm_generation
    if trainer.accelerator.process_index == 1:
        next(engine_model(generation.llm).parameters()).view(-1)[7] += 1
    try:
        generation.generate([[5, 6, 7]], None, 1)
        report["changed"] = ""
    except RuntimeError as error:
        report["changed"] = str(error)
    generation.sync_weights()
    generation.generate([[5, 6, 7]], None, 1)
    return report


def any_reward(completions: list, **kwargs) -> list[float]:
    return [sum(map(ord, str(messages))) % 7 for messages in completions]


def turns_due(trainer: FP8GRPOTrainer) -> int:
    return TURNS[trainer.accelerator.process_index][trainer.state.global_step]


def in_as_many_turns(trainer: FP8GRPOTrainer, loop: Callable, *args) -> tuple:
    trainer.max_tool_calling_iterations = turns_due(trainer) - 1
    return loop(*args)


def step_of(trainer: FP8GRPOTrainer, *args, **kwargs) -> int:
    return trainer.state.global_step


def in_turns(prompts: list, trainer: FP8GRPOTrainer) -> dict:
    """A rollout function that goes on with what it has, as often as this rank is due."""
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    completions, log_probs = ([[] for _ in prompts] for _ in range(2))
    for _ in range(turns_due(trainer)):
        so_far = [prompt + done for prompt, done in zip(prompt_ids, completions, strict=True)]
        _, more, log_probs_of_more, _ = trainer.vllm_generation.generate(so_far, None, 1)
        for row, (ids, each) in enumerate(zip(more, log_probs_of_more, strict=True)):
            completions[row] += ids
            log_probs[row] += [token[0] for token in each]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": log_probs}


def killed(folder: Path, checkpoint: str, **flags) -> dict:
    """A training run whose second rank dies in its third step, without a word."""
    trainer = make_trainer(folder, checkpoint, **flags)
    step = trainer.training_step

    def dying_step(*args):
        if trainer.accelerator.process_index == 1 and trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args)

    trainer.training_step = dying_step
    trainer.train()
    return {}


def tensor_parallel(
    folder: Path, checkpoint: str, experts_checkpoint: str, base_checkpoint: str, mxfp8_checkpoint: str
) -> dict:
    """One engine on both ranks: synced in a run; loaded from an FP8 checkpoint of what was sent; with FP8 experts;
    with adapters on a base that it shares with the policies ("base"); with scales in tiles ("mxfp8").
    """
    lora = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False}
    options = {"vllm_tensor_parallel_size": 2, "learning_rate": 0.01, "max_steps": 2}
    base = shared_base(folder / "base", base_checkpoint, lora, **options)
    experts = _with_experts(folder / "experts", experts_checkpoint)
    trainer = make_trainer(folder, checkpoint, vllm_tensor_parallel_size=2, top_p=0.9, beta=0.04)
    trainer.train()
    with tiled_kernel():
        flags = {"vllm_tensor_parallel_size": 2, "fp8_weight_format": "mxfp8", "max_steps": 1}
        other = make_trainer(folder / "mxfp8", mxfp8_checkpoint, **flags)
        other.train()
        mxfp8 = _synced_and_loaded(folder / "mxfp8", other)
    report = _synced_and_loaded(folder, trainer) | {"experts": experts, "base": base, "mxfp8": mxfp8}
    report["uneven"] = _with_uneven_prompts(trainer.vllm_generation)
    return report


def _synced_and_loaded(folder: Path, trainer: FP8GRPOTrainer) -> dict:
    """Sync once more, and report what the engine holds; "fresh": what one holds that loads a checkpoint of it."""
    generation = trainer.vllm_generation
    generation.sync_weights()
    if trainer.accelerator.is_main_process:
        engines.write_checkpoint(folder / "fresh", generation, generation.last_sync.carried.get(KV_SCALES))
    layer = engine_model(generation.llm).model.layers[0]
    shapes = {"qkv_shape": list(layer.self_attn.qkv_proj.weight.shape)}
    shapes["down_shape"] = list(layer.mlp.down_proj.weight.shape)
    trainer.accelerator.wait_for_everyone()
    llm = engines.load(folder / "fresh", trainer.recipe, generation.pinned)
    trainer.fresh_llm = llm  # its end would be that of the process groups
    fresh = {"log_probs": engines.log_probs(llm), "engine": engine_digest(llm)}
    derived = len(generation.engine.layout.derived)
    return described(trainer) | shapes | {"fresh": fresh, "derived": derived}


def _with_uneven_prompts(generation: FP8VLLMGeneration) -> str:
    """What ranks that share an engine say when the second one has a prompt more than the first."""
    try:
        generation.generate([[5, 6, 7]] * (1 + generation.accelerator.process_index), None, 1)
    except ValueError as error:
        return str(error)
    return ""


def _with_experts(folder: Path, checkpoint: str) -> dict:
    with offered_fp8_experts():
        trainer = make_trainer(folder, checkpoint, vllm_tensor_parallel_size=2, router_replay="rollout")
    trainer.train()
    trainer.vllm_generation.sync_weights()
    engine = engine_model(trainer.vllm_generation.llm)
    experts = next(module for module in engine.modules() if type(module).__name__ == "RoutedExperts")
    sync = trainer.vllm_generation.last_sync
    held = {"w13_shape": list(experts.w13_weight.shape), "audited": sync.audited_tensors}
    return described(trainer) | held | {"tensors": len(list(trainer.model.parameters())) + sync.fp8_weights}


def exported(trainer: FP8GRPOTrainer, folder: Path) -> list[str] | None:
    """Names of tensors that an FP8 export holds otherwise than a sync would send them;
    None on ranks that do not look.
    """
    trainer.save_fp8_model(folder)
    generation = trainer.vllm_generation
    stream = weight_stream(
        generation._iter_named_params(), trainer.recipe, generation.last_sync.carried.get(KV_SCALES)
    )
    sent = {name: tensor.clone() for name, tensor in stream}
    if not trainer.accelerator.is_main_process:
        return None
    verify_export(folder)
    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return sorted(
        name
        for name in held.keys() | sent.keys()
        if not (name in held and name in sent and torch.equal(held[name], sent[name]))
    )


def described(trainer: FP8GRPOTrainer) -> dict:
    generation = trainer.vllm_generation
    return {
        "ranks": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "log": rows(trainer),
        "evaluated": [row for row in trainer.state.log_history if "eval_reward" in row],
        "kv_scales": generation.last_sync.carried[KV_SCALES].values.tolist(),
        "engine": engine_digest(generation.llm),
        "log_probs": engines.log_probs(generation.llm),
        "audit_failures": generation.audit_failures,
    }


def make_trainer(
    folder: Path, checkpoint: str, lora: dict | None = None, reward: Callable = reward_digits, **flags
) -> FP8GRPOTrainer:
    if lora is not None:
        from peft import LoraConfig

        lora = LoraConfig(task_type="CAUSAL_LM", **lora)
    trainer = FP8GRPOTrainer(
        model=checkpoint,
        reward_funcs=reward,
        args=arguments(folder / "run", **({"per_device_train_batch_size": 4} | flags)),
        train_dataset=dataset(),
        eval_dataset=dataset(4),
        peft_config=lora,
    )
    TRAINERS.append(trainer)
    return trainer


class Gathers:
    """What gathers of a policy moved and held: those of a sync, and FSDP2's `full_tensor`."""

    def __init__(self):
        self.full_tensors = self.most_alive = 0
        self.bytes: list[int] = []  # of each gather of a sync, over all ranks
        alive, original, gather = weakref.WeakSet(), DTensor.full_tensor, shards.all_gather_into_tensor

        def full_tensor(tensor, **kwargs):
            full = original(tensor, **kwargs)
            alive.add(full)
            self.full_tensors += 1
            self.most_alive = max(self.most_alive, len(alive))
            return full

        def all_gather_into_tensor(whole, own, group):
            self.bytes.append(whole.nbytes)
            gather(whole, own, group=group)

        DTensor.full_tensor, shards.all_gather_into_tensor = full_tensor, all_gather_into_tensor

    def forget(self) -> None:
        self.bytes.clear()

    def report(self) -> dict:
        return {"full_tensors": self.full_tensors, "most_gathered": self.most_alive, "gathered_bytes": [*self.bytes]}


def engine_digest(llm) -> int:
    """Checksum of everything that the engine's model holds on this rank."""
    tensors = [tensor for tensor in without_untiled(engine_model(llm)) if tensor.numel()]
    return digest(torch.stack([digest(tensor) for tensor in tensors])).item()


def shard_on_cpu() -> None:
    """Let accelerate shard a policy on CPU ranks.

    accelerate 1.15 looks at FSDP and DeepSpeed settings only where it found an accelerator, and otherwise goes on with
    DDP, or with ranks that know nothing of each other. What it does after that look is all the same on gloo and CPU.
    """
    PartialState._prepare_backend = lambda state, *args: ("gloo", DistributedType.MULTI_GPU)


def run_forked(function: str, folder: Path, options: dict, environment: dict[str, str]) -> None:
    """Run as a rank in a fork of a process that may have trained: with an accelerate that has seen nothing yet."""
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    forget_choices()
    run(function, folder, options)


def run(function: str, folder: Path, options: dict) -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_cpu()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        shard_on_cpu()
        # It would compile an operator for inference on CPUs first: minutes on two busy cores
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    report = globals()[function](folder, **options)
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
