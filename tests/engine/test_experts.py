"""FP8 experts in a real engine: sync, audit and near-dead experts.
The kernel is a reference (reference_experts.py).
"""

import pytest
import torch

from testing import engines
from testing.reference_experts import reference_fp8_experts
from testing.rollouts import calibrated, follow
from trl_fp8.policy.flow.precision_flow import VERIFIED_WITH_FP8_EXPERTS
from trl_fp8.upstream.vllm import engine_model


pytestmark = [pytest.mark.engine, pytest.mark.skipif(torch.cuda.is_available(), reason="the reference is for CPU")]
MOE = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"]


@pytest.fixture
def started():
    """`started(checkpoint)` -> a generation whose experts are FP8; its engine is shut down at the end."""
    running = []

    def start(checkpoint: str, scales=None, **options):
        with reference_fp8_experts():
            running.append(
                engines.start(checkpoint, scales or engines.some_scales(2, 1), expert_kernels=True, **options)
            )
        return running[-1]

    yield start
    for generation in running:
        if generation.llm is not None:
            engines.shutdown(generation.llm)


@pytest.mark.parametrize("architecture", MOE)
def test_two_syncs_of_fp8_experts_equal_a_fresh_engine_bit_for_bit(architecture, checkpoint, tmp_path, started):
    generation = started(checkpoint(architecture))
    synced = engines.after_two_syncs(generation)
    assert generation.numerics.kernels["Fp8MoeBackend.TRITON"] == 2
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    generation.llm = None
    with reference_fp8_experts():
        assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced


def test_kernels_of_experts_read_what_was_audited(checkpoint, started):
    generation = started(checkpoint("qwen3_moe"))
    layers = [m for m in engine_model(generation.llm).modules() if type(m).__name__ == "RoutedExperts"]
    storage = [layer.w13_weight_scale_inv.data_ptr() for layer in layers]
    for step in (1, 2):
        engines.perturb(generation.model, seed=step)
        generation.sync_weights()
        for layer, pointer in zip(layers, storage, strict=True):
            kernel = layer.quant_method.moe_kernel.fused_experts
            assert layer.w13_weight_scale_inv.data_ptr() == kernel.w1_scale.data_ptr() == pointer
            assert layer.w2_weight_scale_inv.data_ptr() == kernel.w2_scale.data_ptr()


def swapped_experts(writer):
    """Experts 0 and 1 change places."""
    codes = writer._held["model.layers.1.mlp.experts.down_proj"].view(torch.uint8)
    codes[:2] = codes[:2].flip(0)


def scale_of_one_expert_off(writer):
    writer._held["model.layers.0.mlp.experts.gate_up_proj_scale_inv"][2] *= 2


def gate_and_up_exchanged(writer):
    codes = writer._held["model.layers.0.mlp.experts.gate_up_proj"].view(torch.uint8)
    codes.copy_(codes.flip(1))


def scales_elsewhere(writer):
    name = "model.layers.0.mlp.experts.down_proj_scale_inv"
    writer._held = writer._held | {name: writer._held[name].clone()}


@pytest.mark.parametrize(
    "tampered, name",
    [
        ({"after": swapped_experts}, "layers.1.mlp.experts.down_proj"),
        ({"after": scale_of_one_expert_off}, "layers.0.mlp.experts.gate_up_proj_scale_inv"),
        ({"after": gate_and_up_exchanged}, "layers.0.mlp.experts.gate_up_proj"),
        ({"before": scales_elsewhere}, "layers.0.mlp.experts.down_proj_scale_inv"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_audit_names_experts_that_did_not_arrive(tampered, name, checkpoint, started):
    generation = started(checkpoint("qwen3_moe"))
    engines.tamper(**tampered)
    with pytest.raises(RuntimeError, match=rf"1 tensors hold other bytes than were sent: model\.{name}\. "):
        generation.sync_weights()
    engines.tamper()
    with pytest.raises(RuntimeError, match="no complete policy"):
        generation.generate([[5, 6]], None, 1)


def test_near_dead_experts_serve_finite_log_probs_and_are_reported(checkpoint, started):
    generation = started(checkpoint("qwen3_moe"))
    experts = generation.model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[0], experts.down_proj[1], experts.gate_up_proj[2] = 0, 1e-30, 1e-23
    generation.sync_weights()
    name = "model.layers.0.mlp.experts"
    assert generation.last_sync.dead_blocks == {f"{name}.gate_up_proj": 4, f"{name}.down_proj": 1}
    rows = [torch.tensor(values) for _, *parts in engines.log_probs(generation.llm) for values in parts]
    assert all(row.isfinite().all() for row in rows)


def test_experts_are_refused_where_their_kernel_repacks_them(checkpoint, started, monkeypatch):
    from trl_fp8.engine.vllm.auditable import require_auditable
    from trl_fp8.engine.vllm.numerics import fp8_experts

    model = engine_model(started(checkpoint("qwen3_moe")).llm)
    require_auditable(model)
    layer = fp8_experts(model)[1]
    weight, backend = layer.w2_weight, layer.quant_method.fp8_backend
    layer.w2_weight = torch.nn.Parameter(weight.transpose(1, 2), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"TRITON keeps w2_weight as .*first model.layers.1.mlp.experts"):
        require_auditable(model)
    layer.w2_weight = weight
    monkeypatch.setattr(layer.quant_method, "fp8_backend", type(backend).FLASHINFER_CUTLASS)
    with pytest.raises(RuntimeError, match="(?s)FLASHINFER_CUTLASS is not known to .*'moe_backend': 'triton'"):
        require_auditable(model)


def test_what_is_called_verified_is_tested_here():
    assert sorted(MOE) == sorted(VERIFIED_WITH_FP8_EXPERTS)


@pytest.mark.parametrize("architecture", MOE)
def test_the_policys_log_probs_are_the_engines(architecture, checkpoint):
    """FP8 experts, linears and KV cache on both sides. The engine's batches are larger and add in another order."""
    with reference_fp8_experts(fused_activation=True):  # as TritonExperts where DeepGEMM is not in use
        generation = engines.start(checkpoint(architecture), expert_kernels=True, return_routes=True)
    hook, scales = calibrated(generation, engines.PROMPTS)
    theirs = [torch.tensor(prompt) for _, _, prompt in engines.log_probs(generation.llm)]
    hook.simulate(scales.values)

    def off():
        differences = []
        for tokens, engines_own in zip(engines.PROMPTS, theirs, strict=True):
            with torch.no_grad():
                logits = generation.model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
            ours = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
            differences.append((ours - engines_own).abs())
        return torch.cat(differences)

    plain = off()
    follow(generation, hook)
    engines.shutdown(generation.llm)
    # nearly all tokens are equal; the rare ones that are not are far from what the plain forward leaves
    found = off()
    assert found.median() < 1e-5 and found.mean() < 0.1 * plain.mean()
    assert plain.mean() > 0.03
