"""What a plan says to do fits, computed again from its flags; what it says of a run config is what runs."""

import json
import re
import shlex
import time
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig

from docs import generate_capacity
from testing import published
from testing.hub_cache import COMMITS, NAME, write_repository
from trl_fp8.commands.cli import main
from trl_fp8.commands.plan_command import FLAGS, read_arguments
from trl_fp8.commands.plan_text import CHOSEN
from trl_fp8.commands.serve import _parser
from trl_fp8.features import registrations
from trl_fp8.planning import risks
from trl_fp8.planning.capacity import Planner
from trl_fp8.planning.risks import Risk
from trl_fp8.recipe.recipe import FP8Recipe


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
GIB = {"24gb": "24", "h100": "80", "h200": "141"}  # as documents say --gpu-memory
GIB_OFFERED = {"24gb": "23.5", "h100": "79", "h200": "139"}  # of these, by the driver
SERVED = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B", "google/gemma-2-9b")
SETUPS = (
    [],
    ["--gpus", "8"],
    ["--gpus", "8", "--gpu-memory", "141", "--context", "8192"],
    ["--lora", "--gpu-memory", "24"],
    ["--gpu-memory-utilization", "0.85", "--tensor-parallel-size", "1"],
    ["--kv-cache-dtype", "auto", "--gpus", "2"],
    ["--fp8-base", "--gpus", "2", "--tensor-parallel-size", "2"],
)


