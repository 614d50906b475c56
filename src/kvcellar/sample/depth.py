"""depth: how deep the library recurses when it compiles a grammar or a schema, from its source, without recursion.

The library follows each rule and each reference when it first meets it, inside the rule that names it, on the stack of
its thread; it does not look at how deep that is, and the process ends where the stack does. What is nested inside one
rule or schema is bounded elsewhere. Here it is a path through rules and references that is measured: the most levels of
a path that visits each of them once. In a cycle all of them count, in whatever order the library meets them.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

RULE = 2  # levels of a rule, without the groups in it
MAX_GROUPS = 64  # brackets in each other, of any kind
# As the library's lexer, which refuses what it cannot read.
_LARK = re.compile(
    r'(?P<skip>(?:\#|//)[^\n]*)|(?P<text>"(?:\\.|[^"\\\x00-\x1f\x7f])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>|@[a-zA-Z0-9_-]+)'
    r"|(?P<json>%(?:json|llguidance|regex))|(?P<word>%[a-z]+)|(?P<name>[a-z][_a-z0-9-]*|[A-Z][_A-Z0-9-]*)"
    r"|(?P<opens>[(\[{])|(?P<closes>[)\]}])|(?P<line>\n)|(?P<other>[^ \t\r])"
)
_SPACE = re.compile(r"[ \t\r\n]*")


def of_schema(schema: Any) -> int:
    """Levels of JSON on the longest path through the references of a schema."""
    return _Schema(schema).levels()


def of_lark(source: str) -> int:
    """Levels of rules, of groups in them, and of schemas in it, on the longest path. Raises `ValueError` where brackets
    are nested more than `MAX_GROUPS` deep, or JSON in it cannot be read."""
    edges: dict[Hashable, list[Hashable]] = {}
    weights: dict[Hashable, int] = {}
    schemas, groups, at = 0, 0, 0
    rule, begins = "", True  # a line that begins with a name defines it; others go on with the rule before
    while (found := _LARK.search(source, at)) is not None:
        at, kind = found.end(), found.lastgroup
        if kind == "json":
            value, at = _json(source, at)
            schemas = max(schemas, of_schema(value))
        elif kind == "name":
            rule = found["name"] if begins else rule
            edges.setdefault(rule, []).append(found["name"])
        elif kind in ("opens", "closes"):
            groups = max(0, groups + (1 if kind == "opens" else -1))
            if groups > MAX_GROUPS:
                raise ValueError(f"its brackets are nested more than {MAX_GROUPS} deep")
        if kind != "skip":
            begins = kind == "line" or (kind == "opens" and begins) or found["word"] == "%lark"
        weights[rule] = max(weights.get(rule, 0), RULE + groups)
    return deepest(edges, weights) + schemas


def _json(source: str, at: int) -> tuple[Any, int]:
    """The JSON that is next in a source, and where it ends."""
    space = _SPACE.match(source, at)
    try:
        return json.JSONDecoder().raw_decode(source, at if space is None else space.end())
    except RecursionError:
        raise ValueError("JSON in it is nested too deep") from None


class _Schema:
    """The containers of a schema by number, the root first, and what they lead to: what is in them, and references."""

    def __init__(self, root: Any) -> None:
        self._root, self._places = root, dict[int, int]()
        self._edges = dict[Hashable, list[Hashable]]()
        self._refs = list[tuple[int, str]]()
        self._bases = 0  # of references, beside that of the root
        every: list[Any] = [root]
        for number, one in enumerate(every):
            self._places[id(one)] = number
            inner = [each for each in (one.values() if isinstance(one, dict) else one) if isinstance(each, dict | list)]
            self._edges[number] = [*range(len(every), len(every) + len(inner))]
            every += inner
            if isinstance(one, dict):
                self._bases += number > 0 and any(isinstance(one.get(name), str) for name in ("$id", "id"))
                if isinstance(ref := one.get("$ref"), str):
                    self._refs.append((number, ref))
        self._heights = [1] * len(every)
        for number in reversed(range(len(every))):
            inside = (self._heights[each] for each in self._edges[number] if isinstance(each, int))
            self._heights[number] += max(inside, default=0)

    def levels(self) -> int:
        weights: dict[Hashable, int] = {}
        for number, ref in self._refs:
            found, target = self._target(ref)
            if not found or self._bases:  # it may lead anywhere, and elsewhere from each place
                return self._heights[0] * (1 + len(self._refs) * (1 + self._bases))
            if target is not None:
                self._edges[number].append(ref)
                self._edges[ref] = [target]
                weights[ref] = self._heights[target]
        return self._heights[0] + deepest(self._edges, weights)

    def _target(self, ref: str) -> tuple[bool, int | None]:
        """Whether a reference leads to a place in the schema by its path, and the container there."""
        if not ref.startswith("#") or (len(ref) > 1 and ref[1] != "/"):
            return False, None
        found = self._root
        for name in unquote(ref[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return False, None
        return True, self._places.get(id(found))


def deepest(edges: Mapping[Hashable, Sequence[Hashable]], weights: Mapping[Hashable, int]) -> int:
    """The most that the nodes of a path weigh together which visits no node twice, or more: of a cycle that it enters,
    all nodes count. Nodes without a weight weigh nothing."""
    total: dict[Hashable, int] = {}  # of the heaviest path from each node on that is done
    order: dict[Hashable, int] = {}  # in which nodes were met
    low: dict[Hashable, int] = {}
    open_: list[Hashable] = []  # whose cycles are not known yet
    for start in edges:
        if start in order:
            continue
        path = [(start, iter(edges.get(start, ())))]
        order[start] = low[start] = len(order)
        open_.append(start)
        while path:
            node, rest = path[-1]
            for child in rest:
                if child not in order:
                    order[child] = low[child] = len(order)
                    open_.append(child)
                    path.append((child, iter(edges.get(child, ()))))
                    break
                if child not in total:
                    low[node] = min(low[node], order[child])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == order[node]:
                    cycle = [open_.pop()]
                    while cycle[-1] != node:
                        cycle.append(open_.pop())
                    out = max((total.get(child, 0) for one in cycle for child in edges.get(one, ())), default=0)
                    total |= dict.fromkeys(cycle, out + sum(weights.get(one, 0) for one in cycle))
    return max(total.values(), default=0)
