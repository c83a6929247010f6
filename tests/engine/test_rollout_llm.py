"""`RolloutLLM`: sleep with a real engine that has generated; with routes, which CPU engines do not return, vLLM's own
scheduler and engine core without a model.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import LLM
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

from testing import engines
from trl_fp8.engine.vllm.rollout_llm import RolloutLLM, Weights
from trl_fp8.features.one_forward.engine_kernels import SharedKernelsPart
from trl_fp8.sync.records import Occasion
from trl_fp8.upstream.versions import installed_vllm


class IdleScheduler(Scheduler):
    """vLLM's, with nothing to schedule; `routes` are returned."""

    def __init__(self, routes: bool):
        self.aux_output_connector = AuxOutputSchedulerConnector() if routes else None
        self.kv_cache_manager = SimpleNamespace(reset_prefix_cache=lambda: True)
        self.requests, self.running, self.connector = {}, [], None
        self.prev_step_scheduled_req_ids, self.finished_req_ids = set(), {"a rollout"}
        self.waiting, self.kv_holding_waiting, self.num_waiting_for_streaming_input = [], [], 0
        self.ec_connector = None
        self._pause_state = PauseState.UNPAUSED


class IdleExecutor(UniProcExecutor):
    """vLLM's, whose worker remembers the level at which it sleeps, and what is discarded or woken."""

    def __init__(self):
        self.sleeping_tags, self.level, self.happened = set(), None, []

    def collective_rpc(self, method: str, args: tuple = (), kwargs: dict | None = None) -> None:
        if method == "sleep":
            self.level = kwargs["level"]
        if method in ("discard", "wake_up"):
            self.happened.append((method, *(args or [kwargs["tags"]])))


class IdleCore(EngineCore):
    """vLLM's, whose executor remembers the level at which it sleeps."""

    def __init__(self, routes: bool):
        self.scheduler = IdleScheduler(routes)
        self.model_executor = IdleExecutor()
        self.reset_mm_cache = self.reset_encoder_cache = lambda: None
        self.batch_queue = None

    @property
    def level(self) -> int | None:
        return self.model_executor.level


@pytest.fixture
def made(monkeypatch):
    """`made(seed=...)`: a `RolloutLLM` whose engine is an `IdleCore` and draws as vLLM does."""

    def start(llm, seed=0, **kwargs):
        llm.core = IdleCore(routes=kwargs.get("enable_return_routed_experts", False))
        step = llm.core.scheduler.finished_req_ids.clear  # of all that a step does, what one without requests does
        llm.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=llm.core), step=step)

    def draw(llm, prompts, broken=False):
        if broken:
            raise RuntimeError("out of memory")
        # worker/gpu/sample/states.py, add_request; sample/ops/topk_topp_sampler.py, random_sample
        seeds = [np.random.randint(-(2**63), 2**63 - 1) for _ in prompts]
        return list(zip(seeds, torch.empty(len(prompts)).exponential_().tolist(), strict=True))

    monkeypatch.setattr(LLM, "__init__", start)
    monkeypatch.setattr(LLM, "sleep", lambda llm, level=1, mode="abort": llm.core.sleep(level, mode))
    monkeypatch.setattr(LLM, "release_kv_cache_memory", lambda llm: llm.core.release_kv_cache_memory())
    monkeypatch.setattr(LLM, "wake_up", lambda llm, tags: llm.core.wake_up(tags))
    monkeypatch.setattr(LLM, "generate", draw)
    return RolloutLLM


@pytest.mark.parametrize("keep_weights, level", [(False, 2), (True, 1)])
def test_an_engine_that_returns_routes_sleeps_and_wakes(keep_weights, level, made):
    refused = pytest.raises(RuntimeError, match=r"after pause\(mode='keep'\)")  # by vLLM's default
    with nullcontext() if installed_vllm().sleeps_with_routes else refused:
        LLM.sleep(made(enable_return_routed_experts=True), level=2)
    llm = made(enable_return_routed_experts=True)
    llm.keep_weights = keep_weights
    llm.sleep(level=2)
    scheduler = llm.core.scheduler
    assert llm.core.level == level and scheduler.aux_output_connector._generation == 1  # the cache was reset
    assert scheduler.pause_state == PauseState.PAUSED_ALL
    llm.wake_up(["weights"])
    assert scheduler.pause_state == PauseState.PAUSED_ALL  # until all is awake
    llm.wake_up(["kv_cache"])
    assert scheduler.pause_state == PauseState.UNPAUSED


