"""What a delivery does in which order, what it repeats and what it refuses: on an engine that is a dict of tensors."""

import weakref
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_fp8.quantization.codec.digest import digest
from trl_fp8.recipe.recipe import FP8Recipe
from trl_fp8.sync.delivery import InPlaceDelivery, TensorGroup
from trl_fp8.sync.pieces import Layout, Piece
from trl_fp8.sync.shards import GatherFailed
from trl_fp8.sync.writer import Writer


RECIPE = FP8Recipe(fp8_modules=("proj",), kept_modules={"head": "output head"})
SCALES = torch.full((1, 3), 0.5)
HELD = {
    "proj.weight": torch.zeros(128, 256, dtype=torch.float8_e4m3fn),
    "proj.weight_scale_inv": torch.zeros(1, 2),
    "head.weight": torch.zeros(8, 128, dtype=torch.bfloat16),
    "norm.weight": torch.zeros(256, dtype=torch.bfloat16),
}


class DictEngine:
    """Writes its calls to `calls`. `broken` and `lost` (which attempts to write weights, and to
    take what was written, raise what) go wrong."""

    def __init__(self):
        self.held = {name: tensor.clone() for name, tensor in HELD.items()}
        owners = {name: SimpleNamespace(tensor=tensor) for name, tensor in self.held.items()}
        self.layout = Layout(Piece(name, owners[name], "tensor", tensor.dtype) for name, tensor in self.held.items())
        self.calls, self.broken, self.running, self.slept_without = [], {}, False, False
        self.arrivals, self.lost = 0, {}

    def wake(self):
        self.calls.append("wake")
        return self.slept_without

    def arrive(self):
        self.arrivals += 1
        error = self.lost.pop(self.arrivals, None)
        if error:
            raise error

    def reset_prefix_cache(self):
        self.calls.append("reset")
        if self.running:
            raise RuntimeError("requests are still running")


class Scales:
    """What is carried. `next` is what the policy gives, or the error; `held` is the engine's copy."""

    name, value, held, next = "scales", None, None, SCALES

    def __init__(self, calls):
        self.calls = calls

    def prepare(self):
        self.calls.append("prepare")
        if isinstance(self.next, Exception):
            raise self.next
        self.value = self.next

    def write(self):
        self.calls.append("scales")
        self.held = self.value.clone()

    def verify(self):
        self.calls.append("verify")
        if not torch.equal(self.held, self.value):
            raise RuntimeError("scales differ")

    def digest(self):
        return digest(self.value)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.head = nn.Linear(256, 128, bias=False), nn.Linear(128, 8, bias=False)
        self.norm = nn.RMSNorm(256)


def tensors_of(policy, engine):
    """The tensors of a policy; `calls` of the engine include that they are opened and closed, and attempts number
    `engine.broken` raise before the head.
    """

    def tensors():
        engine.calls.append("write")
        try:
            for name, parameter in policy.named_parameters():
                if name == "head.weight" and (error := engine.broken.pop(engine.calls.count("write"), None)):
                    raise error
                yield name, parameter
        finally:
            engine.calls.append("closed")

    return lambda: closing(tensors())


@pytest.fixture
def made():
    """(policy, its engine, the policy's tensors)."""
    policy, engine = Policy(), DictEngine()
    return policy, engine, tensors_of(policy, engine)


@pytest.fixture
def plain(made):
    """(delivery that carries nothing, its engine, what it delivers)."""
    policy, engine, tensors = made
    return InPlaceDelivery(engine, policy, RECIPE), engine, tensors


@pytest.fixture
def carrying(made):
    """(delivery that carries scales, its engine, what it delivers, the scales)."""
    policy, engine, tensors = made
    scales = Scales(engine.calls)
    return InPlaceDelivery(engine, policy, RECIPE, carried=scales), engine, tensors, scales


def refuses(delivery):
    for check in (delivery.require_whole, delivery.verify):
        with pytest.raises(RuntimeError, match="no complete policy"):
            check()
    return True


DELIVERED = ["wake", "prepare", "write", "closed", "scales", "verify", "reset"]


def test_everything_in_its_order_and_what_came_of_it(carrying, made):
    (delivery, engine, tensors, _), (policy, *_) = carrying, made
    assert delivery.last is None and refuses(delivery)
    report = delivery.deliver(tensors)
    assert engine.calls == DELIVERED
    assert report is delivery.last and report.audited_tensors == len(HELD) and report.carried == {"scales": SCALES}
    assert (report.fp8_weights, report.bytes_sent) == (1, sum(tensor.nbytes for tensor in HELD.values()))
    assert 0 <= report.prepare_seconds <= report.seconds and 0 < report.weight_relative_error < 2**-4
    assert 0 <= report.quantize_seconds <= report.seconds
    assert torch.equal(engine.held["head.weight"], policy.head.weight.bfloat16())
    delivery.require_whole()
    delivery.verify()


