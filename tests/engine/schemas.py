"""Random JSON Schemas that describe something, from a seed: nested objects and arrays, enums, patterns, formats,
bounds, references (some to themselves), and alternatives."""

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "tags", "size", "über", "a b", 'q"t', "next", "$x", "items", "kind", "n")
PATTERNS = ("^[a-z]{1,6}$", "^(red|green) [0-9]{2}$", "^#[0-9a-f]{6}$", "^[A-Z][a-z]*$", "ab+c")
# Without times: the library allows a leap second in any minute, as RFC 3339 writes it, and validators differ on that.
FORMATS = ("date", "uuid", "ipv4", "email")
VALUES = (None, True, False, 0, -7, 2.5, "", "x", "two words", "ß\n", [1, "a"], {"k": [None]}, {})
DEEPEST = 4


def random_schema(seed: int) -> Schema:
    """At the top mostly an object."""
    made = _Maker(Random(seed))
    schema = made.an_object(0) if seed % 4 else made.some(0)
    if made.defined:
        schema["$defs"] = made.defined
    return schema


class _Maker:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.defined: dict[str, Schema] = {}

    def some(self, depth: int) -> Schema:
        leaves = [self.a_string, self.a_number, self.an_enum, self.a_word]
        inner = [self.an_object, self.an_array, self.an_any_of, self.a_reference, self.a_tuple]
        return self.random.choice(leaves if depth >= DEEPEST else leaves + inner)(depth)

    def an_object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randrange(5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.some(depth + 1) for name in names},
            "required": [name for name in names if self.random.random() < 0.6],
        }
        if self.random.random() < 0.85:
            schema["additionalProperties"] = False
        elif self.random.random() < 0.5:
            schema["additionalProperties"] = self.some(DEEPEST)
        return schema

    def an_array(self, depth: int) -> Schema:
        least = self.random.randrange(3)
        bounds = {"minItems": least} | ({"maxItems": least + self.random.randrange(3)} if self.often() else {})
        return {"type": "array", "items": self.some(depth + 1), **bounds}

    def a_tuple(self, depth: int) -> Schema:
        parts = [self.some(depth + 1) for _ in range(self.random.randrange(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def an_any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.some(depth + 1) for _ in range(self.random.randrange(1, 4))]}

    def a_reference(self, depth: int) -> Schema:
        """To what is defined already, to something new, or to a list of itself."""
        name = f"d{self.random.randrange(3)}"
        if name not in self.defined:
            self.defined[name] = {}  # so that what it has inside may refer to it
            inner = self.some(depth + 1)
            self.defined[name] = {
                "type": "object",
                "properties": {"value": inner, "next": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}

    def a_string(self, depth: int) -> Schema:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(FORMATS)}
        least = self.random.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randrange(12)}

    def a_number(self, depth: int) -> Schema:
        kind, low = self.random.choice(("integer", "number")), self.random.randrange(-50, 50)
        bound = self.random.choice(("maximum", "exclusiveMaximum"))
        schema: Schema = {"type": kind, "minimum": low, bound: low + self.random.randrange(2, 900)}
        if kind == "integer" and self.random.random() < 0.3:
            schema["multipleOf"] = self.random.choice((1, 2, 5))
        return schema

    def an_enum(self, depth: int) -> Schema:
        if self.random.random() < 0.3:
            return {"const": self.random.choice(VALUES)}
        return {"enum": self.random.sample(VALUES, self.random.randrange(1, 6))}

    def a_word(self, depth: int) -> Schema:
        return {"type": self.random.choice(("boolean", "null", ["boolean", "null"]))}

    def often(self) -> bool:
        return self.random.random() < 0.9