@pytest.fixture
def plan(tmp_path, capsys):
    """Figures of `trl-fp8 plan` for a published model."""

    def run(name, *words, given=None):
        (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS[name]))
        if given is not None:
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
            words += ("--config", str(tmp_path / "run.yaml"))
        assert main(["plan", str(tmp_path), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", SERVED)
def test_flags_that_are_printed_fit_when_computed_again(name, plan):
    for words in SETUPS:
        found = plan(name, *words)
        memory = words[words.index("--gpu-memory") :][:2] if "--gpu-memory" in words else []
        offered = [found] if found["fits"] else found["fits_instead"]
        assert found["fits"] or not found["flags"], "flags of a plan that does not fit"
        for way in offered:
            again = plan(name, *memory, given=way["flags"])
            for key in ("fits", "gpus", "lora_rank", "fp8_base", "tensor_parallel_size", "gib_per_gpu", "kv_tokens"):
                assert again[key] == way[key], (words, key)
            assert again["fits"] and way["gib_per_gpu"]["total"] <= way["gib_per_gpu"]["limit"]


def test_planning_names_no_flag_of_a_feature():
    """Each adds its own memory, risks and saving flags, so that a plan works without its folder."""
    known = {item.name for item in fields(FP8Recipe)} | {item.name for item in fields(GRPOConfig)}
    flags = {item.name for each in registrations() if each.flags for item in fields(each.flags)} - known
    assert {"fp8_base", "fp8_forward", "router_replay"} <= flags
    for path in (ROOT / "src" / "trl_fp8" / "planning").glob("*.py"):
        assert flags.isdisjoint(re.findall(r"\w+", path.read_text())), path.name


def test_full_training_of_8b_does_not_fit_one_gpu_and_what_does_is_offered(plan):
    found = plan("Qwen/Qwen3-8B")
    assert not found["fits"] and found["gib_per_gpu"]["trainer"]["total"] > 122
    kinds = [(way["gpus"], way["lora_rank"]) for way in found["fits_instead"]]
    assert kinds == [(1, 32), (4, None)]
    assert plan("Qwen/Qwen3-8B", "--gpus", "2")["fits"] is False


def test_adapters_on_an_fp8_base_are_offered_where_others_do_not_fit(plan):
    kinds = {
        gib: [
            (way["gpus"], way["lora_rank"], way["fp8_base"])
            for way in plan("Qwen/Qwen3-8B", "--gpu-memory", gib)["fits_instead"]
        ]
        for gib in ("24", "80")
    }
    assert kinds == {"24": [(1, 32, True), (16, None, False)], "80": [(1, 32, False), (4, None, False)]}
    assert plan("Qwen/Qwen3-8B", "--fp8-base", "--gpu-memory", "24")["lora_rank"] == 32
    ways = plan("Qwen/Qwen3-14B", "--lora", given={"fp8_weights": False})["fits_instead"]
    assert ways[0]["flags"]["dtype"] == "bfloat16" and not any(way["fp8_base"] for way in ways)
    for against in ({"use_dora": True}, {"kv_cache_skip_layers": "auto"}):
        ways = plan("Qwen/Qwen3-8B", "--gpu-memory", "24", given={"use_peft": True} | against)["fits_instead"]
        assert ways and not any(way["fp8_base"] for way in ways)
    biased = plan("Qwen/Qwen2.5-7B", "--fp8-base")
    assert "kv_cache_skip_layers" not in biased["flags"] and "finds them with 'auto'" in biased["risks"][0]
    answered = plan("Qwen/Qwen2.5-7B", "--fp8-base", given={"kv_cache_skip_layers": [0, 27]})
    assert not any("kv_cache_skip_layers" in risk for risk in answered["risks"])
    given = {"use_peft": True, "fp8_base": True, "vllm_gpu_memory_utilization": 0.3}
    assert plan("Qwen/Qwen3-8B", "--fp8-base", "false", given=given)["gib_per_gpu"]["trainer"]["weights"] > 30


def test_a_large_model_is_told_its_ranks(plan):
    (lora, full) = sorted(plan("meta-llama/Llama-3.1-70B")["fits_instead"], key=lambda way: way["gpus"])
    assert lora["lora_rank"] == 32 and lora["tensor_parallel_size"] > 1
    assert full["gpus"] == 32 and full["tensor_parallel_size"] > 1


def test_a_plan_that_fits_nowhere_names_no_flags(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-235B-A22B"]))
    assert main(["plan", str(tmp_path), "--gpu-memory", "24"]) == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and "Nothing fits" in out and "--" not in out


def test_ranks_do_not_cut_the_blocks_of_fp8_weights(plan):
    """Qwen2.5-72B at 8 ranks has 29568 / 8 rows, no multiple of 128: 17 % FP8. So no plan chooses 8."""
    for way in plan("Qwen/Qwen2.5-72B", "--gpus", "8")["fits_instead"]:
        assert way["tensor_parallel_size"] in (1, 2, 4)
    assert plan("Qwen/Qwen2.5-72B", "--gpus", "8", "--tensor-parallel-size", "8")["fp8_share_of_parameters"] < 0.2


@pytest.mark.parametrize(
    "name, targets",
    [
        ("Qwen/Qwen3-8B", "all-linear"),
        ("openai/gpt-oss-20b", "q_proj k_proj v_proj o_proj"),
        ("deepseek-ai/DeepSeek-V3", "q_b_proj o_proj"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "in_proj_qkvz out_proj q_proj k_proj v_proj o_proj"),
    ],
)
def test_adapters_are_on_projections_that_an_engine_has_them_on(name, targets, plan):
    words = ("--lora", "8", "--gpus", "64", "--gpu-memory", "2000")
    assert plan(name, *words)["flags"]["lora_target_modules"] == targets


def test_no_base_is_shared_with_a_checkpoint_in_mxfp4(plan):
    found = plan("openai/gpt-oss-20b", "--weight-format", "tensor", "--lora", "--gpu-memory", "64")
    assert not found["fits"] and found["fits_instead"]
    assert not any(way["fp8_base"] for way in found["fits_instead"])


def test_weights_that_no_format_holds_are_left_out_and_why_is_said(plan):
    found = plan("openai/gpt-oss-20b", "--gpus", "8")
    assert found["flags"]["fp8_weights"] is False and found["flags"]["kv_cache_skip_layers"] == "auto"
    (why,) = [risk for risk in found["risks"] if risk.startswith("no weights can be FP8")]
    assert "experts of another layout" in why and "2880" in why and "fp8_weight_format tensor" in why


def test_routes_are_not_asked_of_several_ranks(plan):
    found = plan("Qwen/Qwen3-30B-A3B", "--gpus", "8", "--gpu-memory", "141", "--tensor-parallel-size", "2")
    assert "router_replay" not in found["flags"] and any("neither" in risk for risk in found["risks"])


@pytest.mark.parametrize(
    "name, chosen, is_answered",
    [
        ("Qwen/Qwen3-30B-A3B", {"router_replay": "rollout"}, True),
        ("Qwen/Qwen3-30B-A3B", {"router_replay": "off"}, False),
        ("Qwen/Qwen2.5-7B", {"kv_cache_skip_layers": [0, 27]}, True),
        ("Qwen/Qwen2.5-7B", {"kv_cache_skip_layers": []}, False),
    ],
)
def test_a_risk_leaves_the_flags_that_a_run_config_has(name, chosen, is_answered, plan):
    (key,) = chosen
    words = ("--gpus", "8", "--gpu-memory", "141")
    given = {"vllm_gpu_memory_utilization": 0.38}
    alone, beside = plan(name, *words, given=given), plan(name, *words, given=given | chosen)
    assert alone["fits"] and beside["fits"]
    assert key in alone["flags"] and key not in beside["flags"]
    assert any(key in risk for risk in alone["risks"])
    assert any(key in risk for risk in beside["risks"]) is not is_answered


@pytest.mark.parametrize(
    "chosen, flags_left",
    [({}, {"router_aux_loss_coef": 0.0}), ({"router_aux_loss_coef": 0.01}, {"router_aux_loss_coef": 0.0})],
)
def test_a_flag_that_has_to_be_off_is_repeated_while_it_is_on(chosen, flags_left, plan, monkeypatch):
    """As TRL's load-balancing loss with Granite's experts: no run starts with it."""
    risk = Risk("router_aux_loss_coef has to be off.", {"router_aux_loss_coef": 0.0})
    monkeypatch.setattr(risks, "_of_model", lambda *args: [risk])
    found = plan("Qwen/Qwen3-8B", "--gpus", "8", "--gpu-memory", "141", given=chosen)
    assert risk.text in found["risks"] and found["flags"].items() >= flags_left.items()
    answered = plan("Qwen/Qwen3-8B", "--gpus", "8", "--gpu-memory", "141", given={"router_aux_loss_coef": 0.0})
    assert risk.text not in answered["risks"]


def test_sleep_frees_the_engines_memory_while_the_trainer_works(plan):
    given = {"vllm_gpu_memory_utilization": 0.4, "num_processes": 8, "per_device_train_batch_size": 4}
    awake, asleep = (
        plan("Qwen/Qwen3-8B", "--context", "20000", given=given | {"vllm_enable_sleep_mode": sleeps})["gib_per_gpu"]
        for sleeps in (False, True)
    )
    passing = sum(awake["trainer"][name] for name in ("copies", "inputs", "head"))
    assert awake["total"] - asleep["total"] == pytest.approx(min(passing, 32 - 3))  # vLLM's reserve stays


@pytest.mark.parametrize(
    "flags, freed",
    [({}, 16 - 3), ({"fp8_base": True}, 16 - 3 - 8.79 - 0.24), ({"fp8_forward": "one_forward"}, 16 - 3 - 8.79)],
)
def test_weights_that_the_trainer_reads_do_not_sleep(flags, freed, plan):
    given = {"vllm_gpu_memory_utilization": 0.2, "use_peft": True, "lora_r": 32, "per_device_train_batch_size": 8}
    awake, asleep = (
        plan("Qwen/Qwen3-8B", "--context", "8192", given=given | flags | {"vllm_enable_sleep_mode": sleeps})
        for sleeps in (False, True)
    )
    assert awake["gib_per_gpu"]["trainer"]["inputs"] > freed
    saved = awake["gib_per_gpu"]["total"] - asleep["gib_per_gpu"]["total"]
    assert saved == pytest.approx(freed, abs=0.02)


@pytest.mark.parametrize("gpus", ["1", "3", "6"])
def test_groups_are_whole(gpus, plan):
    flags = plan("Qwen/Qwen3-0.6B", "--gpus", gpus, "--completions", "100")["flags"]
    completions = int(gpus) * flags["per_device_train_batch_size"] * flags["gradient_accumulation_steps"]
    assert completions >= 100 and completions % 8 == 0  # num_generations


def test_a_command_line_wins_over_a_run_config(plan):
    given = yaml.safe_load((CONFIGS / "qwen3_8b_base_8xh100.yaml").read_text())
    found = plan("Qwen/Qwen3-8B", "--gpus", "8", given=given)
    assert found["gib_per_gpu"]["engine"] == 40 and found["flags"]["vllm_max_model_length"] == 21504
    again = plan("Qwen/Qwen3-8B", "--gpus", "8", "--gpu-memory-utilization", "0.4", "--lora", "16", given=given)
    assert again["gib_per_gpu"]["engine"] == 32 and again["lora_rank"] == 16
    other = {"kv_cache_dtype": "auto", "fp8_weight_format": "tensor", "dtype": "bfloat16"}
    won = {"kv_cache_dtype": "fp8", "fp8_weight_format": "blocks", "dtype": "float32"}
    words = [word for key, value in won.items() for word in (f"--{key}", value)]
    assert won.items() <= plan("Qwen/Qwen3-8B", "--gpus", "8", *words, given=given | other)["flags"].items()
    assert won.keys().isdisjoint(plan("Qwen/Qwen3-8B", "--gpus", "8", *words, given=given)["flags"])


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"router_replay": "rollout"}, "Qwen3ForCausalLM is not a mixture of experts"),
        ({"fp8_base": True}, "fp8_base=True without use_peft: an FP8 base is frozen, so nothing would be trained"),
        ({"fp8_base": True, "fp8_weights": False}, "fp8_base=True with fp8_weights=False: the base that trainer and"),
        ({"fp8_base": True, "use_peft": True, "use_dora": True}, "fp8_base=True with use_dora=True: the engine"),
        (
            {"fp8_base": True, "use_peft": True, "kv_cache_skip_layers": "auto"},
            "skip_layers='auto' with fp8_base=True",
        ),
        ({"fp8_forward": "one_forward", "fp8_weights": False}, "Set fp8_weights=True or fp8_forward='off'"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype='fp8_per_token_head': the trainer can"),
        ({"kv_calibration": "rollout", "mask_truncated_completions": True}, "Use kv_calibration='policy'"),
        ({"kv_cache_skip_layers": [99]}, "kv_cache_skip_layers names layers [99]"),
        ({"num_processes": 3, "vllm_tensor_parallel_size": 2}, "each engine runs on that many training processes"),
        ({"per_device_train_batch_size": 1, "num_generations": 16}, "must be divisible by num_generations (16)"),
        ({"vllm_gpu_memory_utilization": "much"}, "--vllm_gpu_memory_utilization: invalid float value: 'much'"),
        ({"vllm_gpu_memory_utilization": 30}, "vllm_gpu_memory_utilization=30.0: give a number from 0.01 to 0.99."),
        ({"num_processes": "two"}, "--gpus: invalid int value: 'two'"),
        ({"dtype": "float16"}, "dtype='float16': a plan counts float32, bfloat16. Give one of them."),
    ],
)
def test_a_plan_refuses_run_configs_that_the_trainer_refuses(flags, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-8B"]))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"reward_funcs": ["of.no_plan"]} | flags))
    assert main(["plan", str(tmp_path), "--config", str(tmp_path / "run.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("trl-fp8: ") and said in err


@pytest.fixture
def said(tmp_path, capsys):
    """What `trl-fp8 plan` prints of a published model."""

    def run(name, *words, **changes):
        (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS[name] | changes))
        assert main(["plan", str(tmp_path), *words]) == 0
        return capsys.readouterr().out

    return run


def test_a_shared_base_is_said_to_be_one(said):
    shared = said("Qwen/Qwen3-8B", "--fp8-base", "--gpu-memory", "24")
    assert "(on an FP8 base, rest in BF16) on 1 GPU of 24 GiB" in shared
    assert "\nThe FP8 base (6.5) is held once, by the engine; the trainer reads it there.\n" in shared
    assert "--fp8_base True" in shared and "--dtype" not in shared
    words = ("--fp8-base", "--gpus", "2", "--tensor-parallel-size", "2")
    assert "The trainer holds the FP8 base (6.5) whole on each GPU" in said("Qwen/Qwen3-8B", *words)
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert "dequantized" not in said("Qwen/Qwen3-8B", "--fp8-base", **stored)
    assert "dequantized" in said("Qwen/Qwen3-8B", "--lora", **stored)


def test_a_total_is_compared_with_its_limit_in_tenths(said):
    """20.3 of 20 GiB would not fit."""
    total = "20.3  of 20.4 GiB (15% stay free for what is not counted): fits\n"
    assert total in said("Qwen/Qwen3-8B", "--fp8-base", "--gpu-memory", "24")


def test_no_split_is_planned_that_leaves_nothing_in_fp8(said, tmp_path, capsys):
    """On 8 ranks the 512 rows of q are 64 each, which fill no block; a split that is given is refused."""
    toy = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 1000}
    toy |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    assert " on 8 GPUs of 80 GiB, FSDP2, sequences of" in said("Qwen/Qwen3-0.6B", "--gpus", "8", **toy)
    assert main(["plan", str(tmp_path), "--gpus", "8", "--tensor-parallel-size", "8"]) == 2
    assert capsys.readouterr().err == (
        "trl-fp8: vllm_tensor_parallel_size=8: split over 8 GPUs, no layer of Qwen3ForCausalLM has shards that fill "
        "whole 128x128 blocks. Set vllm_tensor_parallel_size=1 or 2 or 4, or fp8_weight_format='tensor'.\n"
    )


def test_small_sizes_are_not_shown_as_zero(said):
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 256}
    out = said("Qwen/Qwen3-0.6B", "--context", "64", **sizes)
    assert "  trainer  < 0.1\n" in out and "weights < 0.1, vLLM 3" in out
    assert not re.search(r" $", out, re.MULTILINE) and not re.search(r"\b0\.0\b", out)


def test_a_run_config_that_does_not_fit_what_was_assumed_asks_for_the_machine(said):
    given = ("--config", str(CONFIGS / "qwen3_4b_1xh200.yaml"))
    asked = "give --gpus and --gpu-memory of your machine (assumed: 1 x 80 GiB)"
    assert f"DOES NOT FIT (99.2 GiB are more than 68.0); {asked}\n" in said("Qwen/Qwen3-4B", *given)
    half = said("Qwen/Qwen3-4B", *given, "--gpus", "1")
    assert "); give --gpu-memory of your machine (assumed: 1 x 80 GiB)\n" in half
    assert "of your machine" not in said("Qwen/Qwen3-4B", *given, "--gpus", "1", "--gpu-memory", "80")
    fits = said("Qwen/Qwen3-4B", *given, "--gpus", "1", "--gpu-memory", "141")
    assert fits.endswith("\nflags: none, the run config has them\n") and ": fits\n" in fits


def test_flags_have_trls_names_too_with_dashes_or_underscores(said):
    """A value that none of them has where nothing is said, so each is heard."""
    values = {"lora_r": 7, "dtype": "bfloat16", "fp8_weight_format": "tensor", "kv_cache_dtype": "auto"}
    values |= {"num_processes": 2, "gpu_memory": 99, "vllm_gpu_memory_utilization": 0.45}
    values |= {"vllm_tensor_parallel_size": 2, "vllm_max_model_length": 1234, "generation_batch_size": 24}
    values |= {"fp8_base": True, "fp8_weights": False}
    own = {name: name for name in CHOSEN} | {name: flag[2:] for flag, (name, *_) in FLAGS.items()}
    assert values.keys() == own.keys()
    unset = vars(read_arguments(["model"]).values)
    for key, value in values.items():
        for one in (key, own[key]):
            for name in {one, one.replace("_", "-"), one.replace("-", "_")}:
                heard = vars(read_arguments(["model", f"--{name}", str(value)]).values)
                assert {k: heard[k] for k in heard if k not in unset or heard[k] != unset[k]} == {key: value}, name
    silent = said("Qwen/Qwen3-8B", "--gpus", "2")
    for key in values.keys() - {"num_processes"}:
        assert said("Qwen/Qwen3-8B", "--gpus", "2", f"--{key}", str(values[key])) != silent, key
    assert silent != said("Qwen/Qwen3-8B")


def test_the_page_of_models_is_what_a_plan_computes():
    assert generate_capacity.page() == generate_capacity.PAGE.read_text(), "run `make docs`"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_run_configs_fit_the_gpus_in_their_names_as_their_comments_say(path, plan):
    gpus, kind = re.search(r"_(\d)x(24gb|h100|h200)$", path.stem).groups()
    given = yaml.safe_load(path.read_text())
    (name,) = [
        name for name in published.CONFIGS if re.fullmatch(f"{name}(-Base|-Instruct)?", given["model_name_or_path"])
    ]
    found = plan(name, "--gpus", gpus, "--gpu-memory", GIB_OFFERED[kind], given=given)
    planned = plan(name, "--gpus", gpus, "--gpu-memory", GIB[kind], given=given)
    assert found["fits"] and planned["fits"]
    # the run config's own name for the batches of a generation, in JSON as in the text
    assert "steps_per_generation" not in given or "gradient_accumulation_steps" not in planned["flags"]
    assert ("steps_per_generation" in planned["flags"]) == ("steps_per_generation" in given)
    # a quarter of the batch runs at full length at once
    steps = given.get("steps_per_generation", given["gradient_accumulation_steps"])
    sequences = given["per_device_train_batch_size"] * steps
    assert list(found["kv_tokens"].values())[-1] > 0.25 * sequences * given["vllm_max_model_length"]
    trainer = planned["gib_per_gpu"]["trainer"]
    states = trainer["weights"] + trainer["gradients"] + trainer["optimizer"]
    means = {
        "of weights, gradients and Adam": states,
        "of reference model": trainer["reference"],
        "of checkpointed activations": trainer["inputs"],
        "of BF16 copies": trainer["copies"],
        "of engine": planned["gib_per_gpu"]["engine"],
    }
    comment = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    stated = {words: float(gib) for words in means for gib in re.findall(rf"(\d+) GiB {words}", comment)}
    assert "of engine" in stated
    assert {words: round(means[words]) for words in stated} == stated
    for tokens in re.findall(r"(\d+)K tokens of KV cache", comment):
        assert round(list(planned["kv_tokens"].values())[-1], -4) == int(tokens) * 1000


@pytest.mark.parametrize("name", published.CONFIGS)
def test_every_published_model_is_planned_in_five_seconds(name, tmp_path):
    """CPU time beyond imports."""
    published.write(name, tmp_path / "model")
    began = time.process_time()
    assert main(["plan", str(tmp_path / "model")]) in (0, 2)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_generatoins": 9}, "Unknown key 'num_generatoins' in "),
        ({"gpu_memory": 80}, "Unknown key 'gpu_memory' in "),
        (
            {"vllm_mode": "server"},
            "a plan is of an engine that shares its GPUs with the trainer, or of one in a server, with --server.",
        ),
        (
            {"vllm_mode": "server", "fp8_weights": False, "kv_cache_dtype": "auto"},
            "a plan is of an engine that shares its GPUs with the trainer, or of one in a server, with --server.",
        ),
    ],
)
def test_a_run_config_that_is_of_another_run_gets_no_plan(change, said, tmp_path, capsys):
    published.write("Qwen/Qwen3-8B", tmp_path / "model")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path / "model")} | change))
    assert main(["plan", "--config", str(tmp_path / "r.yaml")]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_names_settings_whose_memory_it_does_not_count(tmp_path, capsys):
    published.write("Qwen/Qwen3-8B", tmp_path / "model")
    changes = {"gradient_checkpointing": False, "optim": "paged_adamw_8bit", "use_peft": True}
    changes |= {"lora_modules_to_save": ["lm_head"], "lora_target_parameters": ["experts.down_proj"]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path / "model")} | changes))
    assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    counted = "gradient_checkpointing=False, optim='paged_adamw_8bit', lora_modules_to_save=['lm_head'], "
    assert f"watch: not counted: {counted}lora_target_parameters=['experts.down_proj']." in out


