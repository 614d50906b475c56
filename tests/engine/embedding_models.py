"""Directories of embedding models, as sentence-transformers writes them, and their embeddings by plain transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from tests.text import made
from tests.zoo import ARCHS

END = "</s>"


def saved(
    folder: Path,
    name: str = "llama",
    *,
    mode: str = "lasttoken",
    normalised: bool = True,
    headless: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """Save a tiny model whose tokenizer appends an end token. `headless`: the weights of the network without its output
    layer, and with no prefix in their names. Returns the network."""
    tokenizer = made.KINDS["byte_level"]()
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    network = ARCHS[name].build(
        vocab_size=tokenizer.get_vocab_size(), eos_token_id=end, tie_word_embeddings=headless, **config
    )
    (network.model if headless else network).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    written(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    pooling = {"word_embedding_dimension": network.config.hidden_size, "include_prompt": True}
    pooling |= {f"pooling_mode_{one}": one == mode for one in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    written(folder / "1_Pooling" / "config.json", pooling)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    written(folder / "modules.json", modules)
    return network


def written(file: Path, value: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


@torch.inference_mode()
def expected(
    network: PreTrainedModel, ids: list[int], *, mode: str = "lasttoken", normalised: bool = True
) -> list[float]:
    hidden = network.model(torch.tensor([ids])).last_hidden_state[0].double()  # [L,H], after the last norm
    pooled = hidden[-1] if mode == "lasttoken" else hidden.mean(0)
    return (pooled / pooled.norm() if normalised else pooled).tolist()
