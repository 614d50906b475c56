"""The network that sees, as transformers has it: a SigLIP tower and a Llama, joined by a projector (Llava); its
tokenizer, its chat template and the settings of its processor."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText

from ..export import write_json
from ..network import Weights
from .talk import everything_said

SIDE, PATCH = 48, 8  # pixels
ROWS = (SIDE // PATCH) ** 2
CONTEXT = 1024
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>")
PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, IMAGE = range(len(SPECIALS))
VOCABULARY = 512

# Append-only: a message adds to what stands before it and never changes it.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{{- '<|image|>' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def hf_config() -> Any:
    text = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    tower = {
        "model_type": "siglip_vision_model",
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vision_use_head": False,
    }
    return AutoConfig.for_model(
        "llava",
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE,
        image_seq_length=ROWS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        eos_token_id=END,
        bos_token_id=BEGIN,
        pad_token_id=PAD,
    )


def initial_model(seed: int) -> Any:
    """Float32, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(hf_config(), dtype=torch.float32)
    return model.train()


def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE: it keeps every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(one, normalized=False, special=True) for one in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(everything_said(), trainer)
    return tokenizer


def write_files(folder: Path, weights: Weights) -> None:
    """All that a loader reads, weights in bfloat16."""
    model = initial_model(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights.get(name, weight))
    model.generation_config.update(do_sample=False, eos_token_id=END, bos_token_id=BEGIN, pad_token_id=PAD)
    model.to(torch.bfloat16).save_pretrained(folder)
    trained_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", _tokenizer_config())
    write_json(folder / "processor_config.json", _processor_config())
    write_json(folder / "preprocessor_config.json", _image_processor_config())


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD],
        "bos_token": SPECIALS[BEGIN],
        "eos_token": SPECIALS[END],
        "extra_special_tokens": {"image_token": SPECIALS[IMAGE]},
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }


def _processor_config() -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "image_token": SPECIALS[IMAGE],
        "num_additional_image_tokens": 0,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "full",
    }


def _image_processor_config() -> dict[str, Any]:
    half = [0.5, 0.5, 0.5]
    return {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "image_mean": half,
        "image_std": half,
        "do_convert_rgb": True,
    }
