"""pooling: how a model directory says that hidden states become an embedding, in the files of sentence-transformers.

`modules.json` lists what follows the network: a pooling, and perhaps a normalisation. Only what is computed here is
accepted; a model for which anything else is listed is not an embedding model, with the reason.
"""

import re
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelRefused
from kvcellar.events import Pooling, PoolingMode
from kvcellar.models.config_file import read_list, read_object

MODULES, POOLING = "modules.json", "1_Pooling"
NONE = f"its directory has no {MODULES} and no {POOLING}/config.json, which say how hidden states are pooled"
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}


def pooling_of(path: Path) -> Pooling | str:
    """How the model of a directory pools, or why it does not embed. Raises nothing."""
    try:
        return _read(path)
    except ModelRefused as refused:
        return str(refused)


def _read(path: Path) -> Pooling | str:
    folder, normalised = POOLING, False
    if (path / MODULES).is_file():
        kinds = {}
        for module in read_list(path / MODULES):
            kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
            kinds[kind] = module.get("path") if isinstance(module, dict) else None
        if unknown := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
            return f"its {MODULES} lists {unknown[0] or 'a module without a type'}, which is not computed here"
        if "Pooling" not in kinds:
            return f"its {MODULES} lists no pooling"
        folder, normalised = kinds["Pooling"], "Normalize" in kinds
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            return f"the pooling in its {MODULES} has no folder"
    elif not (path / POOLING / "config.json").is_file():
        return NONE
    if not (path / folder / "config.json").is_file():
        return f"its {MODULES} names {folder}/config.json, which is not there"
    mode = _mode(read_object(path / folder / "config.json"))
    if mode not in ("last", "mean"):
        return mode
    config = read_object(path / "config.json")
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return "its attention sees later tokens, which is not computed here"
    return Pooling(mode, normalised, _sizes(config))


def _mode(fields: dict[str, Any]) -> Any:
    """The mode, or the reason why it cannot be used."""
    named = fields.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]  # fmt: skip
    if len(chosen) != 1 or chosen[0] not in _MODES:
        names = " and ".join(name.removeprefix("pooling_mode_") for name in chosen) or "nothing"
        return f"it pools by {names}; only the last token or the mean of all is computed here"
    if fields.get("include_prompt") is False:
        return "it leaves its prompt out of the pooling, which is not computed here"
    return _MODES[chosen[0]]


def _sizes(config: dict[str, Any]) -> frozenset[int] | None:
    """Of a Matryoshka model, as its config declares it."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        return frozenset(size for size in listed if isinstance(size, int) and size > 0)
    return None if config.get("is_matryoshka") is True else frozenset()
