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
# The first digit of a turn calls a tool with it, so that a random model calls tools, but not in every turn.
PRESS = {"type": "function", "function": {"name": "press", "arguments": {"key": "{digit}"}}}
CALLS = {"open_pattern": "(?P<digit>[0-9])", "repeats": True, "content": "text", "transform": PRESS}
DIGITS_CALL = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {"tool_calls": CALLS, "content": {"close": "<eos>", "content": "text"}},
}


def chats():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in dataset()])


def chat_tokenizer():
    made = tokenizer()
    made.chat_template, made.response_template = ROLES, DIGITS_CALL
    return made


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
