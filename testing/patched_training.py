"""A run at two servers whose syncs are patches, or are all whole, with one of them killed and started again."""

import signal
from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from transformers import TrainerCallback
from trl.generation.vllm_client import VLLMClient

from trl_fp8 import FP8GRPOTrainer
from trl_fp8.engine.vllm_server import weight_patches

from . import forked_server
from .runs import arguments, dataset, recorded, reward_digits, trajectory


RATE = 1e-5  # at which patches are a few per cent of the whole
COUNTED = ("fp8/weight_version", "fp8/patch_over_whole", "fp8/lost_servers")  # they say how weights travelled


class Restart(TrainerCallback):
    """Kills a server in a generation, `step` steps after the start, and lets another process, with the same `options`,
    take its place after the next step. Made before a trainer is.
    """

    def __init__(self, server: forked_server.ForkedServer, step: int, folder: Path, **options):
        self._server, self._step = server, step
        self._now = 0
        self._is_killed = False
        self._go = folder / "go"
        self._spare = forked_server.spare(server, self._go, kv_cache_dtype="fp8", **options)

    def before_request(self, url: str) -> None:
        if url == self._server.url and self._now == self._step and not self._is_killed:
            self._is_killed = True
            self._server.end(signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        self._now = state.global_step
        if self._now == self._step + 2:
            assert self._is_killed
            self._server.pid = self._spare
            self._go.touch()
            self._server.wait_until_up()


def trained(
    servers: list[forked_server.ForkedServer],
    folder: Path,
    steps: int,
    *,
    whole: bool,
    restart: Restart | None = None,
    peft_config: PeftConfig | None = None,
    **flags,
) -> tuple[list[dict], list, dict[str, torch.Tensor], dict[str, list[float]]]:
    """Return of a run: its logged rows, all rollouts with their log-probs, its weights, and metrics in `COUNTED`."""
    flags = {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": steps} | flags
    flags |= {"vllm_mode": "server", "vllm_server_base_url": ",".join(server.url for server in servers)}
    callbacks = [] if restart is None else [restart]
    options = {"callbacks": callbacks, "peft_config": peft_config}
    trainer = FP8GRPOTrainer(servers[0].model, reward_digits, arguments(folder, **flags), dataset(), **options)
    rollouts = recorded(trainer.vllm_generation, "generate", lambda output, *_, **__: output[:3])
    generate = VLLMClient.generate

    def killing(client, *args, **kwargs):
        restart.before_request(client.base_url)
        return generate(client, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        if whole:
            patched.setattr(weight_patches, "MOST_SHARE", -1)
        if restart is not None:
            patched.setattr(VLLMClient, "generate", killing)
        trainer.train()
    assert trainer.vllm_generation.audit_failures == 0
    logged = trajectory(trainer)
    counted = {name: [row[name] for row in logged] for name in COUNTED}
    logged = [{name: value for name, value in row.items() if name not in COUNTED} for row in logged]
    weights = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    return logged, rollouts, weights, counted


def equal(one: tuple, other: tuple) -> bool:
    """Return whether rows, rollouts and weights of two runs are the same, bit for bit."""
    same_weights = all(torch.equal(each, other[2][name]) for name, each in one[2].items())
    return one[:2] == other[:2] and same_weights
