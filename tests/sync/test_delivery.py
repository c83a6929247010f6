"""What a delivery does in which order, what it repeats and what it refuses: on an engine that is a dict of tensors."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_fp8.quantization.kv_scales import KVScales
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Delivery
from trl_fp8.sync.pieces import Layout, Piece


RECIPE = FP8Recipe(fp8_modules=("proj",), kept_modules={"head": "output head"})
SCALES = KVScales(torch.full((1, 3), 0.5))
HELD = {
    "proj.weight": torch.zeros(128, 256, dtype=torch.float8_e4m3fn),
    "proj.weight_scale_inv": torch.zeros(1, 2),
    "head.weight": torch.zeros(8, 128, dtype=torch.bfloat16),
    "norm.weight": torch.zeros(256, dtype=torch.bfloat16),
}


class DictEngine:
    """Writes its calls to `calls`. `break_load` (which attempts raise what) and `lose` (a name) go wrong."""

    def __init__(self):
        self.held = {name: tensor.clone() for name, tensor in HELD.items()}
        owners = {name: SimpleNamespace(tensor=tensor) for name, tensor in self.held.items()}
        pieces = {name: Piece(name, owners[name], "tensor", tensor.dtype) for name, tensor in self.held.items()}
        self.layout = Layout(pieces, {})
        self.calls, self.break_load, self.lose, self.running = [], {}, None, False
        self.kv_scales = {}

    def wake(self):
        self.calls.append("wake")

    def load(self, tensors):
        self.calls.append("load")
        for name, tensor in tensors:
            if name == "head.weight" and (error := self.break_load.pop(self.calls.count("load"), None)):
                raise error
            if name.startswith("model.layers."):
                self.kv_scales[name] = tensor.item()
            elif name != self.lose:
                self.held[name].copy_(tensor)

    def abort(self):
        self.calls.append("abort")

    def verify_kv_scales(self, sent):
        self.calls.append("verify")
        if set(self.kv_scales.values()) != set(sent.values.flatten().tolist()):
            raise RuntimeError("KV cache scales differ")

    def reset_prefix_cache(self):
        self.calls.append("reset")
        if self.running:
            raise RuntimeError("requests are still running")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.head = nn.Linear(256, 128, bias=False), nn.Linear(128, 8, bias=False)
        self.norm = nn.RMSNorm(256)


@pytest.fixture
def made():
    """(delivery, its engine, the policy); `calls` of the engine include the policy's tensors being closed."""
    policy, engine = Policy(), DictEngine()

    def tensors():
        try:
            yield from policy.named_parameters()
        finally:
            engine.calls.append("closed")

    return Delivery(engine, policy, RECIPE, lambda: closing(tensors())), engine, policy


def calibrated(engine):
    def calibrate():
        engine.calls.append("calibrate")
        return SCALES

    return calibrate


def refuses(delivery):
    for check in (delivery.require_whole, delivery.verify):
        with pytest.raises(RuntimeError, match="no complete policy"):
            check()
    return True


DELIVERED = ["wake", "calibrate", "load", "closed", "verify", "reset"]


def test_everything_in_its_order_and_what_came_of_it(made):
    delivery, engine, policy = made
    assert delivery.last is None and refuses(delivery)
    shared = {}
    report = delivery.deliver(calibrated(engine), shared.__setitem__)
    assert engine.calls == DELIVERED
    assert report is delivery.last and report.audited_tensors == len(HELD) and report.kv_scales is SCALES
    assert (report.fp8_weights, report.bytes_sent) == (1, sum(tensor.nbytes for tensor in HELD.values()))
    assert 0 <= report.quantize_seconds <= report.seconds and 0 < report.weight_relative_error < 2**-4
    assert torch.equal(engine.held["head.weight"], policy.head.weight.bfloat16())
    assert list(shared) == ["proj.weight"]
    assert torch.equal(shared["proj.weight"].qdata.float(), engine.held["proj.weight"].float())
    delivery.require_whole()
    delivery.verify()


def test_without_an_fp8_kv_cache_nothing_is_calibrated_or_verified(made):
    delivery, engine, _ = made
    assert delivery.deliver().kv_scales is None
    delivery.verify()
    assert engine.calls == ["wake", "load", "closed", "reset"]


