"""Tiny networks of types of models that see, images for them, and what their image processors make of these.

Widths and depths are small, and so are images. The processors are transformers' own, for Pillow, with the sizes of the
tiny towers. What stands for an image in a prompt is as many placeholders as its features have rows.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.image_utils import SizeDict
from transformers.models.auto import image_processing_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.idefics.processing_idefics import (
    image_attention_mask_for_packed_input_ids_pt,
    incremental_to_binary_attention_mask,
)
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from kvcellar.engine.models.input_limits import PLACEHOLDERS
from kvcellar.images.image import ImageArray, ImageInput
from tests.zoo_test_support.initialise import initialise
from tests.zoo_test_support.sweep import OWN as OWN_TEXT
from tests.zoo_test_support.sweep import ROPE
from tests.zoo_test_support.tiny import SMALL, class_of, over

TYPES = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
CONTEXT = 16384
PLACEHOLDER = 99  # first of the ids that special tokens get
START, END = 60, 59  # around an image, for configs that name such a token
CROSSED = {"cross_attention_mask", "image_attention_mask"}  # arguments of networks with cross-attention
_IMAGES = tuple(one for one in PLACEHOLDERS if "video" not in one)
_MAPPED: Mapping[str, Any] = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]

TEXT: dict[str, Any] = {
    **{name: size for name, size in SMALL.items() if not name.endswith("window_size")},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), CONTEXT),
    "rel_extent": CONTEXT,
}
DEPTHS: dict[str, Any] = dict.fromkeys(
    ("num_hidden_layers", "depth", "num_layers", "n_layer", "layers", "encoder_layers"), 2
)
TOWER: dict[str, Any] = {
    **DEPTHS,
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "width", "vision_width"), 64),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "ffn_dim", "ff_dim", "mlp_hidden_size"), 96),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "attention_heads", "num_key_value_heads"), 4),
    "encoder_attention_heads": 4,
    "head_dim": 16,
    "num_global_layers": 1,
    "num_experts": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
OUT = dict.fromkeys(  # widths of what projectors make
    (
        "out_hidden_size", "projection_dim", "output_dim", "text_hidden_size", "mm_embed_dim", "output_size",
        "projector_hidden_size", "embed_dim_out", "text_dim", "output_hidden_size", "vision_output_dim",
        "projector_output_dim", "out_dim",
    ),
    64,
)  # fmt: skip
TOWERS = (
    "vision",
    "visual",
    "image",
    "vit",
    "sam",
    "vq",
    "audio",
    "encoder_config",
    "clip",
    "siglip",
    "tower",
    "backbone",
)


def _sizes(image: int, patch: int) -> dict[str, Any]:
    return {"vision_config": {"image_size": image, "patch_size": patch}}


def _timm(architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"architecture": architecture, "model_args": sizes}


def _rope(*sections: int) -> dict[str, Any]:
    return ROPE | {"mrope_section": list(sections)}


VOCABULARY = {"<image>": PLACEHOLDER} | {
    f"IMGIMG{'ABC'[one // 10]}{'ABCDEFGHIJ'[one % 10]}Z": 30 + one for one in range(26)
}

KOSMOS = {"vocab_size": PLACEHOLDER + 1, "embed_dim": 64, "layers": 4}  # without a placeholder: the last token

# What a type needs beside small sizes: sizes that depend on each other, and ids.
OWN: dict[str, dict[str, Any]] = {
    "aria": _sizes(490, 70) | {"projector_patch_to_query_dict": {49: 8}},
    "aya_vision": _sizes(56, 14),
    "chameleon": {
        "vocabulary_map": VOCABULARY,
        "vq_config": {
            "num_embeddings": 26,
            "embed_dim": 32,
            "base_channels": 32,
            "latent_channels": 32,
            "resolution": 64,
        },
    },
    "cohere2_vision": _sizes(64, 16),
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _rope(4, 2, 2)}}},
    "cosmos3_edge": {"text_config": {"rope_parameters": _rope(2, 3, 3)}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        "vision_config": {
            "sam_config": {
                "hidden_size": 32,
                "mlp_dim": 32,
                "num_attention_heads": 2,
                "output_channels": 16,
                "downsample_channels": [16, 64],
                "global_attn_indexes": [],
            },
            "encoder_config": {
                "vocab_size": 101,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            },
        },
    },
    "deepseek_vl": _sizes(64, 16),
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2}},
    "deepseek_vl_hybrid": _sizes(64, 16)
    | {"high_res_vision_config": {"num_hidden_layers": 3, "global_attn_indexes": [1], "image_size": 128}},
    "emu3": {
        "vocabulary_map": {"<image>": PLACEHOLDER, "<|extra_200|>": 98}
        | {f"<|visual token {one:06}|>": 30 + one for one in range(26)},
        "vq_config": {"codebook_size": 26, "base_channels": 32, "hidden_size": 128},
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": _rope(3, 3, 2)}},
    "fast_vlm": {
        "vision_config": {"model_type": "timm_wrapper", "hidden_size": 256, "image_size": 64}
        | _timm("fastvit_mci3", layers=[2, 2, 2, 2, 2], embed_dims=[8, 16, 32, 64, 128])
    },
    "gemma3": _sizes(56, 14) | {"mm_tokens_per_image": 4},
    "fuyu": {"text_config": {"head_dim": 16}},
    "gemma4": {
        "audio_config": None,
        "text_config": {"use_bidirectional_attention": "vision"},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "position_embedding_size": 128,
        },
    },
    "gemma3n": {"vision_config": _timm("mobilenetv5_300m_enc", channel_multiplier=0.1) | {"hidden_size": 2048}},
    "gemma4_unified": {
        "text_config": {"sliding_window": 256},  # no less than an image has rows
        "vision_config": {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64},
    },
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16}},
    "git": _sizes(56, 14) | {"vocab_size": PLACEHOLDER + 1},
    "granite4_vision": {
        "vision_feature_select_strategy": "default",
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128]],
        "spatial_target_layers": [0, 1, 2, 3],
        "vision_feature_layer": -1,
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        **_sizes(64, 16),
    },
    "granite_docling": _sizes(64, 16),
    "hunyuan_vl": {"text_config": {"rope_parameters": _rope(2, 2, 2, 2)}},
    # Its config names no placeholder: a model needs this line in its config.json, and the id of its tokenizer.
    "idefics": _sizes(56, 14) | {"image_token_id": PLACEHOLDER, "cross_layer_interval": 2},
    "instructblipvideo": {"video_token_index": PLACEHOLDER},
    "idefics3": _sizes(56, 14) | {"scale_factor": 2},
    "kosmos-2": {"latent_query_num": 8, "text_config": KOSMOS} | _sizes(56, 14),
    "kosmos-2.5": {"latent_query_num": 8, "text_config": KOSMOS},
    "kimi_k25": {"projection_hidden_size": 64},
    "llama4": over(_sizes(56, 14), {"vision_config": {"intermediate_size": 256, "projector_input_dim": 64}}),
    "smolvlm": _sizes(64, 16) | {"scale_factor": 2},
    "llava_next": _sizes(56, 14) | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    "llava_next_video": _sizes(56, 14) | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    "llava_onevision": _sizes(56, 14) | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {"insert_layer_id": 0},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64}},
    "mllama": {
        "text_config": {"cross_attention_layers": [1, 3]},
        "vision_config": {
            "image_size": 56,
            "patch_size": 14,
            "attention_heads": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 192,
        },
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256, "audio_config": {"num_hidden_layers": 4}},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "vision_hidden_size": 64,
        "audio_config": None,
    },
    "perception_lm": {
        "vision_config": _timm(
            "vit_pe_core_large_patch14_336",
            embed_dim=64,
            depth=2,
            num_heads=4,
            img_size=[56, 56],
            ref_feat_shape=[4, 4],
            global_pool="",
            use_post_transformer_norm=False,
        )
        | {"model_type": "timm_wrapper", "image_size": 56}
    },
    "qwen2_5_omni_thinker": {"audio_start_token_id": 61},
    "qwen3_omni_moe_thinker": {"audio_start_token_id": 61},
    "shieldgemma2": _sizes(56, 14) | {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder": _sizes(56, 14) | {"mm_tokens_per_image": 4}},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "vipllava": {"vision_feature_layers": [-1, -2], "vision_config": {"num_hidden_layers": 3}},
}
WHOLE = frozenset({"paligemma"})  # all tokens of a prompt see each other: types of tokens are 1 behind it
ALIKE = {  # types without an image processor of their own
    "diffusion_gemma": "gemma4",
    "fast_vlm": "llava",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "instructblipvideo": "instructblip",
    "qwen2_5_omni_thinker": "qwen2_vl",
    "qwen3_omni_moe_thinker": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
}
AXES = (  # types with positions of several axes, whose sections have defaults for large heads only
    "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "minicpmv4_7", "paddleocr_vl",
    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker",
    "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
)  # fmt: skip
# Where the depth of the tower alone is small: its sizes depend on each other in ways that its config does not say.
DEEP: frozenset[str] = frozenset({"gemma4", "deepseek_ocr2"})


def config_of(model_type: str) -> PreTrainedConfig:
    kind = class_of(model_type)
    own = OWN.get(model_type, OWN_TEXT.get(model_type, {}))
    config = kind(**deepcopy(over(_small(kind, tower=False, top=True, deep=model_type in DEEP), own)))
    free = iter(range(PLACEHOLDER, 60, -1))
    for name in sorted({*dir(kind), *vars(config)}, key=lambda name: (name not in _IMAGES, name)):
        plain = name.startswith("_") or name in ("pad_token_id", "bos_token_id", "eos_token_id")
        if not plain and name.endswith(("_token_id", "_token_index", "_patch_id")):
            if isinstance(getattr(config, name, None), int) or name in _IMAGES:
                setattr(config, name, next(free))
    if model_type in AXES:
        config.vision_start_token_id = START
    _fit_ropes(config)
    return config


def _small(kind: type[PreTrainedConfig], *, tower: bool, top: bool, deep: bool) -> dict[str, Any]:
    lists = {
        one.name for one in fields(kind) if isinstance(one.default, list | tuple) or str(one.type).startswith("list")
    }
    names = {one.name for one in fields(kind)}
    tower_sizes: dict[str, Any] = DEPTHS if deep else TOWER
    table = tower_sizes | OUT if tower else TEXT
    found = {
        name: value for name, value in table.items() if name in names and (name not in lists or isinstance(value, list))
    }
    if not tower and "kv_lora_rank" in names and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if top:
        found |= {name: value for name, value in OUT.items() if name in names}
    for name, part in cast(dict[str, Any], kind.sub_configs).items():
        inside = tower or any(one in name for one in TOWERS)
        if part is not AutoConfig:
            found[name] = _small(part, tower=inside, top=False, deep=deep)
        elif (default := (kind.sub_configs_defaults or {}).get(name)) is not None:
            of = default.model_type
            found[name] = {"model_type": of} | _small(class_of(of), tower=inside, top=False, deep=deep)
    return found


def _fit_ropes(config: PreTrainedConfig) -> None:
    """Sections of axes that fill the small heads."""
    text = config.get_text_config(decoder=True)
    found = getattr(text, "rope_parameters", None)
    if not isinstance(found, dict):
        return
    for rope in [found] if "rope_type" in found else [one for one in found.values() if isinstance(one, dict)]:
        if config.model_type in AXES:
            rope.setdefault("mrope_section", [2, 3, 3])
        if "mrope_section" in rope:
            head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            half, count = int(head * rope.get("partial_rotary_factor", 1)) // 2, len(rope["mrope_section"])
            each = half // (2 * (count - 1))
            if sum(rope["mrope_section"]) != half:
                rope["mrope_section"] = [half - each * (count - 1), *[each] * (count - 1)]


def network_of(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = config_of(model_type)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    initialise(model, 0)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.do_sample = False
    return model if dtype == torch.float32 else model.to(dtype)  # which would make complex tables real


def image_processors(model_type: str) -> dict[str, str]:
    """Names of the classes of its image processor, for Pillow ("pil") and "torchvision"; empty: it has none."""
    entry = _MAPPED.get(ALIKE.get(model_type, model_type))
    return {"pil": entry} if isinstance(entry, str) else entry or {}


PROCESSORS: dict[str, dict[str, Any]] = {  # settings of image processors that are not sizes of a tower
    "chameleon": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    "deepseek_vl_hybrid": {"high_res_size": {"height": 128, "width": 128}},
    "dots3_note": {"temporal_patch_size": 1},
    "emu3": {"min_pixels": 64 * 64, "max_pixels": 96 * 64},
    "fuyu": {"size": {"height": 60, "width": 90}},
    "gemma4": {"max_soft_tokens": 70},
    "granite_docling": {"max_patches": 4},
    "mllama": {"size": SizeDict(height=56, width=56)},
    "kosmos-2.5": {"max_patches": 32},
}


def processor_of(config: PreTrainedConfig) -> Any:
    """Its image processor, with the sizes of its tower."""
    if not (names := image_processors(config.model_type)):
        raise LookupError("transformers maps no image processor to it")
    processor = getattr(transformers, names.get("pil") or names["torchvision"])()
    tower = getattr(config, "vision_config", None)
    for its, name in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("spatial_merge_size", "merge_size"),
    ):
        size = getattr(tower, its, None)
        size = size[-1] if isinstance(size, list | tuple) else size
        if isinstance(getattr(processor, name, None), int) and isinstance(size, int):
            setattr(processor, name, size)
    size = getattr(tower, "image_size", None)
    size = size[-1] if isinstance(size, list | tuple) else size
    if isinstance(size, int):
        _resize(processor, size)
    if pinpoints := getattr(config, "image_grid_pinpoints", None):
        processor.image_grid_pinpoints = pinpoints
    for name, value in PROCESSORS.get(config.model_type, {}).items():
        setattr(processor, name, value)
    return processor


FRAMES = 4  # of each video, as its processor says
IN_FRONT = ("git",)  # types that have an image in front of their text, without tokens
QUESTION = {"qformer_input_ids": [7, 8, 9]}  # what a tower reads beside pixels: its features are of both


def _resize(processor: Any, size: int) -> None:
    now = getattr(processor, "size", None)
    keys = set[str]() if now is None or isinstance(now, int) else set(dict(now))
    if isinstance(getattr(processor, "tile_size", None), int):
        processor.tile_size = size
    most = getattr(processor, "max_image_size", None)
    if isinstance(most, int):
        processor.max_image_size = size
    elif most and "longest_edge" in dict(most):
        processor.max_image_size, processor.size = {"longest_edge": size}, {"longest_edge": 2 * size}
        return
    if {"height", "width"} <= keys:
        processor.size = {"height": size, "width": size}
    elif "shortest_edge" in keys and getattr(processor, "crop_size", None):
        processor.size, processor.crop_size = {"shortest_edge": size}, {"height": size, "width": size}


def drawn(seed: int, height: int = 120, width: int = 200) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def image_input(model: PreTrainedModel, processor: Any, image: Image.Image) -> ImageInput:
    """What its processor makes of an image, with as many rows as its features have."""
    made = processor(images=[image], return_tensors="pt")
    if isinstance(made, torch.Tensor):
        made = {"pixel_values": made[None]}
    if "images" in made:  # which its processor cuts into patches
        patches = torch.as_tensor(processor.patchify_image(np.asarray(made["images"][0][0])))
        made = {"pixel_values": patches.flatten(0, -2)}
    made.pop("attention_mask", None)  # of patches
    features = _features_of(model)
    if getattr(features, "__name__", "") == "get_video_features":
        made["pixel_values"] = made["pixel_values"][:, None].repeat(1, FRAMES, 1, 1, 1)  # a video that stands still
    accepted = inspect.signature(model.forward).parameters
    tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor) and name in accepted}
    tensors |= {name: torch.tensor([ids]) for name, ids in QUESTION.items() if name in accepted}
    arrays = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    rows = 1 if accepted.keys() & CROSSED else getattr(model.config, "latent_query_num", None)
    if rows is None and model.config.model_type in IN_FRONT:
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([[5]]), pixel_values=arrays["pixel_values"]).logits.shape[1] - 1
    if rows is None and features is None:
        raise LookupError("its network has no get_image_features")
    if rows is None:
        names = inspect.signature(features).parameters
        given = {
            name: value.to(model.dtype) if value.is_floating_point() else value
            for name, value in arrays.items()
            if name in names
        }
        with torch.inference_mode():
            rows = _rows(features(**given))
    kept = tuple(
        ImageArray(
            name,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            memoryview(value.contiguous().numpy().tobytes()),
        )
        for name, value in arrays.items()
    )
    digest = hashlib.sha256(image.tobytes() + repr(QUESTION).encode()).digest()
    return ImageInput(digest, rows, kept)


def _features_of(model: Any) -> Any:
    """Its method that makes features; None: it has none."""
    inner = getattr(model, "model", None)
    for name in ("get_image_features", "get_video_features"):
        for owner in (getattr(inner, "model", None), inner, model):
            if hasattr(owner, name):
                return getattr(owner, name)
    return None


def seen_by(model: PreTrainedModel, ids: list[int], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which images each token sees by cross-attention, by the functions of the type's processor. For a text alone, some
    processors have an image that no token sees."""
    accepted = inspect.signature(model.forward).parameters
    if "image_attention_mask" in accepted and not inputs:
        size: Any = model.config.vision_config.image_size
        return {
            "pixel_values": torch.zeros(1, 1, 3, size, size, dtype=model.dtype),
            "image_attention_mask": torch.zeros(1, len(ids), 1, dtype=torch.bool),
        }
    if not accepted.keys() & CROSSED or not inputs:
        return {}
    if "image_attention_mask" in accepted:
        tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: PLACEHOLDER, eos_token_id=-1)
        seen, _ = image_attention_mask_for_packed_input_ids_pt(torch.tensor([ids]), tokenizer)
        count = inputs["pixel_values"].shape[1]
        return {"image_attention_mask": incremental_to_binary_attention_mask(seen, "pt", num_classes=count)}
    tiles = inputs["aspect_ratio_mask"].flatten(0, 1)
    made = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(ids, PLACEHOLDER)], [tiles.sum(-1).tolist()], tiles.shape[-1], len(ids)
    )
    return {"cross_attention_mask": torch.tensor(made)}


def _rows(made: Any) -> int:
    found = getattr(made, "pooler_output", made)
    found = made.last_hidden_state if found is None else found
    found = made.deepstack_features[0][1] if found is None else found
    return sum(one.numel() // one.shape[-1] for one in (found if isinstance(found, list | tuple) else [found]))


def inputs_of(images: Sequence[ImageInput], axis: int = 0) -> dict[str, torch.Tensor]:
    """As the network's own forward gets them, with those of several images along `axis`."""
    names = [one.name for one in images[0].arrays] if images else []
    several = {name: [torch.tensor(one.arrays[at].array()) for one in images] for at, name in enumerate(names)}
    in_a_row = "target_sizes" in several  # all patches of all images are one row
    return {
        name: torch.cat(each, -1 if in_a_row and each[0].is_floating_point() else axis)
        for name, each in several.items()
    }
