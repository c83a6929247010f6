"""FP8 experts in a real engine: sync, audit, near-dead experts, and the choice of routers on both sides.
The kernel is a reference (reference_experts.py).
"""

import pytest
import torch

from testing import engines
from testing.reference_experts import reference_fp8_experts
from testing.rollouts import PROMPTS, calibrated, follow, sampled, scored
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.features.router_replay.engine_routes import RouteLog
from trl_fp8.features.router_replay.replay import RouterReplay, RouteTally
from trl_fp8.recipe.names import NOWHERE
from trl_fp8.upstream.vllm import engine_model


pytestmark = [pytest.mark.engine, pytest.mark.skipif(torch.cuda.is_available(), reason="the reference is for CPU")]
ROUNDING = 5e-6  # as in test_one_forward.py
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


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "olmoe"])
def test_two_syncs_of_fp8_experts_equal_a_fresh_engine_bit_for_bit(architecture, checkpoint, tmp_path, started):
    generation = started(checkpoint(architecture))
    synced = engines.after_two_syncs(generation)
    assert generation.numerics.kernels["Fp8MoeBackend.TRITON"] == 2
    engines.require_whole_audit(generation)
    engines.shutdown(generation.llm)
    generation.llm = None
    with reference_fp8_experts():
        assert engines.fresh_log_probs(tmp_path / "fresh", generation, engines.some_scales(2, 1)) == synced


def test_experts_go_with_an_engine_without_experts_before_them_in_the_process(checkpoint, started, tmp_path):
    """Two trainers one after another. vLLM makes its groups of ranks once, and one for experts only for those."""
    dense = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    dense.sync_weights()
    before = engines.log_probs(dense.llm)
    generation = started(checkpoint("mixtral"))
    synced = engines.after_two_syncs(generation)
    assert engines.log_probs(dense.llm) == before
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
    from trl_fp8.engine.vllm.numerics import fp8_experts, require_auditable

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


@pytest.mark.parametrize("architecture", MOE)
def test_a_policy_that_follows_routes_as_the_engine_does(architecture, checkpoint, started):
    """Choice by choice, in the engine's order; and what replay is told goes first all the same. In this model two
    experts of each layer tie for every token.
    """
    eight = {"num_local_experts" if architecture == "mixtral" else "num_experts": 8}
    generation = started(checkpoint(architecture, **eight), parts=[RouteLog(), SharedKernelsPart()])
    engines.perturb(generation.model, seed=0)
    routers = [layer.mlp.gate for layer in generation.model.model.layers]
    with torch.no_grad():
        for router in routers:
            router.weight[3] = router.weight[5]
    hook, scales = calibrated(generation, PROMPTS)
    hook.simulate(scales.values)
    sequences, theirs = sampled(generation)
    rollout = engines.part_of(generation, RouteLog).notes_on(sequences)
    replay = RouterReplay(generation.model)
    forward = follow(generation, hook)
    routes = _left_padded(rollout, sequences, replay)

    def scored_with(routes, **options):
        tally = RouteTally(torch.device("cpu"))
        with replay.during(routes, tally=tally, **options):
            found = scored(forward, generation.model, sequences)
        return torch.cat(found), tally.counts.tolist()

    own, (known, used, chosen) = scored_with(routes, replay=False)
    assert (own - torch.cat(theirs)).abs().max() < ROUNDING
    assert known == used == chosen == sum(2 * len(rows) for rows in rollout)
    replayed, counts = scored_with(routes, replay=True, record=True)
    assert torch.equal(replayed, own) and counts == [known] * 3
    recorded = replay.recorded()
    assert torch.equal(recorded[routes != NOWHERE], routes[routes != NOWHERE])
    chose = [(recorded == expert).any(-1) for expert in (3, 5)]
    assert (chose[0] != chose[1]).any()  # one of two equals
    others = torch.where(routes == NOWHERE, routes, (routes + 1) % 8)
    away, (known, used, chosen) = scored_with(others, replay=True)
    assert used == known > 2 * chosen and (away - own).abs().mean() > 1e-3
    assert (
        len(engines.part_of(generation, RouteLog).notes_on(sequences)[0]) == len(sequences[0]) - 1
    )  # the engine took no note of all this


def _left_padded(rollout, sequences, replay):
    """Routes `[B, S, L, K]` as the trainer aligns them."""
    length = max(map(len, sequences))
    routes = torch.full((len(sequences), length, *rollout[0].shape[1:]), NOWHERE, dtype=replay.dtype)
    for row, found, tokens in zip(routes, rollout, sequences, strict=True):
        row[length - len(tokens) :][: len(found)] = torch.from_numpy(found)
    return routes