def test_with_nothing_to_carry_nothing_is_prepared_or_verified(plain):
    delivery, engine, tensors = plain
    assert delivery.deliver(tensors).carried == {}
    delivery.verify()
    assert engine.calls == ["wake", "write", "closed", "reset"]


def test_weights_alone_are_sent_with_what_is_carried_as_it_was(carrying):
    """Before the first whole delivery there is nothing to carry, unless somebody has set it: a run that resumes."""
    delivery, engine, tensors, scales = carrying
    assert delivery.deliver(tensors, prepare=False).carried == {}
    delivery.verify()
    assert engine.calls == ["wake", "write", "closed", "reset"]
    scales.value = resumed = torch.full((1, 3), 2.0)
    delivery.verify()  # the engine was not sent these
    assert delivery.deliver(tensors, prepare=False).carried == {"scales": resumed}
    assert torch.equal(scales.held, resumed)
    delivery.deliver(tensors)
    engine.calls.clear()
    scales.next = resumed
    assert delivery.deliver(tensors, prepare=False).carried == {"scales": SCALES}
    assert engine.calls == [call for call in DELIVERED if call != "prepare"] and torch.equal(scales.held, SCALES)


@pytest.mark.parametrize("bad", ["policy", "calibration"])
def test_a_policy_that_cannot_be_calibrated_leaves_the_engine_whole(carrying, made, bad):
    (delivery, engine, tensors, scales), (policy, *_) = carrying, made
    report = delivery.deliver(tensors)
    engine.calls.clear()
    scales.next = ValueError("zero amax")
    if bad == "policy":
        with torch.no_grad():
            policy.norm.weight[3] = float("inf")
    with pytest.raises(ValueError, match={"policy": "norm.weight. Nothing was", "calibration": "zero amax"}[bad]):
        delivery.deliver(tensors)
    assert engine.calls == ["wake", "prepare"]
    delivery.verify()
    assert delivery.last is report and delivery.failures == 0


def test_an_engine_that_slept_without_its_weights_holds_none_if_calibration_fails(carrying):
    delivery, engine, tensors, scales = carrying
    delivery.deliver(tensors)
    engine.slept_without, scales.next = True, ValueError("zero amax")
    with pytest.raises(ValueError, match="zero amax"):
        delivery.deliver(tensors)
    assert refuses(delivery)


@pytest.mark.parametrize("where", ["proj", "head", "norm"])
def test_a_policy_that_is_not_finite_is_named_as_it_is_written(carrying, made, where):
    (delivery, _, tensors, _), (policy, *_) = carrying, made
    report = delivery.deliver(tensors)
    weight = policy.get_submodule(where).weight
    with torch.no_grad():
        kept = weight.view(-1)[5].item()
        weight.view(-1)[5] = float("nan")
    with pytest.raises(ValueError, match=f"1 of 3 parameters: {where}.weight. The engine refuses to generate until"):
        delivery.deliver(tensors)
    assert refuses(delivery) and delivery.last is report and delivery.failures == 0
    with torch.no_grad():
        weight.view(-1)[5] = kept
    delivery.deliver(tensors)
    delivery.verify()


def test_a_write_that_fails_is_tried_once_more(carrying):
    delivery, engine, tensors, _ = carrying
    engine.broken = {1: RuntimeError("hiccup")}
    delivery.deliver(tensors)
    assert engine.calls == ["wake", "prepare", "write", "closed", *DELIVERED[2:]]
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
def test_an_engine_that_was_not_written_is_refused_until_it_is(plain, errors, attempts):
    delivery, engine, tensors = plain
    report = delivery.deliver(tensors)
    engine.calls.clear()
    engine.broken = errors
    with pytest.raises(type(errors[attempts]), match="last"):
        delivery.deliver(tensors)
    assert engine.calls == ["wake", *["write", "closed"] * attempts]
    assert refuses(delivery) and delivery.last is report and delivery.failures == 0
    delivery.deliver(tensors)
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
def test_a_failure_on_one_rank_is_retried_on_all(made, ours):
    policy, engine, tensors = made
    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=OtherRank({1: 1}))
    engine.broken = {1: ours} if ours else {}
    delivery.deliver(tensors)
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
def test_a_failure_on_one_rank_fails_on_all(made, says, match):
    policy, engine, tensors = made
    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=OtherRank(says))
    with pytest.raises(RuntimeError, match=match):
        delivery.deliver(tensors)
    assert refuses(delivery) and "reset" not in engine.calls