@pytest.mark.parametrize("words", [(), ("--server",)], ids=["colocated", "server"])
def test_figures_for_scripts_name_what_they_do_not_count(words, plan):
    assert plan("Qwen/Qwen3-0.6B", *words)["uncounted"] == []
    assert plan("Qwen/Qwen3-0.6B", *words, given={"optim": "paged_adamw_8bit"})["uncounted"] == ["optim"]


def test_a_plan_is_of_the_revision_that_the_run_config_names(tmp_path, capsys, monkeypatch):
    folders = [tmp_path / "first", tmp_path / "second"]
    for name, folder in zip(("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"), folders, strict=True):
        published.write(name, folder)
    write_repository(list(map(str, folders)), tmp_path, monkeypatch)
    found = {}
    for revision in (COMMITS[0], "main", None):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model_name_or_path": NAME, "model_revision": revision}))
        for words in ((), ("--server",)):
            assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--json", *words]) == 0
            found[revision, *words] = json.loads(capsys.readouterr().out)
    weights = {revision: found[revision,]["weights_gib"]["bf16"] for revision in (COMMITS[0], "main", None)}
    assert 5 * weights[COMMITS[0]] < weights["main"] == weights[None]
    assert (
        f" {NAME} --max-model-len 1024 --revision {COMMITS[0]} " in found[COMMITS[0], "--server"]["server"]["command"]
    )
    assert "--revision" not in found["main", "--server"]["server"]["command"]
    assert "--revision" not in found[None, "--server"]["server"]["command"]


