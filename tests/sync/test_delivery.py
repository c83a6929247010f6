"""What a delivery does in which order, what it repeats and what it refuses: on an engine that is a dict of tensors."""

import weakref
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_fp8.quantization.codec.kv_scales import KVScales
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import Delivery, Part
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.sync.shards import GatherFailed
from trl_fp8.sync.writer import Writer


RECIPE = FP8Recipe(fp8_modules=("proj",), kept_modules={"head": "output head"})
SCALES = KVScales(torch.full((1, 3), 0.5))
HELD = {
    "proj.weight": torch.zeros(128, 256, dtype=torch.float8_e4m3fn),
    "proj.weight_scale_inv": torch.zeros(1, 2),
    "head.weight": torch.zeros(8, 128, dtype=torch.bfloat16),
    "norm.weight": torch.zeros(256, dtype=torch.bfloat16),
}


class DictEngine:
    """Writes its calls to `calls`. `broken` (which attempts to write KV scales raise what) go wrong."""

    def __init__(self):
        self.held = {name: tensor.clone() for name, tensor in HELD.items()}
        owners = {name: SimpleNamespace(tensor=tensor) for name, tensor in self.held.items()}
        self.layout = Layout(Piece(name, owners[name], "tensor", tensor.dtype) for name, tensor in self.held.items())
        self.calls, self.broken, self.running = [], {}, False
        self.kv_scales, self.slept_without = None, False

    def wake(self):
        self.calls.append("wake")
        return self.slept_without

    def write_kv_scales(self, scales):
        self.calls.append("scales")
        self.kv_scales = scales.values.clone()

    def verify_kv_scales(self, sent):
        self.calls.append("verify")
        if not torch.equal(self.kv_scales, sent.values):
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
    """(delivery, its engine, the policy); `calls` of the engine include the policy's tensors being opened and closed,
    and attempts number `engine.broken` raise before the head.
    """
    policy, engine = Policy(), DictEngine()

    def tensors():
        engine.calls.append("write")
        try:
            for name, parameter in policy.named_parameters():
                if name == "head.weight" and (error := engine.broken.pop(engine.calls.count("write"), None)):
                    raise error
                yield name, parameter
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


DELIVERED = ["wake", "calibrate", "write", "closed", "scales", "verify", "reset"]


def test_everything_in_its_order_and_what_came_of_it(made):
    delivery, engine, policy = made
    assert delivery.last is None and refuses(delivery)
    report = delivery.deliver(calibrated(engine))
    assert engine.calls == DELIVERED
    assert report is delivery.last and report.audited_tensors == len(HELD) and report.kv_scales is SCALES
    assert (report.fp8_weights, report.bytes_sent) == (1, sum(tensor.nbytes for tensor in HELD.values()))
    assert 0 <= report.quantize_seconds <= report.seconds and 0 < report.weight_relative_error < 2**-4
    assert torch.equal(engine.held["head.weight"], policy.head.weight.bfloat16())
    delivery.require_whole()
    delivery.verify()


def test_without_an_fp8_kv_cache_nothing_is_calibrated_or_verified(made):
    delivery, engine, _ = made
    assert delivery.deliver().kv_scales is None
    delivery.verify()
    assert engine.calls == ["wake", "write", "closed", "reset"]


@pytest.mark.parametrize("bad", ["policy", "calibration"])
def test_a_policy_that_cannot_be_calibrated_leaves_the_engine_whole(made, bad):
    delivery, engine, policy = made
    report = delivery.deliver(calibrated(engine))
    engine.calls.clear()

    def fails():
        raise ValueError("zero amax")

    if bad == "policy":
        with torch.no_grad():
            policy.norm.weight[3] = float("inf")
    with pytest.raises(ValueError, match={"policy": "norm.weight. Nothing was", "calibration": "zero amax"}[bad]):
        delivery.deliver(fails)
    assert engine.calls == ["wake"]
    delivery.verify()
    assert delivery.last is report and delivery.failures == 0


def test_an_engine_that_slept_without_its_weights_holds_none_if_calibration_fails(made):
    delivery, engine, _ = made
    delivery.deliver(calibrated(engine))
    engine.slept_without = True
    with pytest.raises(ValueError, match="zero amax"):
        delivery.deliver(lambda: (_ for _ in ()).throw(ValueError("zero amax")))
    assert refuses(delivery)


@pytest.mark.parametrize("where", ["proj", "head", "norm"])
def test_a_policy_that_is_not_finite_is_named_as_it_is_written(made, where):
    delivery, engine, policy = made
    report = delivery.deliver(calibrated(engine))
    weight = policy.get_submodule(where).weight
    with torch.no_grad():
        kept = weight.view(-1)[5].item()
        weight.view(-1)[5] = float("nan")
    with pytest.raises(ValueError, match=f"1 of 3 parameters: {where}.weight. The engine refuses to generate until"):
        delivery.deliver(calibrated(engine))
    assert refuses(delivery) and delivery.last is report and delivery.failures == 0
    with torch.no_grad():
        weight.view(-1)[5] = kept
    delivery.deliver(calibrated(engine))
    delivery.verify()


