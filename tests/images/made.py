"""Files of processors: a small tokenizer with the tokens of images, and settings of an image processor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAMED = {  # attributes of tokenizers that processors read
    "image_token": "<image>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_break_token": "<|image_break|>",
    "image_thumbnail": "<|image_thumbnail|>",
    "img_break_token": "[IMG_BREAK]",
    "image_wrapper_token": "<wrap>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
MORE = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<fake_token_around_image>",
    "<global-img>",
    "[IMG]",
    "[IMG_END]",
    "<|image|>",
)
MORE += ("<|img|>", "<|IMG_PATCH|>", "<|begin_of_image|>", "<|end_of_image|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>")


def write_tokenizer(folder: Path, named: Mapping[str, str] = NAMED, **more: Any) -> dict[str, int]:
    """A tokenizer of bytes with these tokens; their ids."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = list(dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *named.values(), *MORE]))
    vocab = {token: index for index, token in enumerate([*special, *chars])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 100_000,
        "extra_special_tokens": dict(named),
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {token: vocab[token] for token in special}


def write_processor(folder: Path, model_type: str, processor: Mapping[str, Any], image: Mapping[str, Any]) -> None:
    """The settings of a processor and of its image processor, as models have them."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