def test_shared_weights_never_sleep_again(made):
    llm = made(enable_return_routed_experts=True)
    llm.sleep(level=2)
    llm.share_weights()
    executor, scheduler = llm.core.model_executor, llm.core.scheduler
    assert executor.level == 2 and not llm.asleep_with_weights
    for tags in ["weights"], ["weights"], ["kv_cache"]:  # a sync before the first sleep may be repeated
        llm.wake_up(tags)
    assert scheduler.pause_state == PauseState.UNPAUSED
    for _ in range(2):
        scheduler.finished_req_ids.add("another rollout")
        llm.sleep(level=2)
        assert executor.sleeping_tags == {"kv_cache"} and llm.asleep_with_weights
        assert scheduler.pause_state != PauseState.UNPAUSED
        for tags in ["weights"], ["weights"], ["kv_cache"]:
            llm.wake_up(tags)
            assert not llm.asleep_with_weights
        assert scheduler.pause_state == PauseState.UNPAUSED
    once = [("discard", ("kv_cache",)), ("wake_up", ["kv_cache"])]
    assert executor.happened == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), *once, *once]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("keep_weights", [False, True])
def test_a_pause_leaves_weights_and_cache_where_they_are(keep_weights, shared, made):
    llm = made()
    llm.keep_weights = keep_weights
    if shared:
        llm.share_weights()
    llm.sleep(level=0)
    executor, scheduler = llm.core.model_executor, llm.core.scheduler
    assert scheduler.pause_state != PauseState.UNPAUSED
    assert executor.level is None and not executor.sleeping_tags and executor.happened == []
    assert llm._place is Weights.AWAKE and not llm.asleep_with_weights
    llm.wake_up(["scheduling"])
    assert scheduler.pause_state == PauseState.UNPAUSED


def test_weights_that_sleep_when_they_become_shared_are_not_taken_for_kept(made):
    llm = made(enable_return_routed_experts=True)
    llm.sleep(level=2)
    llm.share_weights()
    with pytest.raises(RuntimeError, match="requires all executor memory to be resident"):
        llm.sleep(level=2)
    assert not llm.asleep_with_weights


@pytest.mark.parametrize("keep_weights", [False, True])
def test_an_engine_that_refuses_to_sleep_is_awake(keep_weights, made, monkeypatch):
    def refuse(level, mode):
        raise RuntimeError("requests are running")

    llm = made()
    llm.keep_weights = keep_weights
    monkeypatch.setattr(llm.core, "sleep", refuse)
    with pytest.raises(RuntimeError, match="requests are running"):
        llm.sleep(level=2)
    assert llm._place is Weights.AWAKE and not llm.asleep_with_weights


@pytest.mark.engine
@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
def test_an_engine_that_has_generated_frees_its_cache_alone(ahead, checkpoint, monkeypatch):
    """It still has requests that finished, and a batch under way if it schedules ahead, as it does on CUDA."""
    update = CpuPlatform.check_and_update_config

    def scheduling(config):
        update(config)
        config.scheduler_config.async_scheduling = ahead

    happened = []
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(scheduling))
    for name in ("discard", "wake_up"):  # CuMem's part: a CPU worker frees nothing
        monkeypatch.setattr(CPUWorker, name, lambda worker, tags, name=name: happened.append((name, *tags)))
    generation = engines.start(checkpoint("qwen3"), engines.some_scales(2, 1), parts=[SharedKernelsPart()])
    generation.sync_weights()
    llm, first = generation.llm, engines.log_probs(generation.llm)
    core = llm.llm_engine.engine_core.engine_core
    assert core.scheduler.has_requests() and bool(core.batch_queue) is ahead
    for _ in range(2):
        llm.sleep(level=2)
        assert llm.asleep_with_weights and core.model_executor.sleeping_tags == {"kv_cache"}
        llm.wake_up(["kv_cache"])
        assert engines.log_probs(llm) == first
    assert happened == 2 * [("discard", "kv_cache"), ("wake_up", "kv_cache")]
    engines.shutdown(llm)


