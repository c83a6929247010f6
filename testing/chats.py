"""Chats, a template for them, and a tool to call, for models that write random characters."""

from datasets import Dataset

from .runs import dataset
from .tokenizer import tokenizer


# Names roles, ends assistant turns and renders calls, which TRL asks of a chat template for tools.
ROLES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments }}>{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PRESS = {"type": "function", "function": {"name": "press", "arguments": {"key": "{key}"}}}


def chats():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in dataset()])


def chat_tokenizer(calls: str = "[0-9]"):
    """Return a tokenizer whose chats call a tool with the first of `calls` in a turn. With digits
    a random model calls one, but not in every turn.
    """
    processing = tokenizer()
    tool_calls = {"open_pattern": f"(?P<key>{calls})", "repeats": True, "content": "text", "transform": PRESS}
    processing.chat_template = ROLES
    processing.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant:",
        "fields": {"tool_calls": tool_calls, "content": {"close": "<eos>", "content": "text"}},
    }
    return processing


class Keypad:
    """An environment with one tool, which owns the reward."""

    def reset(self, **kwargs):
        return None

    def press(self, key: str) -> str:
        """Press a key.

        Args:
            key: The key.
        """
        return f"key {key}"

    def get_reward(self) -> float:
        return 1.0


def turns(completions, **kwargs):
    return [float(len(messages)) for messages in completions]
