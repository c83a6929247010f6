"""Adapters on an FP8 base that a server holds: the base travels once, adapters at each sync."""

import json
import signal

import pytest
import torch
from peft import LoraConfig

from testing import engines, forked_server
from testing.runs import SMALL_K3, arguments, dataset, recorded, reward_digits, rows, trajectory
from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server import weight_patches
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN
from trl_fp8.features.shared_base.engine_served import ServedAdapters


TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]  # and of fused layers not all
ROOM = {"r": 4, "target_modules": TARGETS}
COUNTED = ("fp8/weight_version", "fp8/patch_over_whole", "fp8/sync_bytes")  # the first sync of a trainer differs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "transfer"
    parts = [ServedAdapters(json.dumps(ROOM))]
    with forked_server.running(checkpoint("qwen3"), folder, kv_cache_dtype="fp8", parts=parts) as running:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FOLDER, running.folder)
            patched.setenv(TOKEN, running.token)
            yield running


def lora(**options):
    return LoraConfig(**({"task_type": "CAUSAL_LM", "init_lora_weights": False} | ROOM | options))


def trainer_of(server, folder, config=None, **flags):
    flags = {"fp8_base": True, "learning_rate": 1e-2} | flags
    args = arguments(folder, vllm_mode="server", vllm_server_base_url=server.url, **flags)
    torch.manual_seed(5)
    return FP8GRPOTrainer(
        server.model, reward_digits, args, dataset(), eval_dataset=dataset(2), peft_config=config or lora()
    )


def numbers(trainer):
    return [{name: value for name, value in row.items() if name not in COUNTED} for row in trajectory(trainer)]


def changed(engine):
    """Return the names of the tensors in the latest patch; None if all was sent."""
    [server] = engine.servers
    if server.patch is None:
        return None
    table = engine._file.table
    return {*weight_patches.decoded(server.patch.body, server.patch.sha256, server.patch.counts, table)}


def adapters_of(model):
    return {name: each for name, each in model.named_parameters() if ".lora_" in name}


def test_log_probs_equal_those_of_a_colocated_engine_with_the_same_base_and_adapters(server, tmp_path):
    trainer = trainer_of(server, tmp_path)
    remote = trainer.vllm_generation
    scales = remote._one_of("carried")
    colocated = engines.start_on_base(server.model, lora(), kv_scales=engines.some_scales(2, 1))
    own = adapters_of(colocated.model)
    found = []
    try:
        for step in (1, 2):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for name, parameter in adapters_of(trainer.model).items():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
                    own[name].copy_(parameter)
            scales.calibrate = lambda step=step: engines.some_scales(2, step)
            engines.scales_of(colocated).calibrate = lambda step=step: engines.some_scales(2, step)
            remote.sync_weights()
            colocated.sync_weights()
            for tokens in engines.PROMPTS:
                of_server = server.log_probs(tokens)
                assert of_server == colocated.llm.log_probs(tokens).tolist()
                found.append(of_server)
        with torch.no_grad():
            for parameter in own.values():
                parameter.zero_()
        colocated.sync_weights()
        without = [colocated.llm.log_probs(tokens).tolist() for tokens in engines.PROMPTS]
        assert all(
            found[4 + number] != each and found[number] != found[4 + number] for number, each in enumerate(without)
        )
    finally:
        engines.shutdown(colocated.llm)