def test_a_write_that_fails_is_tried_once_more(made):
    delivery, engine, _ = made
    engine.broken = {1: RuntimeError("hiccup")}
    delivery.deliver(calibrated(engine))
    assert engine.calls == ["wake", "calibrate", "write", "closed", *DELIVERED[2:]]
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
def test_an_engine_that_was_not_written_is_refused_until_it_is(made, errors, attempts):
    delivery, engine, _ = made
    report = delivery.deliver()
    engine.calls.clear()
    engine.broken = errors
    with pytest.raises(type(errors[attempts]), match="last"):
        delivery.deliver()
    assert engine.calls == ["wake", *["write", "closed"] * attempts]
    assert refuses(delivery) and delivery.last is report and delivery.failures == 0
    delivery.deliver()
    delivery.verify()


class OtherRank:
    """Two ranks. The other one holds the same policy, and answers the number `says` in the collective of that number,
    of those in which ranks agree. `of_engine`: what it says of the engine that both share; None: each has its own.
    """

    tensor_parallel_size, rank = 1, 0

    def __init__(self, says=(), of_engine=None):
        self.says, self.agreed, self.collectives = dict(says), 0, 0
        if of_engine is None:
            self.reduce_max_of_engine = None
        else:
            self.reduce_max_of_engine = lambda tensor: tensor.copy_(torch.maximum(tensor, torch.tensor(of_engine)))

    def reduce_max(self, tensor):
        self.collectives += 1
        if not tensor.is_floating_point():
            self.agreed += 1
            tensor.copy_(torch.maximum(tensor, torch.tensor(self.says.get(self.agreed, 0))))

    def extremes(self, values):
        return torch.stack([values, values])


@pytest.mark.parametrize("ours", [None, RuntimeError("hiccup")], ids=["theirs", "both"])
def test_what_failed_on_one_rank_is_repeated_on_all(made, ours):
    _, engine, policy = made
    delivery = Delivery(engine, policy, RECIPE, made[0]._trained.tensors, replicas=OtherRank({1: 1}))
    engine.broken = {1: ours} if ours else {}
    delivery.deliver()
    assert engine.calls == ["wake", "write", "closed", "write", "closed", "reset"]
    delivery.verify()


@pytest.mark.parametrize(
    "says, match",
    [
        ({1: 2}, "failed on another rank"),
        ({1: 1, 2: 1}, "failed on another rank"),
        ({2: 1}, "failed its audit on another rank"),
    ],
    ids=["for good", "twice", "audit"],
)
def test_what_failed_on_one_rank_fails_on_all(made, says, match):
    _, engine, policy = made
    delivery = Delivery(engine, policy, RECIPE, made[0]._trained.tensors, replicas=OtherRank(says))
    with pytest.raises(RuntimeError, match=match):
        delivery.deliver()
    assert refuses(delivery) and "reset" not in engine.calls


@pytest.mark.parametrize("bad", ["policy", "calibration"])
def test_a_rank_that_cannot_calibrate_enters_no_collective(made, bad):
    """The others may be in one of the calibration, which would take this rank's numbers for its own."""
    _, engine, policy = made
    replicas = OtherRank()
    delivery = Delivery(engine, policy, RECIPE, made[0]._trained.tensors, replicas=replicas)

    def fails():
        raise ValueError("zero amax")

    if bad == "policy":
        with torch.no_grad():
            policy.norm.weight[3] = float("inf")
    with pytest.raises(ValueError, match={"policy": "norm.weight. Nothing was", "calibration": "zero amax"}[bad]):
        delivery.deliver(fails)
    assert replicas.collectives == 0


def test_what_a_failed_attempt_held_is_gone_before_the_next(made):
    _, engine, policy = made
    held = []

    def tensors():
        assert not any(each() is not None for each in held)
        large = torch.ones(128, 256)
        held.append(weakref.ref(large))
        yield "proj.weight", large
        if len(held) == 1:
            raise torch.OutOfMemoryError("gathering")
        yield from list(policy.named_parameters())[1:]

    Delivery(engine, policy, RECIPE, lambda: closing(tensors())).deliver()
    assert len(held) == 2


def test_an_engine_that_changed_is_refused_on_the_ranks_that_share_it(made):
    _, engine, policy = made
    delivery = Delivery(engine, policy, RECIPE, made[0]._trained.tensors, replicas=OtherRank(of_engine=1))
    delivery.deliver()
    with pytest.raises(RuntimeError, match="another rank's part of the engine has changed"):
        delivery.verify()
    assert refuses(delivery) and delivery.failures == 1


def test_a_rank_with_an_engine_of_its_own_waits_for_nobody_before_it_generates(made):
    """With tools one rank generates more often than another."""
    _, engine, policy = made
    replicas = OtherRank()
    delivery = Delivery(engine, policy, RECIPE, made[0]._trained.tensors, replicas=replicas)
    delivery.deliver()
    synced = replicas.collectives
    delivery.verify()
    engine.held["norm.weight"][0] = 2.0
    with pytest.raises(RuntimeError, match="changed since the last sync: norm.weight"):
        delivery.verify()
    assert replicas.collectives == synced and refuses(delivery)


