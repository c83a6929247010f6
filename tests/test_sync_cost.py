"""The count of what a sync costs on a GPU, and the page that shows it."""

import json
import os
import sys
from pathlib import Path

import pytest

from gpu import sync_cost
from gpu.dry_run import SHAPES
from gpu.sync_cost import CHECK, TRL
from testing.processes import fork


ROOT = Path(__file__).parents[1]
EIGHT_B = SHAPES["Qwen3-8B"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Part -> launches by name and bytes, of a BF16 policy of 8 B; and what was printed."""
    folder = tmp_path_factory.mktemp("cost")

    def count() -> None:
        sys.argv = ["gpu.sync_cost", "--models", "Qwen3-8B", "--json", str(folder / "found.json")]
        sync_cost.main()

    _, status = os.waitpid(fork(count, folder / "log"), 0)
    printed = (folder / "log").read_text()
    assert status == 0, printed[-3000:]
    return json.loads((folder / "found.json").read_text())["Qwen3-8B"]["bfloat16"], printed


def sizes():
    """Elements of all linears but the output head, and of all other tensors."""
    hidden, inner, head = EIGHT_B["hidden_size"], EIGHT_B["intermediate_size"], EIGHT_B["head_dim"]
    attention = head * (2 * EIGHT_B["num_attention_heads"] + 2 * EIGHT_B["num_key_value_heads"]) * hidden
    linears = attention + 3 * hidden * inner
    others = 2 * EIGHT_B["vocab_size"] * hidden + hidden + EIGHT_B["num_hidden_layers"] * 2 * (hidden + head)
    return linears * EIGHT_B["num_hidden_layers"], others


def test_a_sync_of_8_b_stays_within_its_launches_and_bytes(counted):
    parts, _ = counted
    ours = {part: cost for part, cost in parts.items() if part not in (CHECK, TRL)}
    assert sum(sum(cost["launches"].values()) for cost in ours.values()) <= 1000
    assert sum(cost["bytes"] for cost in ours.values()) <= 45e9
    assert sum(parts[TRL]["launches"].values()) >= 399  # a copy of each parameter


def test_bytes_are_those_of_the_shapes(counted):
    """Within what is counted besides: tables, sums, norms."""
    parts, _ = counted
    linears, others = sizes()
    scales = 4 * linears // 128**2
    expected = {
        "FP8 weights: quantized, written, summed up": 3 * linears + scales,
        "other tensors: written": 4 * others,
        "other tensors: summed up": 2 * others,
        "what is held: summed up, compared": linears + scales + 2 * others,
        CHECK: linears + scales + 2 * others,
        TRL: 4 * (linears + others),
    }
    for part, size in expected.items():
        assert size <= parts[part]["bytes"] <= 1.001 * size, part


def test_each_weight_is_quantized_once_and_what_is_held_read_in_one_launch(counted):
    parts, _ = counted
    assert parts["FP8 weights: quantized, written, summed up"]["launches"] == {"_quantize": 7 * 36, "zeros": 1}
    for part, copies in (("what is held: summed up, compared", 1), (CHECK, 2)):  # the check reads KV scales, too
        launches = parts[part]["launches"]
        assert (launches["_sum_entries"], launches["copy to the host"]) == (1, copies)


def test_the_page_shows_what_is_counted(counted):
    _, printed = counted
    table = printed[printed.index("| Qwen3-8B |") :].strip()
    assert table.count("\n") >= 10 and table in (ROOT / "docs" / "performance.md").read_text()