def test_only_adapters_travel_after_the_first_sync_and_a_resumed_run_equals_the_uninterrupted_one(server, tmp_path):
    whole = trainer_of(server, tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    generation = whole.vllm_generation
    base = {name: held.clone() for name, held in generation.weights.base_part.layout.held.items()}
    patches = recorded(generation, "sync_weights", lambda _: changed(generation.engine))
    whole.train()
    logged = rows(whole)
    assert len(logged) == len(patches) == 4 and patches[0] is None
    assert all(names and all(".lora_" in name for name in names) for names in patches[1:])
    assert all(torch.equal(base[name], held) for name, held in generation.weights.base_part.layout.held.items())
    held = generation.engine.layout.held
    adapters = sum(tensor.nbytes for name, tensor in held.items() if ".lora_" in name)
    everything = sum(tensor.nbytes for tensor in held.values())
    shares = [row["fp8/patch_over_whole"] for row in logged]
    # A BF16 element that has changed takes 3 bytes with its position, and a few take 4
    assert shares[0] == 1 and all(0 < share < 1.6 * adapters / everything for share in shares[1:])
    assert [row["fp8/sync_bytes"] for row in logged][1:] == [adapters] * 3
    assert {row["fp8/audited_tensors"] for row in logged} == {len(held)} and generation.audit_failures == 0
    assert all(row["fp8/weight_relative_error"] > 0.01 and 0 < row["mismatch/k3_kl"] < SMALL_K3 for row in logged)
    resumed = trainer_of(server, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert numbers(resumed)[-2:] == numbers(whole)[2:]


@pytest.mark.parametrize(
    "config, flags, message",
    [
        (
            lora(r=8),
            {},
            r"Ranks .policy, server; 0: none. differ in 10 layers: .*down_proj .8, 4.*--lora '{\"r\": 8, ",
        ),
        (
            lora(target_modules=TARGETS[:1]),
            {},
            r"differ in 8 layers: .*down_proj .0, 4.*--lora '{\"r\": 4, \"target_modules\": ..q_proj..}'",
        ),
        (
            lora(),
            {"fp8_base": False},
            "layers that no flag of the trainer asks for, .*without --lora, or set fp8_base=T",
        ),
    ],
    ids=["rank", "targets", "merged"],
)
def test_a_server_with_other_room_is_refused_with_the_flag_that_it_needs(config, flags, message, server, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(server, tmp_path, config, **flags)


def test_with_one_forward_the_server_follows_the_trainers_own_engine_without_mismatch(server, tmp_path):
    trainer = trainer_of(server, tmp_path, fp8_forward="one_forward", learning_rate=1e-3, max_steps=3)
    generation = trainer.vllm_generation
    patches = recorded(generation.server, "send_weights", lambda _: changed(generation.server.engine))
    trainer.train()
    assert [row["mismatch/logp_difference_max"] for row in rows(trainer)] == [0, 0, 0]
    assert len({row["loss"] for row in rows(trainer)}) > 1 and generation.audit_failures == 0
    assert patches[0] is None and all(names and all(".lora_" in name for name in names) for names in patches[1:])
    engines.shutdown(generation.llm)


@torch.no_grad()
def log_probs(model, tokens):
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


def test_each_of_two_workers_has_its_part_of_adapters(checkpoint, tmp_path, monkeypatch):
    # With heads for two workers, and linears whose halves are whole blocks
    model = checkpoint(
        "qwen3", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128
    )
    parts = [ServedAdapters(json.dumps(ROOM))]
    with forked_server.running(model, tmp_path / "transfer", tensor_parallel_size=2, parts=parts) as server:
        monkeypatch.setenv(FOLDER, server.folder)
        monkeypatch.setenv(TOKEN, server.token)
        trainer = trainer_of(server, tmp_path / "run")
        generation = trainer.vllm_generation
        assert trainer.recipe.tensor_parallel_size == 2 and len(trainer.recipe.fp8_modules) == 14
        generation._one_of("carried").calibrate = lambda: engines.some_scales(2, 1)
        for step in (1, 2):
            with torch.no_grad():
                for parameter in adapters_of(trainer.model).values():
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)) / 8)
            generation.sync_weights()
            names = changed(generation.engine)
            assert names is None if step == 1 else all(".lora_" in name for name in names)
            differences = {True: [], False: []}
            for tokens in engines.PROMPTS:
                of_server = torch.tensor(server.log_probs(tokens))
                differences[True].append((of_server - log_probs(trainer.model, tokens)).abs())
                with trainer.model.disable_adapter():
                    differences[False].append((of_server - log_probs(trainer.model, tokens)).abs())
            with_adapters, without = (torch.cat(differences[each]).mean() for each in (True, False))
            assert with_adapters < without / 8, (with_adapters, without)


def test_a_server_that_is_started_again_gets_base_and_adapters(server, tmp_path):
    """Last: the module's server is another process afterwards."""
    go = tmp_path / "go"
    spare = forked_server.spare(server, go, kv_cache_dtype="fp8", parts=[ServedAdapters(json.dumps(ROOM))])
    generation = trainer_of(server, tmp_path).vllm_generation
    generation._one_of("carried").calibrate = lambda: engines.some_scales(2, 1)
    generation.sync_weights()
    before = [server.log_probs(tokens) for tokens in engines.PROMPTS]
    server.end(signal.SIGKILL)
    server.pid = spare
    go.touch()
    server.wait_until_up()
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    assert changed(generation.engine) is None
    assert [server.log_probs(tokens) for tokens in engines.PROMPTS] != before
    engines.perturb(generation.model, seed=2)
    generation.sync_weights()
    assert all(".lora_" in name for name in changed(generation.engine))
