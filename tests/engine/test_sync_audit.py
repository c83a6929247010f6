"""`SyncAuditCallback` beside TRL's own trainer: healthy runs are silent, and each planted fault is named."""

import re
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from testing import engines, runs
from testing.planted_faults import policy_one_step_old
from trl_fp8 import SyncAuditCallback
from trl_fp8.engine.vllm.cpu.reference_linear import register_cpu_kernel
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

NORM = "model.layers.1.input_layernorm.weight"
DOWN, UP, GATE = (f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("down", "up", "gate"))
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def stock_trainer(checkpoint, folder, **options):
    """TRL's own trainer and engine. On CPUs with AVX-512 vLLM packs linears, where TRL's sync dies, so that the
    package's reference kernel, which leaves weights as they are, stands in.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        register_cpu_kernel()
        loading = {"dtype": "float32"}
        args = runs.arguments(
            folder, GRPOConfig, use_vllm=True, vllm_max_model_length=64, max_steps=2, model_init_kwargs=loading
        )
        with runs.training(checkpoint, args, GRPOTrainer, **options) as trainer:
            yield trainer


def sending(trainer, change):
    """Put `change` between the policy's tensors and the engine, for one sync of a changed policy."""
    generation = trainer.vllm_generation
    engines.perturb(generation.model, seed=5)
    tensors = generation._iter_named_params
    generation._iter_named_params = lambda: change(tensors())
    try:
        generation.sync_weights()
    finally:
        del generation._iter_named_params


def named(error):
    """Return the names of tensors that a message lists."""
    return re.findall(r"[\w.]+\.weight", str(error.value))


@pytest.fixture(scope="class")
def trainer(request, checkpoint, tmp_path_factory):
    """The trainer of a class of tests: engines of one process have to follow one another."""
    yield from stock_trainer(
        checkpoint("qwen3", tied=request.cls.tied), tmp_path_factory.mktemp("stock"), **request.cls.options
    )


@pytest.fixture(scope="class")
def audit(trainer):
    audit = SyncAuditCallback(trainer)
    trainer.add_callback(audit)
    return audit


