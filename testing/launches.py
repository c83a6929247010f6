"""`trl-fp8 train` up to `accelerate launch`, with a row of each dataset in place of what would come from the Hub."""

from argparse import Namespace

import accelerate.commands.launch
import datasets
from huggingface_hub import HfApi
from pytest import MonkeyPatch

from trl_fp8.commands.cli import main


TEXT, MESSAGES = "What is 1+1?", [{"role": "user", "content": "What is 1+1?"}]
ROWS = {  # dataset and configuration -> the columns that its page shows
    ("DigitalLearningGmbH/MATH-lighteval", None): {"problem": TEXT, "level": "1", "solution": "2", "type": "Algebra"},
    ("open-r1/DAPO-Math-17k-Processed", "en"): {"prompt": TEXT, "solution": "2", "ability": "math"},
    ("openai/gsm8k", "main"): {"question": TEXT, "answer": "1+1=2\n#### 2"},
    ("trl-lib/DeepMath-103K", None): {"prompt": MESSAGES, "solution": "2"},
}


def launched(monkeypatch: MonkeyPatch, *words: object) -> Namespace:
    """Return the arguments that `trl-fp8 train` passes to `accelerate launch`."""
    started = []
    monkeypatch.setattr(accelerate.commands.launch, "launch_command", started.append)
    assert main(["train", *map(str, words)]) == 0
    (args,) = started
    return args


def without_hub(monkeypatch: MonkeyPatch) -> None:
    """Let every repository exist, and the datasets of ROWS load without a Hub."""

    def load_dataset(path, name=None, streaming=False):
        return datasets.DatasetDict(train=datasets.Dataset.from_list([ROWS[path, name]]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(HfApi, "repo_exists", lambda self, name, **options: True)
