"""described: config.json of a quantised or cast model directory."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.models.quantize.chosen import Choice
from kvcellar.models.quantize.kinds import CASTS, INT4, INT8
from kvcellar.models.quantize.rules import GROUP
from kvcellar.models.quantize.schemes import INTS, PACKED


def quantised_config(fields: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    """The fields of a source with a `quantization_config` as compressed-tensors writes it."""
    used = [kind for kind in (INT8, INT4) if kind in choice.kinds.values()]
    groups: dict[str, Any] = {}
    for kind in used:
        promoted = kind == INT8 and len(used) > 1 and choice.promoted is not None
        targets = [choice.promoted] if promoted else ["Linear", *choice.others]
        groups[f"group_{len(groups)}"] = {"targets": targets, **_GROUPS[kind]}
    return _described(fields, groups, choice.ignore)


def with_codes(fields: Mapping[str, Any], modules: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The fields of a model of whose modules some, by bits, have codes in groups."""
    groups = {
        f"group_{number}": {
            **_GROUPS[INT4],
            "targets": sorted(modules[bits]),
            "weights": _args(bits, strategy="group", group_size=GROUP),
            "format": PACKED if bits == 4 else INTS,
        }
        for number, bits in enumerate(sorted(modules))
    }
    return _described(fields, groups, ())


def _described(fields: Mapping[str, Any], groups: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    forms = [group["format"] for group in groups.values()]
    quantization = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms[0] if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
    return {**fields, **({"quantization_config": quantization} if groups else {})}


def cast_config(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of a source whose weights were cast."""
    changed = {**fields, "dtype": CASTS[kind]}
    changed.pop("torch_dtype", None)
    for key, part in fields.items():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            changed[key] = cast_config(part, kind)
    return changed


def _args(bits: int, **more: Any) -> dict[str, Any]:
    defaults = {
        "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, "block_structure": None,
        "actorder": None, "dynamic": False, "observer": None, "observer_kwargs": {},
    }  # fmt: skip
    return {"num_bits": bits, **defaults, **more}


_GROUPS: Mapping[str, Mapping[str, Any]] = {
    INT8: {
        "weights": _args(8),
        "input_activations": _args(8, strategy="token", dynamic=True),
        "output_activations": None,
        "format": INTS,
    },
    INT4: {
        "weights": _args(4, strategy="group", group_size=GROUP),
        "input_activations": None,
        "output_activations": None,
        "format": PACKED,
    },
}