def test_a_plan_needs_nothing_that_only_the_host_of_the_run_has(plan):
    """TF32 is of a GPU, and the file of DeepSpeed lies beside the run."""
    given = {"vllm_gpu_memory_utilization": 0.4, "num_processes": 8}
    on_its_host = given | {"tf32": True, "deepspeed": "zero3.json"}
    assert plan("Qwen/Qwen3-8B", given=on_its_host) == plan("Qwen/Qwen3-8B", given=given)


def test_engines_are_not_split_where_their_routes_are_read(tmp_path, capsys):
    published.write("Qwen/Qwen3-30B-A3B", tmp_path / "model")
    given = {"model_name_or_path": str(tmp_path / "model"), "use_peft": True, "lora_r": 16}
    sizes = {}
    for replay in ("off", "rollout"):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(given | {"router_replay": replay}))
        assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--gpus", "8", "--gpu-memory", "48", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        sizes[replay] = {one["tensor_parallel_size"] for one in (found, *found["fits_instead"])}
    assert sizes == {"off": {1, 2}, "rollout": {1}}


@pytest.mark.parametrize("name", SERVED)
def test_a_plan_with_a_server_moves_the_engine_and_its_flags_start_one(name, plan):
    beside = plan(name, "--gpus", "8")
    apart = plan(name, "--gpus", "8", "--server")
    assert apart["trainer"]["gib_per_gpu"] == beside["gib_per_gpu"]["trainer"]
    assert apart["trainer"]["staged_gib"] == beside["weights_gib"]["fp8"]
    server = apart["server"]
    assert server["fits"]
    assert apart["trainer"]["limit_gib_per_gpu"] == beside["gib_per_gpu"]["limit"]
    if apart["trainer"]["fits"]:
        flags = apart["trainer"]["flags"]
        launch = {"accelerate_config": "fsdp2", "num_processes": 8, "vllm_mode": "server"}
        assert launch.items() <= flags.items() and "vllm_gpu_memory_utilization" not in flags
        assert plan(name, "--server", given=flags)["trainer"] == apart["trainer"]
    else:
        assert apart["trainer"]["flags"] == {}
    alone = plan(
        name, "--gpus", "8", "--server", "--tensor-parallel-size", str(server["gpus"]), "--kv-cache-dtype", "auto"
    )
    assert "--kv-cache-dtype auto" in alone["server"]["command"] and "auto" not in server["command"]
    assert max(alone["server"]["kv_tokens"].values()) < max(server["kv_tokens"].values())
    assert (server["gpus"] > 1) == (f"--tensor-parallel-size {server['gpus']}" in server["command"])