def test_a_rank_that_fails_goes_on_gathering_with_the_others(made):
    """Each parameter is a collective: ranks that are not through would wait for this one for ever."""
    _, engine, policy = made
    gathered = []

    def tensors():
        for name, parameter in policy.named_parameters():
            gathered.append(name)
            yield name, parameter[:64] if name == "proj.weight" else parameter  # cannot be written

    everything = [name for name, _ in policy.named_parameters()]
    delivery = Delivery(engine, policy, RECIPE, lambda: closing(tensors()), at_once=True, replicas=OtherRank({2: 2}))
    with pytest.raises(RuntimeError):
        delivery.deliver()
    assert gathered == 2 * everything and everything[0] == "proj.weight"


def test_a_rank_on_which_a_gather_broke_off_enters_no_other_collective(made):
    """The others are in that gather: what this rank agreed on would be taken for a part of a weight."""
    _, engine, policy = made
    replicas = OtherRank()

    def tensors():
        yield next(policy.named_parameters())
        raise GatherFailed("no memory for a whole")

    delivery = Delivery(engine, policy, RECIPE, lambda: closing(tensors()), replicas=replicas)
    with pytest.raises(GatherFailed):
        delivery.deliver()
    assert replicas.collectives == 0 and refuses(delivery)


@pytest.mark.parametrize("lost", ["norm.weight", "proj.weight_scale_inv", "KV scale"])
def test_what_did_not_arrive_is_counted_and_refused(made, lost, monkeypatch):
    delivery, engine, _ = made
    calibrate = calibrated(engine)
    if lost == "KV scale":
        engine.write_kv_scales = lambda sent: DictEngine.write_kv_scales(engine, KVScales(sent.values * 2))
    else:
        write = Writer.write

        def elsewhere(writer, *tensors):
            writer._held = writer._held | {lost: engine.held[lost].clone()}
            write(writer, *tensors)

        monkeypatch.setattr(Writer, "write", elsewhere)
    with pytest.raises(RuntimeError, match="scales differ" if lost == "KV scale" else f"other bytes.*{lost}"):
        delivery.deliver(calibrate)
    assert "reset" not in engine.calls and engine.calls.count("write") == 1
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
        engine.kv_scales[0, 1] = 2.0
    else:
        engine.held[changed].view(torch.uint8)[5, 7] ^= 1
    with pytest.raises(RuntimeError, match="scales differ" if changed == "KV scale" else f"changed since.*{changed}"):
        delivery.verify()
    assert refuses(delivery) and delivery.failures == 1
    delivery.deliver(calibrated(engine))
    delivery.verify()


@pytest.fixture
def in_parts():
    """(delivery of a policy whose projection is frozen, its engine, the part); `calls` say which part is opened."""
    policy, engine = Policy(), DictEngine()

    def opened(which, names):
        def tensors():
            engine.calls.append(which)
            yield from ((name, p) for name, p in policy.named_parameters() if name in names)

        return lambda: closing(tensors())

    base = Part(engine.layout.part({"proj.weight", "proj.weight_scale_inv"}), opened("base", {"proj.weight"}))
    trained = opened("trained", {"head.weight", "norm.weight"})
    return Delivery(engine, policy, RECIPE, trained, frozen=(base,)), engine, base


def test_what_nobody_trains_is_sent_once_and_before_anybody_computes_with_it(in_parts):
    delivery, engine, base = in_parts
    first, second = delivery.deliver(calibrated(engine)), delivery.deliver(calibrated(engine))
    both = ["wake", "calibrate", "trained", "scales", "verify", "reset"]
    assert engine.calls == [both[0], "base", *both[1:], *both]
    trained = sum(HELD[name].nbytes for name in ("head.weight", "norm.weight"))
    assert (first.bytes_sent, second.bytes_sent) == (trained + base.bytes, trained)
    assert (first.audited_tensors, second.audited_tensors) == (4, 2)
    assert first.weight_relative_error == second.weight_relative_error > 0


@pytest.mark.parametrize("name, again", [("proj.weight", ["base", "trained"]), ("norm.weight", ["trained"])])
def test_only_the_part_that_was_changed_is_sent_again(name, again, in_parts):
    delivery, engine, _ = in_parts
    delivery.deliver()
    engine.held[name].view(torch.uint8)[..., 0] ^= 1
    with pytest.raises(RuntimeError, match=f"changed since the last sync: {name}"):
        delivery.verify()
    assert refuses(delivery)
    engine.calls.clear()
    delivery.deliver()
    assert [call for call in engine.calls if call in ("base", "trained")] == again
    delivery.verify()


def test_what_another_rank_lost_of_the_frozen_part_is_sent_by_all(in_parts):
    """A rank that found its engine changed would otherwise be alone in the sync of the base."""
    delivery, engine, _ = in_parts
    delivery._replicas = replicas = OtherRank()
    delivery.deliver()
    engine.calls.clear()
    replicas.says = {replicas.agreed + 1: 1}
    delivery.deliver()
    assert engine.calls == ["wake", "base", "trained", "reset"]
