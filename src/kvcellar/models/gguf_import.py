"""gguf_import: a GGUF file as a model directory: safetensors, config, tokenizer and chat template.

The file is not trusted (`gguf_file.py`). Tensors are decoded to bfloat16 one at a time, and of each only a part in
float32; weights of some types keep their codes (`gguf_codes.py`).
"""

import json
from pathlib import Path
from typing import Any

from kvcellar.models.gguf_codes import bits_of, coded, modules_of
from kvcellar.models.gguf_codes import entries as entries_of
from kvcellar.models.gguf_decode import Tensors
from kvcellar.models.gguf_file import Header, read_header
from kvcellar.models.gguf_models import imported, with_factors
from kvcellar.models.gguf_tokenizer import write_tokenizer
from kvcellar.models.hf_logging import silence_transformers
from kvcellar.models.quantize.described import with_codes
from kvcellar.models.quantize.tensor_file import Entry, tensor_file
from kvcellar.progress import report

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # of `general.sampling`


def import_gguf(file: Path, into: Path, *, codes: bool = True) -> None:
    """Write the model of a GGUF file into a directory, which is made. Without `codes` all weights are decoded.

    Raises `ModelRefused`, before any tensor is read where the architecture, a type, a field or a tensor is not
    supported, and `OSError`. What is in the directory then is of no use.
    """
    header = read_header(file)
    found = imported(header)
    into.mkdir(exist_ok=True)
    with silence_transformers():
        write_tokenizer(header, into)
    modules = modules_of(found.parts) if codes else {}
    kept = {part.name: bits for part in found.parts if codes and (bits := bits_of(part)) is not None}
    entries: dict[str, Entry] = {}
    for part in found.parts:
        own = {part.name: Entry("BF16", part.shape)}
        entries |= entries_of(part, kept[part.name]) if part.name in kept else own
    with Tensors(file) as tensors, tensor_file(into / "model.safetensors", entries) as written:
        config = found.config
        if found.factors is not None:
            config = with_factors(config, tensors.read_whole(found.factors).reshape(-1).tolist(), header.name)
        _write_json(into / "config.json", with_codes(config, modules))
        _write_json(into / "generation_config.json", _generation(header, config))
        for done, part in enumerate(found.parts):
            report("converting weights", done, len(found.parts))
            if part.name in kept:
                for name, tensor in coded(part, kept[part.name], tensors.read_blocks(part.stored)):
                    written.put(name, tensor)
                continue
            values = tensors.read(part.stored, part.change)
            written.put(part.name, (values if part.order is None else part.order(values)).reshape(part.shape))


def _generation(header: Header, config: dict[str, Any]) -> dict[str, Any]:
    """Which tokens end a text, and sampling parameters if the file has any."""
    found = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    sampling = {name: header.fields.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    chosen = {name: value for name, value in sampling.items() if value is not None}
    return {**found, **({"do_sample": True, **chosen} if chosen else {})}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
