"""kinds: the names of types that weights can be quantised or cast to."""

from kvcellar.errors import BadRequest, shown

INT8, INT4, MIXED = "int8", "int4", "mixed"
QUANTISED = (INT8, INT4, MIXED)
AUTO, DENSE = "auto", "dense"
WEIGHTS = (AUTO, *QUANTISED, DENSE)  # how weights can be multiplied
CASTS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_NAMES = {
    INT8: ("int8", "q8", "q8_0", "fp8"),  # fp8 as in Ollama: 8 bits, here integers
    INT4: ("int4", "q4", "fp4", "q4_0", "q4_k_s"),
    MIXED: ("mixed", "q4_k_m", "q4_k"),
    "bf16": ("bf16",),
    "f16": ("f16",),
    "f32": ("f32",),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
METHODS = (SIGNED_MAX, GPTQ) = ("signed-max", "gptq")


def canonical_kind(text: str) -> str:
    """`int8`, `int4`, `mixed`, `bf16`, `f16` or `f32`, from one of their names in any case. Raises `BadRequest`."""
    kind = _KINDS.get(text.strip().lower())
    if kind is None:
        names = ", ".join(f"{kind} ({', '.join(more)})" if more else kind for kind, (_, *more) in _NAMES.items())
        raise BadRequest(f"weights cannot be quantised to {shown(text)}; supported types are {names}", "quantize")
    return kind