@pytest.fixture(scope="class")
def generation(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    yield generation
    engines.shutdown(generation.llm)


class TestFullTraining:
    tied, options = False, {}

    def test_a_healthy_run_is_silent(self, trainer, audit):
        trainer.train()
        assert (audit.audits, audit.failures) == (2, 0)
        assert len(audit._digests) == len(list(trainer.model.parameters()))

    def test_a_dropped_tensor_is_named_alone(self, trainer, audit):
        with pytest.raises(RuntimeError, match="and still has the values of the sync before") as error:
            sending(trainer, lambda tensors: ((n, t) for n, t in tensors if n != NORM))
        assert named(error) == [NORM]

    def test_a_changed_norm_is_named_alone(self, trainer, audit):
        with pytest.raises(RuntimeError, match="128 of 128 elements") as error:
            sending(trainer, lambda tensors: ((n, t * 1.01 if n == NORM else t) for n, t in tensors))
        assert named(error) == [NORM]

    def test_halves_of_a_fused_weight_are_named(self, trainer, audit):
        exchanged = {UP: GATE, GATE: UP}
        with pytest.raises(RuntimeError) as error:
            sending(trainer, lambda tensors: ((exchanged.get(n, n), t) for n, t in tensors))
        assert set(named(error)) == {UP, GATE}

    def test_a_policy_one_step_old_is_named(self, trainer, audit):
        trainer.vllm_generation.sync_weights()
        before = {name: tensor.clone() for name, tensor in trainer.vllm_generation.model.state_dict().items()}
        with pytest.raises(RuntimeError, match="and still has the values of the sync before") as error:
            sending(trainer, lambda tensors: ((n, before[n]) for n, _ in tensors))
        assert "step 2: 25 tensors" in str(error.value) and "and 13 more" in str(error.value)

    def test_a_sync_that_is_left_out_is_found_before_sampling(self, trainer, audit):
        trainer.vllm_generation.sync_weights()
        engines.perturb(trainer.vllm_generation.model, seed=6)
        trainer.state.global_step += 1
        with pytest.raises(RuntimeError, match="step 3: 25 tensors"):
            trainer.vllm_generation.generate([[5, 6]], None, 1)

    def test_a_warning_lets_the_run_go_on(self, trainer, audit, caplog):
        audit._raises = False
        try:
            sending(trainer, lambda tensors: ((n, t) for n, t in tensors if n != DOWN))
        finally:
            audit._raises = True
        assert DOWN in caplog.text and trainer.vllm_generation.generate([[5, 6]], None, 1)

    def test_a_run_whose_second_sync_does_nothing_stops_before_it_samples(self, trainer, audit, monkeypatch):
        llm, sampled = trainer.vllm_generation.llm, []
        generate = llm.generate
        monkeypatch.setattr(llm, "generate", lambda *args, **kwargs: sampled.append(1) or generate(*args, **kwargs))
        with pytest.raises(RuntimeError, match="step 1: 25 tensors"), policy_one_step_old(trainer):
            trainer.train()
        assert sampled == [1]


class TestAdapters:
    tied, options = True, {"peft_config": LORA}

    def test_a_healthy_run_is_silent(self, trainer, audit):
        trainer.train()
        assert (audit.audits, audit.failures) == (2, 0)

    def test_an_unmerged_adapter_is_named(self, trainer, audit, monkeypatch):
        monkeypatch.setattr(trainer.model, "merge_adapter", lambda: None)
        monkeypatch.setattr(trainer.model, "unmerge_adapter", lambda: None)
        with pytest.raises(RuntimeError) as error:
            trainer.vllm_generation.sync_weights()
        adapted = {f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "qv"}
        assert set(named(error)) == adapted

    def test_an_untied_head_that_the_sync_leaves_out_is_named(self, trainer, audit, monkeypatch):
        head = trainer.model.get_output_embeddings()
        monkeypatch.setitem(head._parameters, "weight", torch.nn.Parameter(head.weight.detach() * 1.1))
        with pytest.raises(RuntimeError, match="lm_head.weight is not in the engine .it is tied") as error:
            sending(trainer, lambda tensors: ((n, t) for n, t in tensors if n != "lm_head.weight"))
        assert named(error) == ["lm_head.weight"]


class TestFP8Engine:
    def test_codes_and_scales_are_compared(self, generation):
        args = SimpleNamespace(use_vllm=True, vllm_mode="colocate")
        trainer = SimpleNamespace(args=args, vllm_generation=generation, state=SimpleNamespace(global_step=0))
        audit = SyncAuditCallback(trainer)
        engines.perturb(generation.model, seed=1)
        generation.sync_weights()
        assert (audit.audits, audit.failures) == (1, 0)
        fused = engine_model(generation.llm).get_submodule("model.layers.0.mlp.gate_up_proj")
        fused.weight.data.view(torch.uint8)[3, 5] ^= 1
        fused.weight_scale_inv.data[-1, -1] *= 2
        with pytest.raises(RuntimeError, match="differs in 1 of 32768 elements") as error:
            audit.audit()
        assert re.findall(r"[\w.]+\.weight\w*", str(error.value)) == [GATE, f"{UP}_scale_inv"]


@pytest.mark.parametrize("use_vllm, mode", [(False, "colocate"), (True, "server")])
def test_an_engine_elsewhere_is_refused(use_vllm, mode):
    trainer = SimpleNamespace(args=SimpleNamespace(use_vllm=use_vllm, vllm_mode=mode))
    with pytest.raises(ValueError, match=f"use_vllm={use_vllm}, vllm_mode='{mode}'"):
        SyncAuditCallback(trainer)


def test_what_happens_at_a_difference_has_two_values():
    with pytest.raises(ValueError, match="on_difference='stop': give one of raise, warn"):
        SyncAuditCallback(None, on_difference="stop")
