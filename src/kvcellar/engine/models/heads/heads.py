"""heads: find the drafting head that belongs to a model, or the reason why there is none that can be used.

Two kinds are run: MTP layers, of the model's own directory (`mtp_head.py`), and Gemma 4's assistants, which have one of
their own (`assistant_head.py`). Other kinds are recognised by their configs, and refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.heads.assistant_head import ASSISTANTS, AssistantHead, load_assistant
from kvcellar.engine.models.heads.mtp_head import MtpHead, build_mtp_head, load_mtp
from kvcellar.engine.models.load import Loaded
from kvcellar.engine.models.weights.config_file import read_object
from kvcellar.engine.models.weights.find import locate
from kvcellar.errors import ModelRefused
from kvcellar.memory.kv.history import Backend

OWN = "mtp"  # names the model's own head
INSTEAD = (
    "Drafts without it: draft='ngram', or the directory of a smaller model with the same tokenizer; without any, leave "
    "draft out"
)
_NAMED: Mapping[str, str] = {  # pattern of a model type, architecture or field, and why such a head is not used
    r"eagle": "an EAGLE head, which reads hidden states of several layers of its target; transformers has no network "
    "for it",
    r"dflash|muse_?glimmer_?assistant": "a DFlash head, which proposes a block of tokens by diffusion from hidden "
    "states of several layers",
    r"medusa": "Medusa heads, for which transformers has no network",
    r"mlp_speculator": "an MLP speculator, for which transformers has no network",
    r"mtp(?!_layers)|nextn(?!_predict)": "an MTP head without its model; such a head is loaded from the directory of "
    "the model that it belongs to, with draft='mtp'",
    r"speculators?_(model_type|config)": "a head in the format of speculators, which transformers does not read",
}


def find_head(
    draft: str | Path, loaded: Loaded, target: Guest, backends: Sequence[Backend]
) -> MtpHead | AssistantHead | None:
    """The head that `draft` names for a model: "mtp" its own, else that of a directory. None: the directory holds an
    ordinary causal language model.

    `target` runs the network of `loaded`. Raises `ModelRefused` and `ModelNotFound`.
    """
    if draft == OWN:
        return _own(loaded, target, backends)
    _, path = locate(draft)
    kind, why = kind_of(path)
    if why is not None:
        raise ModelRefused(f"{path.name} cannot draft for {loaded.name}: it is {why}. {INSTEAD}")
    if kind not in ASSISTANTS:
        return None
    try:
        return load_assistant(path, target)
    except ModelRefused as refused:
        raise ModelRefused(f"{path.name} cannot draft for {loaded.name}: {refused}. {INSTEAD}") from refused


def _own(loaded: Loaded, target: Guest, backends: Sequence[Backend]) -> MtpHead:
    if loaded.path is None:
        raise ModelRefused(
            f"{loaded.name} was given as a network, and the weights of an MTP head are read from a directory. Load the "
            f"model from its directory. {INSTEAD}"
        )
    try:
        return build_mtp_head(load_mtp(target.model, loaded.path), target, backends)
    except ModelRefused as refused:
        raise ModelRefused(f"{refused}. {INSTEAD}") from refused


def kind_of(path: Path) -> tuple[str | None, str | None]:
    """The model type of a directory, and what its config says it is if that is a head that is not used."""
    if not (path / "config.json").is_file():
        return None, None
    fields = read_object(path / "config.json")
    model_type = fields.get("model_type")
    listed = fields.get("architectures")
    names = [model_type, fields.get("speculators_model_type"), *(listed if isinstance(listed, list) else [listed])]
    named = [name.lower() for name in names if isinstance(name, str)]
    named += [key for key in fields if re.search(r"^(eagle|dflash|medusa|speculators?)_", key)]
    for pattern, why in _NAMED.items():
        if any(re.search(pattern, name) for name in named):
            return None, why
    return model_type if isinstance(model_type, str) else None, None