def test_the_command_of_a_planned_server_has_the_recipe_of_the_trainer(plan):
    kept = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    given = {"fp8_scale_format": "fp32", "fp8_ignored_modules": kept, "kv_cache_skip_layers": [0, 3]}
    words = plan("Qwen/Qwen3-0.6B", "--server", given=given)["server"]["command"].split()
    assert words[:2] == ["trl-fp8", "serve"]
    options = _parser().parse_known_args(words[2:])[0]
    assert (options.scale_format, options.ignored_modules, options.kv_cache_skip_layers) == ("fp32", kept, [0, 3])


def test_one_forward_against_a_server_gets_no_plan_because_gpus_refuse_it(tmp_path, capsys):
    published.write("Qwen/Qwen3-8B", tmp_path / "model")
    config = {"model_name_or_path": str(tmp_path / "model"), "fp8_forward": "one_forward"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(config))
    assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--server"]) == 2
    assert "fp8_forward='one_forward' with --server: a plan is of GPUs" in capsys.readouterr().err


def test_a_server_has_gpus_of_its_own_whatever_a_run_config_says_of_an_engine_beside_the_trainer(plan):
    given = {"vllm_gpu_memory_utilization": 0.3, "num_processes": 8}
    server = plan("meta-llama/Llama-3.1-70B", "--server", "--gpu-memory", "48", given=given)["server"]
    assert server["fits"] and server["gpus"] > 1
    assert server["command"].endswith("--gpu-memory-utilization 0.9")
    two = plan("Qwen/Qwen3-0.6B", "--server", given=given | {"vllm_tensor_parallel_size": 2})["server"]
    assert two["gpus"] == 2  # the trainer refuses a server of another size
    small = plan("Qwen/Qwen3-0.6B", "--server", "--gpu-memory-utilization", "0.5", given=given)["server"]
    assert small["command"].endswith("--gpu-memory-utilization 0.5")


