"""A directory of a whole model that takes images: a tiny network with random weights, a tokenizer of bytes, a processor
and a chat template."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.zoo_test_support.initialise import initialise

from .made import write_processor, write_tokenizer

TEMPLATE = """\
{% for message in messages %}<s>{{ message['role'] }}:{% if message['content'] is string %}{{ message['content'] }}\
{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}\
{% endif %}{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"""
SIDE, PATCH = 56, 14
ROWS = (SIDE // PATCH) ** 2


def write_model(folder: Path) -> None:
    """A Llava. The logits of a text depend on all of it."""
    ids = write_tokenizer(folder, chat_template=TEMPLATE)
    processor = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "num_additional_image_tokens": 1}
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}}
    write_processor(
        folder,
        "llava",
        processor | {"vision_feature_select_strategy": "default"},
        image | {"crop_size": {"height": SIDE, "width": SIDE}},
    )
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 4096, **small}
    tower = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, "projection_dim": 32, **small}
    config = AutoConfig.for_model(
        "llava",
        text_config=text,
        vision_config=tower,
        image_token_id=ids["<image>"],
        vision_feature_layer=-1,
        eos_token_id=ids["</s>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    initialise(model, 0)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
