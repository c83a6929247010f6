"""The processor of a vision-language policy, as TRL 1.16 tokenizes with it: prompts of many lengths at once, as lists.

Some, as Mistral 3's, make one tensor of them unless they are told otherwise, and TRL has no way to say so.
"""

from transformers import PreTrainedTokenizerBase, ProcessorMixin


def make_lists(processor: ProcessorMixin | PreTrainedTokenizerBase) -> None:
    """From now on `processor` makes a tensor of several prompts only where it is asked for one."""
    options = getattr(processor, "valid_processor_kwargs", None)
    defaults = getattr(options, "_defaults", {})
    if "return_tensors" not in (common := defaults.get("common_kwargs", {})):
        return

    class Lists(options, total=False):
        _defaults = defaults | {"common_kwargs": {k: v for k, v in common.items() if k != "return_tensors"}}

    processor.valid_processor_kwargs = Lists
