"""Every guard of the sync, each shown to fire by breaking the thing on purpose between sender and engine."""

import pytest
import torch

from testing import engines
from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
from trl_fp8.engine.vllm.numerics import attention_layers, require_auditable
from trl_fp8.engine.vllm.scale_copies import KVScaleCopies
from trl_fp8.quantization.codec.kv_scales import QKV, KVScales
from trl_fp8.sync import writer
from trl_fp8.sync.policy_checks import require_same_tensors
from trl_fp8.upstream.vllm import engine_model


pytestmark = pytest.mark.engine

VICTIM = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def generation(checkpoint):
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1))
    yield generation
    engines.shutdown(generation.llm)


@pytest.fixture(autouse=True)
def healthy_afterwards(generation):
    yield
    engines.tamper()
    vars(engines.scales_of(generation)).pop("write", None)
    engines.scales_of(generation).calibrate = lambda: engines.some_scales(2, 1)
    generation.sync_weights()


def sync_with(generation, **tampered):
    failures = generation.audit_failures
    engines.perturb(generation.model, seed=7)
    engines.tamper(**tampered)
    with pytest.raises(RuntimeError) as error:
        generation.sync_weights()
    with pytest.raises(RuntimeError, match="no complete policy"):
        generation.generate([[5, 6]], None, 1)
    assert generation.audit_failures == failures + 1
    return str(error.value)


def corrupt(writer):
    """One bit of what was written."""
    writer._held[VICTIM].view(torch.uint8)[5, 77] ^= 1


def misplace_scale(writer):
    """A scale goes to memory that the engine does not read."""
    name = f"{VICTIM}_scale_inv"
    writer._held = writer._held | {name: writer._held[name].clone()}


def swap_layers(writer):
    """layers.0.k_proj and layers.1.k_proj trade places (weights only)."""
    a, b = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1))
    writer._held = writer._held | {a: writer._held[b], b: writer._held[a]}


def shift_rows(writer):
    """The second layer's up projection lands 128 rows too high, on the gate's last rows."""
    name = "model.layers.1.mlp.up_proj.weight"
    fused = writer._pieces[name].parameter.detach()
    writer._held = writer._held | {name: fused[128 : 128 + 256]}


def drop_norm(stream):
    return ((name, tensor) for name, tensor in stream if name != "model.layers.0.input_layernorm.weight")


@pytest.mark.parametrize(
    "tampered, named, innocent",
    [
        ({"after": corrupt}, [VICTIM], ["up_proj", "scale_inv", "layers.0"]),
        ({"before": misplace_scale}, [f"{VICTIM}_scale_inv"], ["layers.0", "self_attn"]),
        ({"before": swap_layers}, [f"layers.{n}.self_attn.k_proj.weight" for n in (0, 1)], ["q_proj", "mlp"]),
        ({"before": shift_rows}, [f"layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up")], ["down", "attn"]),
        ({"stream": drop_norm}, ["model.layers.0.input_layernorm.weight"], ["layers.1", "proj"]),
    ],
    ids=["a bit", "elsewhere", "exchanged", "shifted", "lost"],
)
def test_broken_transport_is_caught_and_named(generation, tampered, named, innocent):
    message = sync_with(generation, **tampered)
    assert all(name in message for name in named), message
    assert not any(name in message for name in innocent), message


def test_tensors_that_nobody_sent_or_wanted_are_named(generation, monkeypatch):
    original = FP8VLLMGeneration._iter_named_params

    def without_final_norm(self):  # what FSDP1 does to TRL's sync
        return (item for item in original(self) if item[0] != "model.norm.weight")

    monkeypatch.setattr(FP8VLLMGeneration, "_iter_named_params", without_final_norm)
    assert "never sent: model.norm.weight" in sync_with(generation)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_kv_scale_that_does_not_arrive_is_named(generation, which):
    generation.sync_weights()
    scales = engines.scales_of(generation)
    scales.calibrate = lambda: engines.some_scales(2, 2)

    def stale():  # layer 1 keeps the scale of the sync before
        values = scales.value.values.clone()
        values[1, QKV.index(which)] /= 2
        KVScaleCopies(attention_layers(generation.engine.model)).write(KVScales(values))

    scales.write = stale
    message = sync_with(generation)
    assert f"layer 1 {which}_scale: device tensor" in message and f"layer 1 {which}_scale: host float" in message
    assert "layer 0" not in message


def test_swapped_kv_scales_of_two_layers_are_named(generation):
    scales = engines.scales_of(generation)

    def swapped():
        values = scales.value.values.clone()
        values[:, 1] = values[:, 1].flip(0)
        KVScaleCopies(attention_layers(generation.engine.model)).write(KVScales(values))

    scales.write = swapped
    message = sync_with(generation)
    assert "layer 0 k_scale" in message and "layer 1 k_scale" in message and "v_scale" not in message


