"""Types of models that see: whole engines draw the tokens of the networks' own forward, with images and without."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.errors import ModelRefused
from kvcellar.images.image import ImageInput
from tests.images.packages import PACKAGES, environment
from tests.images.seeing import Pictures, engine_of, images_in, pictures_of, submitted

QUICK = (
    "llava", "gemma3", "git", "qwen2_vl", "qwen3_vl", "lfm3_vl", "idefics3", "kosmos-2", "mistral3", "vipllava",
    "mllama", "idefics",
)  # fmt: skip
SLOW = (
    "aria", "aya_vision", "chameleon", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
    "deepseek_vl", "deepseek_vl_hybrid", "dots3_note", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fuyu", "gemma4",
    "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "got_ocr2", "granite4_vision", "granite_docling",
    "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "internvl", "janus", "lighton_ocr", "llava_next",
    "llava_next_video", "llava_onevision", "minicpmv4_6", "minicpmv4_7", "mistral_large4", "ovis2", "paddleocr_vl",
    "paligemma", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen4_exp", "smolvlm", "video_llama_3", "video_llava",
    "blip-2", "instructblip", "instructblipvideo", "kosmos-2.5",
)  # fmt: skip
MORE = (  # of networks or image processors that need the packages in `PACKAGES`
    "cohere2_vision", "fast_vlm", "gemma3n", "gemma4_unified", "inkling2", "inkling_mm_model", "kimi_k25", "lfm2_vl",
    "llama4", "minicpm_ocr", "minimax_m3_vl", "muse_glimmer", "muse_spark", "nemotron_h_omni",
    "perception_lm", "step3p7",
)  # fmt: skip
TYPES = [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]


def _mixed(pictures: Pictures) -> list[list[list[int] | ImageInput]]:
    one, two = pictures.one, pictures.two
    before, between, after = [5, 6, 7, 8, 31], [9, 10, 11], [12, 13, 14, 15]
    if pictures.in_front:  # its own forward puts one image before all text
        return [[one, after], [two, [*between, *after]], [*[before, between, after]]]
    return [
        [one, after],
        [before, one],
        [before, one, between, two, after],
        [before, one, between, one, after],
        [*[before, between, after]],
    ]


def check(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, in one batch with text alone, with two completions, and again from memory."""
    pictures = pictures_of(model_type)
    prompts = _mixed(pictures)
    expected = [pictures.greedy(*parts) for parts in prompts]
    most = max(len(pictures.ids(parts)) for parts in prompts) if pictures.whole else max(16, pictures.one.rows + 3)
    with engine_of(pictures, tmp_path, monkeypatch, step_tokens=most) as engine:
        if engine._built.guest.vision is None:
            raise ModelRefused(engine._built.guest.not_seeing)
        asked = [(pictures.prompt(*parts), images_in(parts)) for parts in prompts]
        cold = [one.result() for one in [submitted(engine, *one, n=2) for one in asked]]
        for result, tokens in zip(cold, expected, strict=True):
            assert [list(choice.token_ids) for choice in result.choices] == [tokens, tokens]
        seeing = engine._built.loop.manager.seeing
        assert seeing is not None
        assert seeing.encoded == 2
        engine._built.loop.call(engine._built.loop.check)
        warm = [one.result() for one in [submitted(engine, *one, n=2) for one in asked]]
        for first, second, (ids, _), parts in zip(cold, warm, asked, prompts, strict=True):
            last = parts[-1]  # an image that sees ahead is computed whole
            kept = last.rows if isinstance(last, ImageInput) and engine._built.guest.ahead else 1
            kept = len(ids) if pictures.whole else kept
            assert second.usage.cached_tokens >= len(ids) - kept
            assert [one.token_ids for one in second.choices] == [one.token_ids for one in first.choices]
            for one, other in zip(first.choices, second.choices, strict=True):
                assert one.logprobs is not None
                assert other.logprobs is not None
                wanted = [each.logprob for each in one.logprobs]
                assert [each.logprob for each in other.logprobs] == pytest.approx(wanted, abs=1e-4)
        assert seeing.encoded == 2


@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_text_is_that_of_the_own_forward(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(model_type, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="torchvision, timm and scipy are not there: `make .venv/.dev`")
@pytest.mark.parametrize("model_type", MORE)
def test_types_that_need_more_packages(model_type: str) -> None:
    """In a process that has them."""
    code = f"from scripts.images_section import check_type; print(check_type({model_type!r}))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=True)
    assert run.stdout.splitlines()[-1].startswith(f"| {model_type} | yes |")
