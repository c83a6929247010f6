"""The checks of `trl-fp8 doctor` that import torch and vLLM. Their process writes verdicts to stdout, as JSON lines.

The last checks train a tiny policy for two steps. In each step a sync copies the policy into the engine, and an audit
compares every tensor there. Nothing is downloaded.
"""

import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

from trl_fp8.upstream.quiet import quiet

from .doctor import FAULT, IN_CHILD, LONGEST, OK, SKIPPED, WARNING, Verdict


Found = tuple[str, str]  # status and text of a `Verdict`
NO_GPU = "torch sees no GPU"
STEPS = 2
# A step with this much mismatch/k3_kl (in nats) or more is a fault. Models of this size have 0.003 to 0.006 with the
# default format, and more than 1 if the engine has other weights than the policy
LARGE_K3 = 0.1


class Machine:
    """Runs the checks named in `IN_CHILD`, each in a method: "exact casts" in `exact_casts`.

    A check returns its status and text. Any error that it raises is a fault. Later checks use the policy and the
    trainer of earlier checks.

    Args:
        folder: Existing folder for policy and run.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def verdicts(self) -> Iterator[Verdict]:
        """Yield a verdict for each check, until one is a fault."""
        for name in IN_CHILD:
            check = getattr(self, name.lower().replace(" ", "_"))
            try:
                status, text = check()
            except Exception as error:  # libraries raise errors of any class
                traceback.print_exc()
                status = FAULT
                text = f"{_words(error)} (docs/troubleshooting.md has remedies by message)"
            yield Verdict(name, status, text)
            if status == FAULT:
                return

    def torch(self) -> Found:
        """Import torch, and ask it for a GPU."""
        import torch

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.has_gpu = torch.cuda.is_available()
        if self.has_gpu:
            capability = ".".join(map(str, torch.cuda.get_device_capability()))
            name = torch.cuda.get_device_name()
            return OK, f"{torch.__version__} runs on {name}, compute capability {capability}"
        if torch.version.cuda is None:
            remedy = "For a GPU run pip install -e '.[cuda]' in the clone, in a new environment"
            reason = f"torch {torch.__version__} is built for CPUs. {remedy}"
        else:
            reasons = " ".join(str(each.message) for each in caught)
            reason = (
                f"{torch.__version__} is built for CUDA {torch.version.cuda}, and sees no GPU. {reasons} Install a "
                "driver for this CUDA, and look at CUDA_VISIBLE_DEVICES"
            )
        return WARNING, f"{reason}. Training here runs on the CPU, for trials only"

    def libraries(self) -> Found:
        """Import TRL and vLLM, and the modules that patch them."""
        from trl_fp8 import FP8GRPOTrainer
        from trl_fp8.engine.vllm.generation import FP8VLLMGeneration
        from trl_fp8.run.facts import hardware

        return OK, f"{FP8GRPOTrainer.__name__} and {FP8VLLMGeneration.__name__} on {hardware()}"

    def exact_casts(self) -> Found:
        """Compare the GPU kernels of quantizer, checksum and KV cache with torch on the CPU, bit for bit."""
        import torch

        from trl_fp8.quantization.codec.kernel_check import require_exact_kernels

        if not self.has_gpu:
            return SKIPPED, f"{NO_GPU}, so there are no GPU kernels to compare with torch on the CPU"
        require_exact_kernels(torch.device("cuda", torch.cuda.current_device()))
        return OK, "Triton's kernels give the bytes that torch gives on the CPU"

    def deepgemm(self) -> Found:
        """Look for nvcc, which DeepGEMM needs to compile its kernels."""
        from trl_fp8.engine.vllm.gemms import WITHOUT_NVCC, find_nvcc

        if not self.has_gpu:
            return SKIPPED, NO_GPU
        return (OK, "nvcc is there") if find_nvcc() else (WARNING, WITHOUT_NVCC)

    def batch_invariance(self) -> Found:
        """Check that vLLM's FP8 linear kernels multiply correctly, and give a row the same bits in every batch."""
        import torch
        from accelerate import PartialState

        from trl_fp8.engine.vllm.gemms import Gemm
        from trl_fp8.engine.vllm.platform import platform_of
        from trl_fp8.recipe.recipe import recipe_for_model

        state = PartialState(cpu=not self.has_gpu)
        model = tiny_policy(self.folder / "policy")
        engine_platform = platform_of()
        recipe = recipe_for_model(model)
        passed = []  # names of kernels
        failed = []  # names and reasons
        with engine_platform.ready(recipe):
            for name in engine_platform.linear_backends(recipe):
                gemm = Gemm(name, recipe.format, recipe.scale_format, state.device, model.config, batch_invariant=True)
                try:
                    gemm.check()
                    passed.append(name)
                except Exception as error:  # kernels raise errors of any class
                    failed.append(f"{name}: {_words(error)}")
        if self.has_gpu:
            torch.cuda.empty_cache()
        names = f"linear_backend {' or '.join(passed)}" if passed else "no linear_backend"
        text = f"{names} gives a row the same bits in every batch"
        if failed:
            text += f". These cannot be used with fp8_forward='one_forward': {'; '.join(failed)}"
        if not passed:
            return WARNING, f"{text}. Leave fp8_forward='one_forward' out on this machine."
        return OK, text

    def kernels(self) -> Found:
        """Start an engine for the tiny policy, with the default flags."""
        from trl_fp8.engine.vllm.numerics import attention_layers
        from trl_fp8.upstream.vllm import can_sleep, engine_model

        # Without MASTER_PORT TRL takes port 29500 if nothing listens there yet. Two engines that start at the same
        # time would both take it
        if "MASTER_PORT" not in os.environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        self.sleeps = self.has_gpu and can_sleep()
        self.trainer = tiny_trainer(self.folder, self.has_gpu, self.sleeps)
        generation = self.trainer.vllm_generation
        linears = [f"{name} ({count})" for name, count in generation.numerics.kernels.items()]
        layers = attention_layers(engine_model(generation.llm)).values()
        backends = {f"{layer.attn_backend.get_name()} with a {layer.kv_cache_dtype} cache" for layer in layers}
        backend = generation.pinned.get("linear_backend", "of vLLM's choice")
        return OK, f"FP8 linears: {', '.join(linears)}, linear_backend {backend}; attention: {', '.join(backends)}"

    def step(self) -> Found:
        """Train for two steps. Each has a sync, its audit, rollouts and a loss."""
        self.trainer.train()
        report = self.trainer.vllm_generation.last_sync
        values = [row["mismatch/k3_kl"] for row in self.trainer.state.log_history if "mismatch/k3_kl" in row]
        k3 = max(values, key=lambda value: (isnan(value), value))  # NaN if any value is NaN
        text = f"{STEPS} steps; audits passed ({report.audited_tensors} tensors); mismatch/k3_kl {k3:.2g}"
        if isnan(k3) or k3 >= LARGE_K3:
            return FAULT, f"{text}, not below {LARGE_K3}: rollouts are not the policy's. Report it with --json."
        return OK, text

    def sleep(self) -> Found:
        """Say whether the engine slept between the steps."""
        if not self.has_gpu:
            return SKIPPED, f"{NO_GPU}; vllm_enable_sleep_mode=True needs one"
        if self.sleeps:
            return OK, "the engine slept after each step and woke for the next (vllm_enable_sleep_mode=True)"
        return WARNING, "vLLM has no sleep mode here. Leave vllm_enable_sleep_mode out."