def test_a_server_is_not_split_where_no_layer_would_be_fp8(tmp_path, capsys):
    config = published.CONFIGS["Qwen/Qwen3-0.6B"] | {"hidden_size": 256, "intermediate_size": 512}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--server"]) == 0
    assert "a server on 1 GPU of its own" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--server", "--tensor-parallel-size", "8"]) == 2
    assert "vllm_tensor_parallel_size=8" in capsys.readouterr().err


def test_the_command_of_a_planned_server_has_room_for_the_trainers_adapters(plan):
    merged = plan("Qwen/Qwen3-0.6B", "--server", "--lora", "16")
    shared = plan("Qwen/Qwen3-0.6B", "--server", "--lora", "16", "--fp8-base")
    options = _parser().parse_known_args(shlex.split(shared["server"]["command"])[2:])[0]
    assert "--lora" not in merged["server"]["command"]
    assert json.loads(vars(options)["--lora"]) == {"r": 16, "target_modules": "all-linear"}
    in_server, in_trainer = (
        [one[kind]["gib_per_gpu"]["weights"] for one in (merged, shared)] for kind in ("server", "trainer")
    )
    assert in_server[0] < in_server[1] < 1.2 * in_server[0] and in_trainer[1] < 0.6 * in_trainer[0]
    given = {"fp8_base": True, "use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    command = plan("Qwen/Qwen3-0.6B", "--server", given=given)["server"]["command"]
    assert """--lora '{"r": 8, "target_modules": ["q_proj", "v_proj"]}'""" in command


@pytest.mark.parametrize("given", [{"vllm_enable_sleep_mode": True}])
def test_a_plan_with_a_server_refuses_what_needs_the_engine_in_the_trainers_process(given, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-0.6B"]))
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path)} | given))
    assert main(["plan", "--config", str(tmp_path / "r.yaml")]) == 0
    capsys.readouterr()
    assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--server"]) == 2
    error = capsys.readouterr().err
    assert f"{next(iter(given))}=True" in error and "needs an engine in the trainer's process" in error