@pytest.mark.parametrize("bad", ["policy", "calibration"])
def test_a_rank_that_cannot_calibrate_enters_no_collective(made, bad):
    """The others may be in one of the calibration, which would take this rank's numbers for its own."""
    policy, engine, tensors = made
    replicas, scales = OtherRank(), Scales(engine.calls)
    scales.next = ValueError("zero amax")
    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=replicas, carried=scales)
    if bad == "policy":
        with torch.no_grad():
            policy.norm.weight[3] = float("inf")
    with pytest.raises(ValueError, match={"policy": "norm.weight. Nothing was", "calibration": "zero amax"}[bad]):
        delivery.deliver(tensors)
    assert replicas.collectives == 0


@pytest.mark.parametrize("differ", ["sent", "held"])
def test_carried_values_have_to_be_equal_on_all_ranks(made, differ):
    """On both ranks, whichever of them has another value, or an engine that did not take it."""
    policy, engine, tensors = made
    scales, seen = Scales(engine.calls), []

    class Differs(OtherRank):
        def extremes(self, values):
            seen.append(values)
            largest, smallest = values.clone(), values.clone()
            smallest[-2 if differ == "sent" else -1] -= 1
            return torch.stack([largest, smallest])

    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=Differs(), carried=scales)
    name = {"sent": "scales", "held": r"scales \(in the engine\)"}[differ]
    with pytest.raises(RuntimeError, match=f"1 tensors are not the same on every rank: {name}[.] The engine must not"):
        delivery.deliver(tensors)
    [values] = seen
    assert values[-2:].tolist() == [digest(SCALES).item(), 1] and refuses(delivery)


def test_a_failed_attempt_is_freed_before_the_next(made):
    policy, engine, _ = made
    held = []

    def tensors():
        assert not any(each() is not None for each in held)
        large = torch.ones(128, 256)
        held.append(weakref.ref(large))
        yield "proj.weight", large
        if len(held) == 1:
            raise torch.OutOfMemoryError("gathering")
        yield from list(policy.named_parameters())[1:]

    InPlaceDelivery(engine, policy, RECIPE).deliver(lambda: closing(tensors()))
    assert len(held) == 2


def test_an_engine_that_changed_is_refused_on_the_ranks_that_share_it(made):
    policy, engine, tensors = made
    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=OtherRank(of_engine=1))
    delivery.deliver(tensors)
    with pytest.raises(RuntimeError, match="another rank's part of the engine has changed"):
        delivery.verify()
    assert refuses(delivery) and delivery.failures == 1


def test_a_rank_with_an_engine_of_its_own_waits_for_nobody_before_it_generates(made):
    """With tools one rank generates more often than another."""
    policy, engine, tensors = made
    replicas = OtherRank()
    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=replicas)
    delivery.deliver(tensors)
    synced = replicas.collectives
    delivery.verify()
    engine.held["norm.weight"][0] = 2.0
    with pytest.raises(RuntimeError, match="changed since the last sync: norm.weight"):
        delivery.verify()
    assert replicas.collectives == synced and refuses(delivery)


def test_a_rank_that_fails_goes_on_gathering_with_the_others(made):
    """Each parameter is a collective: ranks that are not through would wait for this one for ever."""
    policy, engine, _ = made
    gathered = []

    def tensors():
        for name, parameter in policy.named_parameters():
            gathered.append(name)
            yield name, parameter[:64] if name == "proj.weight" else parameter  # cannot be written

    everything = [name for name, _ in policy.named_parameters()]
    delivery = InPlaceDelivery(engine, policy, RECIPE, one_by_one=True, replicas=OtherRank({2: 2}))
    with pytest.raises(RuntimeError):
        delivery.deliver(lambda: closing(tensors()))
    assert gathered == 2 * everything and everything[0] == "proj.weight"


def test_a_rank_on_which_a_gather_broke_off_enters_no_other_collective(made):
    """The others are in that gather: what this rank agreed on would be taken for a part of a weight."""
    policy, engine, _ = made
    replicas = OtherRank()

    def tensors():
        yield next(policy.named_parameters())
        raise GatherFailed("no memory for a whole")

    delivery = InPlaceDelivery(engine, policy, RECIPE, replicas=replicas)
    with pytest.raises(GatherFailed):
        delivery.deliver(lambda: closing(tensors()))
    assert replicas.collectives == 0 and refuses(delivery)


@pytest.mark.parametrize("lost", ["norm.weight", "proj.weight_scale_inv", "scales"])
def test_tensors_that_did_not_arrive_are_counted_and_refused(carrying, lost, monkeypatch):
    delivery, engine, tensors, scales = carrying
    if lost == "scales":
        monkeypatch.setattr(scales, "write", lambda: setattr(scales, "held", scales.value * 2))
    else:
        write = Writer.write

        def elsewhere(writer, *sent):
            writer._held = writer._held | {lost: engine.held[lost].clone()}
            write(writer, *sent)

        monkeypatch.setattr(Writer, "write", elsewhere)
    with pytest.raises(RuntimeError, match="scales differ" if lost == "scales" else f"other bytes.*{lost}"):
        delivery.deliver(tensors)
    assert "reset" not in engine.calls and engine.calls.count("write") == 1
    assert refuses(delivery) and delivery.failures == 1 and delivery.last is None