def test_others_abort_what_still_runs(made):
    llm = made()
    llm.sleep(level=2)
    assert llm.core.level == 2 and llm.core.scheduler.pause_state == PauseState.PAUSED_NEW


def test_without_scheduling_ahead_no_batch_is_in_flight_between_steps():
    """What `RouteLog` asks on CUDA of an engine that returns routes: a batch queue of one is none (`EngineCore`)."""
    batches = [
        VllmConfig.max_concurrent_batches.fget(
            SimpleNamespace(
                parallel_config=SimpleNamespace(pipeline_parallel_size=1),
                scheduler_config=SimpleNamespace(async_scheduling=ahead),
                use_v2_model_runner=True,
            )
        )
        for ahead in (True, False)
    ]
    assert batches == [2, 1]


PROMPTS = [[1], [2], [3]]


def test_ranks_of_one_engine_draw_the_same_whatever_rewards_drew(made):
    np.random.seed(0)
    torch.manual_seed(0)
    ranks, drawn = [made(seed=3), made(seed=3)], []
    for generation in range(3):
        for rank, llm in enumerate(ranks):
            np.random.rand(1 + 5 * rank), torch.rand(1 + 5 * rank)  # a reward function
            llm.occasion = Occasion(7, generation // 2, 1)
            drawn.append(tuple(llm.generate(PROMPTS)))
    assert drawn[0::2] == drawn[1::2]
    assert no_repeats(drawn[0::2])  # no generation repeats another
    others = []
    for rank, seed in ((4, 7), (3, 8)):  # another group of ranks, another run
        llm = made(seed=rank)
        llm.occasion = Occasion(seed, 0, 1)
        others.append(llm.generate(PROMPTS))
    assert no_repeats([*drawn[0::2], *others])


def no_repeats(generations):
    """Whether no number of either generator was drawn twice."""
    drawn = [number for generation in generations for both in generation for number in both]
    return len(set(drawn)) == len(drawn)


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(made):
    whole, resumed = made(seed=1), made(seed=1)
    for step in range(3):
        whole.occasion = Occasion(7, step, 0)
        evaluated = whole.generate(PROMPTS)  # before the checkpoint
        whole.occasion = Occasion(7, step, 1)
        drawn = whole.generate(PROMPTS)
    resumed.occasion = Occasion(7, 2, 1)
    assert resumed.generate(PROMPTS) == drawn != evaluated


def test_the_users_random_numbers_are_not_touched(made):
    def both():
        return np.random.rand(), torch.rand(1).item()

    np.random.seed(7)
    torch.manual_seed(7)
    expected = [both() for _ in range(4)]
    np.random.seed(7)
    torch.manual_seed(7)
    llm, found = made(), []
    llm.occasion = Occasion(7, 0, 1)
    for _ in range(2):
        found.append(both())
        llm.generate(PROMPTS)
        found.append(both())
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(PROMPTS, broken=True)
    assert found == expected


def test_generators_of_other_devices_of_the_process_are_not_touched(made, monkeypatch):
    """Nothing restores them: only the CPU's generator and that of the current GPU are seeded."""
    seeded = []
    for module in (torch.cuda, torch.mps, torch.xpu):
        for name in ("manual_seed_all", "manual_seed"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda seed, name=name: seeded.append(name))
    llm = made(seed=1)
    llm.occasion = 1, 0, 1
    llm.generate(["a prompt"])
    assert seeded == ([] if not torch.cuda.is_available() else ["manual_seed"])