def test_a_plan_with_a_server_names_modules_and_what_it_does_not_count(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-0.6B"]))
    given = {"model_name_or_path": str(tmp_path), "optim": "paged_adamw_8bit"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(given))
    assert main(["plan", "--config", str(tmp_path / "r.yaml"), "--server", "--modules"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"FP8 plan for {tmp_path}")
    assert text.endswith("watch: not counted: optim='paged_adamw_8bit'.\n")


def test_a_plan_with_a_server_says_what_it_moves_and_where_that_has_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-0.6B"]))
    assert main(["plan", str(tmp_path), "--server"]) == 0
    text = capsys.readouterr().out
    assert (
        "moves to the server: weights of the engine, KV cache" in text and "has run on CPUs of one host only" in text
    )
    assert main(["plan", str(tmp_path), "--server", "--gpus", "2"]) == 0
    flags = "flags: --accelerate_config fsdp2 --num_processes 2 --vllm_mode server --per_device_train_batch_size 1 "
    assert capsys.readouterr().out.splitlines()[-1].startswith(flags)
    assert main(["plan", str(tmp_path), "--vllm_mode", "server"]) == 2


@pytest.mark.parametrize(
    "seconds, synchronous, asynchronous, waits",
    [
        ((30, 20, 2), 52, 32, "the trainer waits 10 s of it"),
        ((20, 30, 2), 52, 32, "the trainer never waits"),
    ],
)
def test_a_plan_says_when_asynchronous_training_pays(seconds, synchronous, asynchronous, waits, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-0.6B"]))
    flags = (("--rollout-seconds", "--train-seconds", "--sync-seconds"), map(str, seconds))
    words = ["plan", str(tmp_path), "--server", *chain.from_iterable(zip(*flags, strict=True))]
    assert main(words) == 0
    text = capsys.readouterr().out
    gain = f"{synchronous} s synchronous, {asynchronous} s asynchronous ({synchronous / asynchronous:.2f} times"
    assert gain in text and waits in text and "on the same 2 GPUs" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["seconds_per_step"]
    assert found == {"synchronous": synchronous, "asynchronous": asynchronous}


@pytest.mark.parametrize(
    "words, named",
    [
        (
            ("--rollout-seconds", "3", "--train-seconds", "2"),
            "--rollout-seconds 3.0: rollouts overlap .* Add --server",
        ),
        (("--server", "--sync-seconds", "1"), "--sync-seconds 1.0: .* Give --rollout-seconds and --train-seconds"),
        (("--server", "--train-seconds", "nan"), "--train-seconds nan: give a number from 0 to 1,000,000"),
    ],
)
def test_seconds_of_a_step_that_say_nothing_are_refused(words, named, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published.CONFIGS["Qwen/Qwen3-0.6B"]))
    assert main(["plan", str(tmp_path), *words]) == 2
    assert re.search(named, capsys.readouterr().err)


@pytest.mark.parametrize(
    "name, divided, undivided",
    [
        ("deepseek-ai/DeepSeek-V3", 128, 96),  # 128 heads, whose queries come from a latent: there is no q_proj
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 16, 32),  # 16 heads, whose q_proj has a gate of as many rows
        ("microsoft/phi-4", 10, 16),  # 40 heads and 10 of k and v, in one qkv_proj
        ("Qwen/Qwen3-8B", 32, 64),
    ],
)
def test_a_tensor_parallel_size_divides_the_heads_that_the_config_has(name, divided, undivided):
    planner = Planner(published.outline(name))
    assert planner.divides_heads(1) and planner.divides_heads(divided) and not planner.divides_heads(undivided)