def test_stale_prefixes_are_refused(plain):
    delivery, engine, tensors = plain
    engine.running = True
    with pytest.raises(RuntimeError, match="still running"):
        delivery.deliver(tensors)
    assert refuses(delivery) and delivery.failures == 0


@pytest.mark.parametrize("changed", ["proj.weight", "scales"])
def test_a_broken_seal_is_counted_once_and_refused_until_the_next_delivery(carrying, changed):
    delivery, engine, tensors, scales = carrying
    delivery.deliver(tensors)
    if changed == "scales":
        scales.held[0, 1] = 2.0
    else:
        engine.held[changed].view(torch.uint8)[5, 7] ^= 1
    with pytest.raises(RuntimeError, match="scales differ" if changed == "scales" else f"changed since.*{changed}"):
        delivery.verify()
    assert refuses(delivery) and delivery.failures == 1
    delivery.deliver(tensors)
    delivery.verify()


@pytest.fixture
def in_parts():
    """(delivery of a policy whose projection is frozen, its engine, what it delivers); `calls` say what is opened."""
    policy, engine = Policy(), DictEngine()

    def opened(which, names):
        def tensors():
            engine.calls.append(which)
            yield from ((name, p) for name, p in policy.named_parameters() if name in names)

        return lambda: closing(tensors())

    base = TensorGroup(engine.layout.part({"proj.weight", "proj.weight_scale_inv"}), opened("base", {"proj.weight"}))
    delivery = InPlaceDelivery(engine, policy, RECIPE, frozen=(base,), carried=Scales(engine.calls))
    return delivery, engine, opened("trained", {"head.weight", "norm.weight"})


def test_frozen_tensors_are_sent_once_before_they_are_used(in_parts):
    delivery, engine, tensors = in_parts
    first, second = delivery.deliver(tensors), delivery.deliver(tensors)
    both = ["wake", "prepare", "trained", "scales", "verify", "reset"]
    assert engine.calls == [both[0], "base", *both[1:], *both]
    trained = sum(HELD[name].nbytes for name in ("head.weight", "norm.weight"))
    assert (first.bytes_sent, second.bytes_sent) == (trained + delivery.frozen[0].bytes, trained)
    assert (first.audited_tensors, second.audited_tensors) == (4, 2)
    assert first.weight_relative_error == second.weight_relative_error > 0


@pytest.mark.parametrize("name, again", [("proj.weight", ["base", "trained"]), ("norm.weight", ["trained"])])
def test_only_the_part_that_was_changed_is_sent_again(name, again, in_parts):
    delivery, engine, tensors = in_parts
    delivery.deliver(tensors)
    engine.held[name].view(torch.uint8)[..., 0] ^= 1
    with pytest.raises(RuntimeError, match=f"changed since the last sync: {name}"):
        delivery.verify()
    assert refuses(delivery)
    engine.calls.clear()
    delivery.deliver(tensors)
    assert [call for call in engine.calls if call in ("base", "trained")] == again
    delivery.verify()


def test_frozen_tensors_that_another_rank_lost_are_sent_by_all(in_parts):
    """A rank that found its engine changed would otherwise be alone in the sync of the base."""
    delivery, engine, tensors = in_parts
    delivery._replicas = replicas = OtherRank()
    delivery._reduce_max = replicas.reduce_max
    delivery.deliver(tensors)
    engine.calls.clear()
    replicas.says = {replicas.agreed + 1: 1}
    delivery.deliver(tensors)
    assert engine.calls == ["wake", "base", "prepare", "trained", "scales", "verify", "reset"]


def test_what_an_engine_could_not_take_is_written_once_more(plain):
    delivery, engine, tensors = plain
    engine.lost = {1: RuntimeError("the server does not answer")}
    delivery.deliver(tensors)
    assert engine.arrivals == 2 and engine.calls.count("write") == 2
    delivery.verify()


def test_an_engine_that_takes_nothing_twice_holds_no_policy(plain):
    delivery, engine, tensors = plain
    engine.lost = {1: RuntimeError("gone"), 2: RuntimeError("still gone")}
    with pytest.raises(RuntimeError, match="still gone"):
        delivery.deliver(tensors)
    assert "reset" not in engine.calls
    with pytest.raises(RuntimeError, match="no complete policy"):
        delivery.verify()
