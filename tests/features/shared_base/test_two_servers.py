"""Adapters at two servers, beside their base or merged into it, with one of the servers killed and started again."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from peft import LoraConfig

from testing import forked_server, patched_training
from trl_fp8.engine.vllm_server.plugin import FOLDER, TOKEN
from trl_fp8.features.shared_base.engine_served import ServedAdapters


ROOM = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
STEPS = 7
KILLED_AT = 2  # the step in whose generation the second server is killed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[True, False], ids=["beside", "merged"])
def two(request, checkpoint, tmp_path_factory):
    """Yield two servers that read one folder, with room for adapters beside an FP8 base or without."""
    folder = tmp_path_factory.mktemp("server") / "transfer"
    options = {"parts": [ServedAdapters(json.dumps(ROOM))]} if request.param else {}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(forked_server.running(checkpoint("qwen3"), folder, kv_cache_dtype="fp8", **options))
            for _ in range(2)
        ]
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv(FOLDER, servers[0].folder)
        patched.setenv(TOKEN, servers[0].token)
        yield SimpleNamespace(servers=servers, fp8_base=request.param, options=options)


def test_a_server_that_is_started_again_gets_base_and_adapters_and_the_run_stays_the_same(two, tmp_path, caplog):
    restart = patched_training.Restart(two.servers[1], KILLED_AT, tmp_path, **two.options)

    def trained(name, **options):
        lora = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ROOM)
        flags = {"fp8_base": two.fp8_base, "learning_rate": 1e-2, "peft_config": lora} | options
        return patched_training.trained(two.servers, tmp_path / name, STEPS, **flags)

    whole = trained("whole", whole=True)
    patched = trained("patched", whole=False, restart=restart)
    assert set(whole[3]["fp8/patch_over_whole"]) == {1.0} and set(whole[3]["fp8/lost_servers"]) == {0.0}
    # Killed in a generation: the next step does without the server, and the one after that has two again
    assert patched[3]["fp8/lost_servers"] == [float(step == KILLED_AT + 1) for step in range(STEPS)]
    left_out = [record.message for record in caplog.records if "is left out" in record.message]
    assert len(left_out) == 1 and left_out[0].startswith(two.servers[1].url)
    assert patched_training.equal(whole, patched)
    assert len({str(rollout[1]) for rollout in patched[1]}) == STEPS  # other ones in each step
    if two.fp8_base:
        # Patches bring adapters alone; the server that was started again gets the base, too, the other one a patch
        shares = patched[3]["fp8/patch_over_whole"]
        assert [share > 0.5 for share in shares] == [step in (0, KILLED_AT + 2) for step in range(STEPS)]
        assert shares[0] == 1 and shares[KILLED_AT + 2] < 1
