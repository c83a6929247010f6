"""Write docs/configuration.md from the flags' own help texts, or with --check compare it with them.

python docs/generate_configuration.py [--check]
"""

import dataclasses
import re
import sys
from pathlib import Path

from trl import GRPOConfig

from trl_fp8 import FP8GRPOConfig


PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

`FP8GRPOConfig` takes every field of [`trl.GRPOConfig`](https://huggingface.co/docs/trl/v1.16.0/grpo_trainer) and the
ones below. All of them work from Python, from the command line (`--kv_cache_dtype auto`) and from a YAML file given to
`TrlParser` (`--config run.yaml`). This page is generated from `src/trl_fp8/config.py` and `src/trl_fp8/flags` by `make docs`.

| flag | type | default | what it does |
|---|---|---|---|
"""  # noqa: E501
TAIL = """
A wrong value, or one that does not go with another, raises a `ValueError` that names the flag, its value, the reason and
what to set instead. With `fp8_weights=False` and `kv_cache_dtype="auto"` the trainer is TRL's `GRPOTrainer`, bit for bit
(`tests/trainer/test_trainer.py`), and nothing of TRL's is refused.
"""  # noqa: E501


def page() -> str:
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    rows = []
    for field in dataclasses.fields(FP8GRPOConfig):
        if field.name in theirs and field.default == theirs[field.name]:
            continue
        kind = field.type if isinstance(field.type, str) else str(getattr(field.type, "__name__", field.type))
        text = field.metadata["help"].replace("|", "\\|")
        text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
        rows.append(f"| `{field.name}` | `{kind.replace('|', 'or')}` | `{field.default!r}` | {text} |")
    return HEAD + "\n".join(rows) + "\n" + TAIL


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    sys.stderr.write("docs/configuration.md differs from the flags' help texts: run `make docs`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