@pytest.mark.parametrize("copy", ["_k_scale", "_k_scale_float", "_k_scale_cpu", "_v_scale_float", "_q_scale"])
def test_each_copy_of_a_scale_is_compared(generation, copy):
    generation.sync_weights()
    layer = attention_layers(engine_model(generation.llm))[1]
    held = getattr(layer, copy)
    if isinstance(held, torch.Tensor):
        held.mul_(2)
    else:
        setattr(layer, copy, held * 2)
    with pytest.raises(RuntimeError, match=f"layer 1 {copy[1]}_scale"):
        engines.scales_of(generation).verify()


def flip_a_byte(model):
    """In the last row of what the second layer's down projection holds."""
    codes = model.model.layers[1].mlp.down_proj.weight
    codes.view(torch.uint8)[-1, 7] ^= 1
    return VICTIM


def double_a_norm(model):
    model.model.layers[0].input_layernorm.weight.data.mul_(2)
    return "model.layers.0.input_layernorm.weight"


def turn_by_another_angle(model):
    """In a table that vLLM makes itself, and no sync sends."""
    model.model.layers[0].self_attn.rotary_emb.cos_sin_cache[3, 5] *= 1.5
    return "model.layers.0.self_attn.rotary_emb.cos_sin_cache"


@pytest.mark.parametrize("tamper", [flip_a_byte, double_a_norm, turn_by_another_angle])
def test_changes_in_the_engine_after_a_sync_are_named_before_sampling(generation, tamper):
    generation.sync_weights()
    expected = engines.log_probs(generation.llm)
    failures, sampled = generation.audit_failures, []
    generation.llm.generate, generate = lambda *args, **kwargs: sampled.append(args), generation.llm.generate
    name = tamper(engine_model(generation.llm))
    with pytest.raises(
        RuntimeError, match=f"^1 tensors of the engine have changed since the last sync: {name}. Someth"
    ):
        generation.generate([[5, 6]], None, 1)
    with pytest.raises(RuntimeError, match="no complete policy"):
        generation.generate([[5, 6]], None, 1)
    generation.llm.generate = generate
    assert generation.audit_failures == failures + 1 and not sampled
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == expected  # all of it was repaired
    assert generation.generate([[5, 6]], None, 1)


def test_an_edit_of_any_tensor_in_any_row_is_named(generation):
    generation.sync_weights()
    generator = torch.Generator().manual_seed(0)
    for name, held in (generation.engine.layout.held | generation.delivery.frozen[-1].layout.held).items():
        flat = held.reshape(-1).view(torch.uint8) if held.is_contiguous() else None
        assert flat is not None and flat.data_ptr() == held.data_ptr()  # a view of what the engine reads
        place = int(torch.randint(flat.numel(), (1,), generator=generator))
        flat[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        with pytest.raises(
            RuntimeError, match=f"^1 tensors of the engine have changed since the last sync: {name}[.] "
        ):
            generation.delivery.verify()
        generation.sync_weights()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])  # the last is infinite in BF16 only
def test_a_diverged_policy_is_named_and_refused_until_it_is_mended(generation, bad):
    generation.sync_weights()
    expected = engines.log_probs(generation.llm)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in generation.model.named_parameters():
        place = int(torch.randint(parameter.numel(), (1,), generator=generator))
        with torch.no_grad():
            kept = parameter.view(-1)[place].item()
            parameter.view(-1)[place] = bad
        with pytest.raises(ValueError, match=rf"1 of 25 parameters: {name}\. The engine refuses to generate"):
            generation.sync_weights()
        with pytest.raises(RuntimeError, match="no complete policy"):
            generation.generate([[5, 6]], None, 1)
        with torch.no_grad():
            parameter.view(-1)[place] = kept
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == expected


class Broken(Exception):
    """Anything that a parameter gather can raise."""


def break_at(position, error=Broken):
    def tampered(stream):
        for index, item in enumerate(stream):
            if index == position:
                raise error(f"at {item[0]}")
            yield item

    return tampered


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("error", [Broken, torch.OutOfMemoryError])
def test_a_sync_that_breaks_anywhere_can_be_repeated_with_other_weights(generation, monkeypatch, one_by_one, error):
    monkeypatch.setattr(generation.delivery._trained, "one_by_one", one_by_one)
    generation.sync_weights()
    expected = engines.log_probs(generation.llm)
    state = {name: tensor.clone() for name, tensor in generation.model.state_dict().items()}
    for position in range(25):
        engines.perturb(generation.model, seed=position)
        engines.tamper(stream=break_at(position, error))
        with pytest.raises(error, match="^at "):
            generation.sync_weights()
        with pytest.raises(RuntimeError, match="no complete policy"):
            generation.generate([[5, 6]], None, 1)
        engines.tamper()
        generation.model.load_state_dict(state)
        generation.sync_weights()
        if position % 5 == 0:  # generating takes longer than syncing; the audit covers the rest
            assert engines.log_probs(generation.llm) == expected
    engines.tamper(stream=break_at(25))
    generation.sync_weights()  # nothing there to break: 25 is all of them


