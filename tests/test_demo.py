"""What `make demo` prints where there is no terminal, line by line: the first that a user sees of this project."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import pytest

from examples import addition_task, demo_server
from testing.processes import alone
from testing.runs import arguments
from testing.tiny_models import save_checkpoint
from trl_fp8.commands.serve import command as serve_command


ROOT = Path(__file__).parents[1]
LINES = (
    r"Importing torch, TRL and vLLM .*",
    r"(Starting the engine; .*|The first step takes longer: .*)",  # on a busy host
    r"FP8 plan: 14 linear layers, 95\.8% of parameters, 801\.8 KiB -> 417\.8 KiB",
    r"KV cache: e4m3, 1\.0 KiB -> 512 B per token \(2\.0x the tokens\)",
    r"In BF16:  lm_head \(output head\)",
    r"Launch: 1 process",
    r"Engine: ReferenceFp8BlockKernel \(8\)\. Trainer: as TRL computes\.",
    r"Accuracy on held-out problems before training: 0\.\d{3}",
    r"step \d+/12  reward 0\.\d\d  length \d+  mismatch 0\.\d{4}",
    r"warning: (mismatch|correction)/.* `trl-fp8 report` shows .*",
    r"warning: .* values were clipped in the KV cache.*",  # if a sample is an outlier
    r"accuracy  0\.\d{3} -> 0\.\d{3}",
    r"mismatch  0\.\d{4} nats between trainer and engine over 12 steps",
    r"FP8       14 layers and the KV cache; weights 801\.8 KiB -> 417\.8 KiB \(95\.8% FP8\)",
    r"audits    0 differences found in the engine after 12 syncs of 417\.8 KiB",
    r"next      \S*trl-fp8 report outputs/demo .*",
    r"",
)
SMALL = "--max_steps 12 --per_device_train_batch_size 16 --eval_samples 1"


SHARE = "--gpu-memory-utilization"


def dry_run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "--dry-run", "--always-make", "demo", *words], cwd=ROOT, capture_output=True, text=True
    )


def command() -> list[str]:
    """As the Makefile has it, in this environment and with a smaller run."""
    (line,) = [line for line in dry_run(f"ARGS={SMALL}").stdout.splitlines() if "examples/grpo_addition.py" in line]
    words = shlex.split(line)
    return [sys.executable, *words[next(at for at, word in enumerate(words) if word.endswith("/python")) + 1 :]]


@pytest.mark.parametrize("model", ["moe", "lora", "server"])
def test_make_has_settings_for_each_policy(model):
    settings = f"examples/grpo_addition_{model}.yaml"
    assert (ROOT / settings).is_file() and f"--config {settings}" in dry_run(f"MODEL={model}").stdout
    assert (
        "MODEL=lorra: the demo knows MODEL=dense, MODEL=moe, MODEL=lora and MODEL=server"
        in dry_run("MODEL=lorra").stderr
    )


def test_the_demos_server_has_the_flags_of_its_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_FP8_TRANSFER", str(tmp_path))
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    args = arguments(tmp_path / "run", vllm_mode="server", kv_cache_dtype="auto", per_device_train_batch_size=16)
    words = demo_server.serve_command(checkpoint, args, 8123)
    assert words[1:4] == ["-m", "trl_fp8.commands.cli", "serve"]
    vllm_words, _, text = serve_command(words[4:])
    expected = {"--max-model-len": "64", "--max-num-seqs": "16", "--kv-cache-dtype": "auto", SHARE: "0.3"}
    for flag, value in expected.items():
        assert vllm_words[vllm_words.index(flag) + 1] == value
    assert "--vllm_server_base_url http://127.0.0.1:8123" in text


@pytest.mark.parametrize(
    "number, raised",
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
    ids=["ctrl_c", "sigterm", "sighup"],
)
def test_the_demos_server_ends_with_its_run_also_at_a_signal(number, raised, tmp_path):
    usual = signal.getsignal(number)
    script = "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    script += "subprocess.Popen(['sleep', '1000']); print('up', flush=True); time.sleep(1000)"
    log = tmp_path / "log"
    with pytest.raises(raised), demo_server.running([sys.executable, "-c", script], log) as process:
        while "up" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert signal.getsignal(number) == usual
    assert not Path(f"/proc/{process.pid}").exists()
    end = time.monotonic() + 10  # a process that is killed may take a moment
    while time.monotonic() < end and living_in_group(process.pid):
        time.sleep(0.05)
    assert not living_in_group(process.pid)


def living_in_group(group: int) -> list[str]:
    """Return the states of the processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group_of, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended by now
            continue
        if int(group_of) == group and state != "Z":
            found.append(state)
    return found


@pytest.mark.engine
def test_the_demo_prints_what_it_has_to_say_and_nothing_else(tmp_path):
    tokenizer = addition_task.build_tokenizer()
    recipe = addition_task.PretrainRecipe()

    def untrained(folder: Path) -> None:
        addition_task.build_model(recipe, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    addition_task.publish(tmp_path / "trl-fp8" / addition_task.checkpoint_name(recipe), untrained)
    environment = alone("VLLM_LOGGING_LEVEL", "TQDM_DELAY") | {"PYTHONPATH": pythonpath()}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "MPLCONFIGDIR": matplotlib.get_cachedir()}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # trl-fp8 is on it
    words = [ROOT / word if word.startswith("examples/") else word for word in command()]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:]
    printed = done.stdout.splitlines()
    assert [line for line in printed if not any(re.fullmatch(known, line) for known in LINES)] == []
    assert len(printed) < 40 and [line for line in printed if len(line) > 80 and not line.startswith("warning")] == []
    assert [line.split()[0] for line in printed[-5:]] == ["accuracy", "mismatch", "FP8", "audits", "next"]
    summary = json.loads((tmp_path / "outputs" / "demo" / "summary.json").read_text())
    assert summary["steps"] == 12 and (tmp_path / "outputs" / "demo" / "report.png").exists()


def pythonpath() -> str:
    """Of this process: the demo is to run the package under test, also where another one is installed."""
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
