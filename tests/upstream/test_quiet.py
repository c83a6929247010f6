"""What is left out of the console is what is named, and for as long as our own code runs, unless all was asked for."""

import logging
import re
import subprocess
import sys
import warnings

import pytest

from testing.processes import alone
from trl_fp8.commands.cli import main
from trl_fp8.upstream.quiet import LOGGED, WARNED, without_noise
from trl_fp8.upstream.versions import VERSIONS


# As these libraries print them: logger or category, text
SEEN = (
    ("torchao", "Failed to load /x/torchao/_C_cutlass_90a.abi3.so: Could not load this library: /x.so"),
    (
        "torch.utils._pytree",
        "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by torch.compile as an opaque "
        "value type. Calling register_constant() on Enum subclasses is deprecated and will be an error.",
    ),
    (
        "vllm.triton_utils.importing",
        "Triton is installed, but `triton.backends` could not be imported. Disabling Triton.",
    ),
    ("matplotlib.font_manager", "Matplotlib is building the font cache; this may take a moment."),
    ("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."),
    (FutureWarning, "`torch.distributed.reduce_op` is deprecated, please use `torch.distributed.ReduceOp` instead"),
    (
        UserWarning,
        f"TRL currently supports vLLM versions from 0.22.0 to 0.31.0. You have version {[*VERSIONS][-1]}.0 installed.",
    ),
)
PROGRAM = """
import logging, os, sys, warnings

def state():
    loggers = [one for one in (*logging.root.manager.loggerDict.values(), logging.root) if hasattr(one, "filters")]
    changed = [one.name for one in loggers if one.filters or one.handlers or one.disabled]
    return list(warnings.filters), changed, logging.root.level, dict(os.environ), sys.stdout, sys.stderr

before = state()
import trl_fp8.commands.cli, trl_fp8.commands.train, trl_fp8.scripts.grpo
from trl_fp8.commands.cli import main
from trl_fp8.upstream.quiet import quiet
assert state() == before
quiet()
for where, text in SEEN:
    for sent in text, "other " + text:
        if isinstance(where, str):
            logging.getLogger(where).warning(sent)
        else:
            warnings.warn(sent, where)
logging.getLogger("vllm.other").warning(SEEN[2][1])
"""


def test_only_named_messages_are_hidden():
    seen = "(" + "".join(f"({where if isinstance(where, type) else where!r}, {text!r})," for where, text in SEEN) + ")"
    for category in FutureWarning, UserWarning:
        seen = seen.replace(repr(category), category.__name__)
    program = f"SEEN = {seen}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=alone())
    assert done.returncode == 0 and done.stdout == "", done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  warnings.warn")]
    for (_, text), line in zip(SEEN, lines, strict=False):
        assert line.endswith(f"other {text}")
    assert lines[len(SEEN) :] == [SEEN[2][1]]  # of another logger


OWN_SCRIPT = """
import logging, warnings

from trl_fp8 import FP8GRPOConfig, FP8GRPOTrainer
assert not [each for each in warnings.filters if each[1] is not None and "reduce_op" in each[1].pattern]
for name in ("torchao", "torch.utils._pytree", "DeepSpeed"):
    assert not logging.getLogger(name).filters
logging.getLogger("torchao").warning("Failed to load /x.so: said after the import")
"""


def test_a_users_own_script_prints_no_foreign_noise():
    done = subprocess.run([sys.executable, "-c", OWN_SCRIPT], capture_output=True, text=True, env=alone())
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and line.endswith("said after the import")


@pytest.mark.parametrize("verbose", ["", "0", "1"])
def test_noise_comes_through_if_it_is_asked_for(verbose, monkeypatch):
    monkeypatch.setenv("TRL_FP8_VERBOSE", verbose)
    logger, before = logging.getLogger("torchao"), list(warnings.filters)
    monkeypatch.setattr(logger, "filters", [])  # a command of ours that ran in this process left them
    record = logger.makeRecord("torchao", logging.WARNING, "", 0, SEEN[0][1], (), None)
    with without_noise():
        assert bool(logger.filter(record)) == (verbose == "1")
    assert logger.filter(record) and set(warnings.filters) == set(before)


def test_every_entry_is_for_a_message_that_was_seen():
    for noise in LOGGED + WARNED:
        assert [text for where, text in SEEN if where == noise.where and re.match(noise.text, text)], noise


def test_commands_print_what_they_have_to_say_and_nothing_else(checkpoint, tmp_path, capsys):
    model, exported = checkpoint("qwen3"), tmp_path / "fp8"
    capsys.readouterr()  # making the checkpoint is no command
    assert main(["export", model, str(exported)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("FP8 plan for ") and out.endswith(f"\n\nwritten: {exported}\n")
    for word, said in (
        ("plan", r".*: .* parameters, .*\n(.|\n)*"),
        ("verify", r".*: \d+ files are what was exported\n"),
    ):
        command = [sys.executable, "-m", "trl_fp8.commands.cli", word, str(exported)]
        done = subprocess.run(command, capture_output=True, text=True, env=alone())
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(said, done.stdout), done.stdout