@pytest.mark.parametrize("where", ["quantize_into", "digests_of_sent"])
def test_memory_that_runs_out_in_the_middle_of_a_write_is_no_policy(generation, monkeypatch, where):
    def exhausted(*args):
        raise torch.OutOfMemoryError("out of memory")

    generation.sync_weights()
    with monkeypatch.context() as broken:
        broken.setattr(writer, where, exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            generation.sync_weights()
    with pytest.raises(RuntimeError, match="no complete policy"):
        generation.generate([[5, 6]], None, 1)
    generation.sync_weights()
    assert generation.generate([[5, 6]], None, 1)


def test_an_engine_that_fails_once_is_retried(generation):
    calls = []

    def fail_once(stream):
        calls.append(1)
        for index, item in enumerate(stream):
            if len(calls) == 1 and index == 20:
                raise RuntimeError("engine hiccup")
            yield item

    engines.tamper(stream=fail_once)
    engines.perturb(generation.model, seed=1)
    generation.sync_weights()
    assert len(calls) == 2
    retried = engines.log_probs(generation.llm)
    engines.tamper()
    generation.sync_weights()
    assert engines.log_probs(generation.llm) == retried


def test_a_policy_that_was_resized_is_refused(generation, checkpoint):
    model = generation.model
    kept = {name: module.weight for name, module in (("in", model.model.embed_tokens), ("out", model.lm_head))}
    model.resize_token_embeddings(128, mean_resizing=False)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight has size 128 in dim 0, and the engine expects 64\. Was the"
    ):
        generation.sync_weights()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[64, 128\] where \[128, 128\] is sent"):
        require_same_tensors(model, generation.recipe, generation.engine.layout)
    model.resize_token_embeddings(64, mean_resizing=False)
    model.model.embed_tokens.weight, model.lm_head.weight = kept["in"], kept["out"]
    generation.sync_weights()


def test_requests_in_flight_at_a_sync_are_an_error(generation):
    from vllm import SamplingParams

    engine = generation.llm.llm_engine
    engine.add_request(
        "running", {"prompt_token_ids": list(range(4, 44))}, SamplingParams(max_tokens=4, ignore_eos=True)
    )
    engine.step()
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        generation.sync_weights()
    while engine.has_unfinished_requests():
        engine.step()


def kept_as(layer, name, tensor):
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


WEIGHT = r"weight as torch.float8_e4m3fn \[256, 128\] with strides \[1, 256\], a sync sends .* strides \[256, 1\]"
SCALE = r"weight_scale_inv as torch.int32 \[128, 1\].*a sync sends torch.float32 \[1, 2\].*first model.layers.0"


@pytest.mark.parametrize(
    ("name", "stored", "message"),
    [
        ("weight", lambda weight: weight.t(), WEIGHT),
        ("weight_scale_inv", lambda scale: torch.zeros(128, 1, dtype=torch.int32), SCALE),  # as DeepGEMM on Blackwell
        (
            "weight_scale_inv",
            lambda scale: torch.zeros(2, 4)[:, :1].t(),
            r"weight_scale_inv as .*strides \[1, 4\], a sync sends .* strides \[2, 1\]",
        ),
    ],
)
def test_kernels_that_store_weights_otherwise_are_refused_by_what_they_hold(generation, name, stored, message):
    model = engine_model(generation.llm)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    held = getattr(layer, name)
    require_auditable(model)
    kept_as(layer, name, stored(held.data))
    try:
        with pytest.raises(RuntimeError, match=f"ReferenceFp8BlockKernel keeps {message}"):
            require_auditable(model)
    finally:
        setattr(layer, name, held)
    require_auditable(model)


def test_kernels_that_are_not_known_are_refused_by_name(generation, monkeypatch):
    model = engine_model(generation.llm)
    kernel = model.get_submodule("model.layers.0.mlp.down_proj").quant_method.fp8_linear
    known = type(kernel)
    monkeypatch.setattr(kernel, "__class__", type("MarlinFP8ScaledMMLinearKernel", (known,), {}))
    with pytest.raises(RuntimeError, match="(?s)Marlin.* is not known to read weight and scales anew.*linear_backend"):
        require_auditable(model)