@pytest.mark.parametrize("bad", ["policy", "calibration"])
def test_a_policy_that_cannot_be_sent_leaves_the_engine_whole(made, bad):
    delivery, engine, policy = made
    report = delivery.deliver(calibrated(engine))
    engine.calls.clear()

    def fails():
        raise ValueError("zero amax")

    if bad == "policy":
        with torch.no_grad():
            policy.norm.weight[3] = float("inf")
    with pytest.raises(ValueError, match={"policy": "norm.weight", "calibration": "zero amax"}[bad]):
        delivery.deliver(fails)
    assert engine.calls == ([] if bad == "policy" else ["wake"])
    delivery.verify()
    assert delivery.last is report and delivery.failures == 0


def test_an_engine_that_fails_is_asked_once_more(made):
    delivery, engine, _ = made
    engine.break_load = {1: RuntimeError("hiccup")}
    delivery.deliver(calibrated(engine))
    assert engine.calls == ["wake", "calibrate", "load", "closed", "abort", *DELIVERED[2:]]
    delivery.verify()
    assert delivery.failures == 0


@pytest.mark.parametrize(
    "errors, attempts",
    [
        ({1: RuntimeError("first"), 2: RuntimeError("last")}, 2),
        ({1: OSError("last")}, 1),
        ({1: KeyboardInterrupt("last")}, 1),
    ],
    ids=["twice", "another error", "interrupted"],
)
def test_an_engine_that_was_not_loaded_is_refused_until_it_is(made, errors, attempts):
    delivery, engine, _ = made
    report = delivery.deliver()
    engine.calls.clear()
    engine.break_load = errors
    with pytest.raises(type(errors[attempts]), match="last"):
        delivery.deliver()
    assert engine.calls == ["wake", *["load", "closed", "abort"] * attempts]
    assert refuses(delivery) and delivery.last is report and delivery.failures == 0
    delivery.deliver()
    delivery.verify()


def test_ranks_do_not_repeat_a_load_that_others_may_be_through(made):
    _, engine, policy = made
    ranks = SimpleNamespace(reduce_max=lambda tensor: None)
    delivery = Delivery(engine, policy, RECIPE, lambda: closing(iter(policy.named_parameters())), replicas=ranks)
    engine.break_load = {1: RuntimeError("hiccup")}
    with pytest.raises(RuntimeError, match="hiccup"):
        delivery.deliver()
    assert engine.calls == ["wake", "load", "abort"] and refuses(delivery)


@pytest.mark.parametrize("lost", ["norm.weight", "proj.weight_scale_inv", "KV scale"])
def test_what_did_not_arrive_is_counted_and_refused(made, lost):
    delivery, engine, _ = made
    engine.lose = lost
    calibrate = calibrated(engine)
    if lost == "KV scale":
        engine.verify_kv_scales = lambda sent: DictEngine.verify_kv_scales(engine, KVScales(sent.values * 2))
    with pytest.raises(RuntimeError, match="scales differ" if lost == "KV scale" else f"other bytes.*{lost}"):
        delivery.deliver(calibrate)
    assert "reset" not in engine.calls and engine.calls.count("load") == 1
    assert refuses(delivery) and delivery.failures == 1 and delivery.last is None


def test_stale_prefixes_are_refused(made):
    delivery, engine, _ = made
    engine.running = True
    with pytest.raises(RuntimeError, match="still running"):
        delivery.deliver()
    assert refuses(delivery) and delivery.failures == 0


@pytest.mark.parametrize("changed", ["proj.weight", "KV scale"])
def test_a_broken_seal_is_counted_once_and_refused_until_the_next_delivery(made, changed):
    delivery, engine, _ = made
    delivery.deliver(calibrated(engine))
    if changed == "KV scale":
        engine.kv_scales["model.layers.0.self_attn.k_scale"] = 2.0
    else:
        engine.held[changed].view(torch.uint8)[5, 7] ^= 1
    with pytest.raises(RuntimeError, match="scales differ" if changed == "KV scale" else f"changed since.*{changed}"):
        delivery.verify()
    assert refuses(delivery) and delivery.failures == 1
    delivery.deliver(calibrated(engine))
    delivery.verify()