def tiny_policy(folder: Path) -> Any:
    """Return a random policy of two layers, saved with its tokenizer in `folder`."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    characters = [chr(code) for code in range(32, 92)]
    vocabulary = {token: number for number, token in enumerate([*special.values(), *characters])}
    # Without merges BPE makes each character a token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special["unk_token"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    ids = {"vocab_size": len(vocabulary), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Qwen3Config(**sizes, **heads, **ids, initializer_range=0.08, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def tiny_trainer(folder: Path, has_gpu: bool, sleeps: bool) -> Any:
    """Return a trainer of `tiny_policy`, whose engine has started."""
    from datasets import Dataset

    from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer

    def share_of_digits(completions: list[str], **_: object) -> list[float]:
        return [sum(character.isdigit() for character in text) / 8 for text in completions]

    args = FP8GRPOConfig(
        str(folder / "run"),
        use_cpu=not has_gpu,
        bf16=has_gpu,
        use_vllm=True,
        vllm_max_model_length=64,
        vllm_enable_sleep_mode=sleeps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": f"{10 + number}+{number}="} for number in range(16)])
    return FP8GRPOTrainer(str(folder / "policy"), share_of_digits, args, data)


def main() -> None:
    """Write a verdict for each check to stdout until one is a fault. What libraries write there goes to stderr."""
    quiet()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for verdict in Machine(Path(sys.argv[1])).verdicts():
        channel.write(json.dumps(verdict) + "\n")
        channel.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine or a driver that crashes while the process ends must not add a fault


def _words(error: Exception) -> str:
    """Return an error's class and message in one line. If it is longer than `LONGEST`, its middle is left out."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST // 2]} ... {words[-LONGEST // 2 :]}"


if __name__ == "__main__":
    main()
