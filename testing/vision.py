"""Tiny vision-language checkpoints with processors text_tokenizer in code, and prompts with generated images."""

from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    PixtralImageProcessorPil,
    PixtralProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from . import other_models
from .tokenizer import tokenizer


CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
_MISTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
_WRITING = ("o_proj.weight", "linear_attn.out_proj.weight", "down_proj.weight", "experts.down_proj")  # to the residual
PIXELS = 32  # height and width of what a tower sees


def _tokenizer(tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    text_tokenizer = tokenizer(max_length=256)
    return PreTrainedTokenizerFast(
        tokenizer_object=text_tokenizer.backend_tokenizer,
        extra_special_tokens=tokens,
        **{name: getattr(text_tokenizer, name) for name in ("pad_token", "bos_token", "eos_token", "unk_token")},
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def processor(model_type: str) -> ProcessorMixin:
    """Return TRL's `processing_class`; Qwen's needs torchvision."""
    if model_type == "gemma3":
        text_tokenizer = _tokenizer(_GEMMA_TOKENS)
        text_tokenizer.add_tokens(["\n" * count for count in (2, 3, 4)])  # which vLLM's class asks for
        images = Gemma3ImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
        chat = CHAT.replace("IMAGE", text_tokenizer.boi_token)
        return Gemma3Processor(images, text_tokenizer, chat_template=chat, image_seq_length=4)
    if model_type == "mistral3":
        text_tokenizer = _tokenizer(_MISTRAL_TOKENS)
        images = PixtralImageProcessorPil(size={"longest_edge": PIXELS}, patch_size=8)
        chat = CHAT.replace("IMAGE", text_tokenizer.image_token)
        return PixtralProcessor(images, text_tokenizer, patch_size=8, spatial_merge_size=2, chat_template=chat)
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    text_tokenizer = _tokenizer(_QWEN_TOKENS)
    earlier = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
    kind = earlier.get(model_type, Qwen3VLProcessor)
    sizes = {"patch_size": 8, "min_pixels": 16 * 16, "max_pixels": PIXELS * PIXELS}
    videos = (Qwen2VLVideoProcessor if model_type in earlier else Qwen3VLVideoProcessor)(patch_size=8)
    chat = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return kind(Qwen2VLImageProcessor(**sizes), text_tokenizer, videos, chat_template=chat)


def build(model_type: str, processing: ProcessorMixin, **text) -> PreTrainedModel:
    """Return a model of `other_models` with the vocabulary and special tokens of `processing`."""
    text_tokenizer = processing.tokenizer
    ids = {"image_token_id": text_tokenizer.convert_tokens_to_ids(text_tokenizer.image_token)}
    if model_type in QWEN:
        names = ("video_token", "vision_start_token", "vision_end_token")
        ids |= {f"{name}_id": text_tokenizer.convert_tokens_to_ids(_QWEN_TOKENS[name]) for name in names}
    if model_type == "gemma3":
        ids |= {
            f"{name}_token_index": text_tokenizer.convert_tokens_to_ids(_GEMMA_TOKENS[f"{name}_token"])
            for name in ("boi", "eoi")
        }
        ids |= {"image_token_index": ids.pop("image_token_id"), "mm_tokens_per_image": 4}
    if model_type == "mistral3":
        ids = {"image_token_index": ids["image_token_id"]}
    config = other_models.config(model_type, **ids)
    config.text_config.vocab_size = len(text_tokenizer)
    config.initializer_range = config.text_config.initializer_range = config.vision_config.initializer_range = 0.08
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "mm_input_projection_weight")):  # zero, which would hide much
                torch.nn.init.normal_(parameter, std=0.1)
            if ".language_model." in name and name.endswith(_WRITING):
                parameter[..., 0, :] = 0
        # So one channel stays as it was embedded, and keeps tokens from being sampled that there would be no image to
        tokens = {"gemma3": _GEMMA_TOKENS, "mistral3": _MISTRAL_TOKENS}.get(model_type, _QWEN_TOKENS)
        never = [text_tokenizer.convert_tokens_to_ids(token) for token in tokens.values()]
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if head is embeddings:
            embeddings *= 0.5  # else a token is followed by itself
        embeddings[:, 0] = 1 / getattr(model.get_input_embeddings(), "scalar_embed_scale", 1)
        head[never, 0] = -8
    model.config.architectures = [type(model).__name__]
    return model


def save_checkpoint(folder: Path, model_type: str) -> str:
    """Write a BF16 checkpoint and its processor; returns the folder as a string."""
    processing = processor(model_type)
    build(model_type, processing).bfloat16().save_pretrained(folder)
    processing.save_pretrained(folder)
    return str(folder)


def picture(number: int) -> Image.Image:
    """Draw a gradient whose color follows `number`."""
    size = (PIXELS, PIXELS - 16 * (number % 2))
    image = Image.new("RGB", size)
    places = [(x, y) for y in range(size[1]) for x in range(size[0])]
    image.putdata([(7 * x % 256, (5 * y + 40 * number) % 256, 30 * number % 256) for x, y in places])
    return image


def dataset(rows: int = 16) -> Dataset:
    """Return conversational prompts with one image each, as TRL wants them."""
    prompts = [[{"role": "user", "content": f"{10 + 7 * row % 89}+{10 ** (row % 3)}="}] for row in range(rows)]
    return Dataset.from_list([{"prompt": prompt, "image": picture(row)} for row, prompt in enumerate(prompts)])


def reward_digits(completions, **kwargs):
    """Return the reward of `runs` for conversations."""
    return [sum(c.isdigit() for c in messages[0]["content"]) / 8 for messages in completions]
