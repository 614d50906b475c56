"""rules: the rules of one grammar in llguidance's Lark dialect, with the marks that are tokens of a vocabulary.

A mark that is a token of its own is written as that token: text never matches it there. Other text is free up to the
mark that ends it.
"""

import json
from collections.abc import Iterable, Mapping

ANY = "(\\n|.)"


class Rules:
    """Rules by name. `tokens` are texts that are one token each, with their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._shared: dict[str, None] = {}

    def grammar(self, start: str) -> str:
        rules = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return f"start: {start}\n{rules}\n{''.join(self._shared)}"

    def add(self, name: str, rule: str) -> str:
        self._rules[name] = rule
        return name

    def once(self, rules: str) -> None:
        """Add these rules, unless they were added before."""
        self._shared[rules] = None

    def within(self, text: str) -> list[str]:
        """The tokens that are in a text."""
        return [token for token in self._tokens if token in text]

    def is_token(self, text: str) -> bool:
        return text in self._tokens

    def begins_with_token(self, text: str) -> bool:
        return any(text.startswith(token) for token in self._tokens)

    def literal(self, text: str) -> str:
        """A text, in which tokens are tokens."""
        parts: list[str] = []
        plain = at = 0
        while at < len(text):
            mark = max((one for one in self._tokens if text.startswith(one, at)), key=len, default="")
            if not mark:
                at += 1
                continue
            parts += [quoted(text[plain:at])] if at > plain else []
            parts.append(f"<[{self._tokens[mark]}]>")
            at += len(mark)
            plain = at
        parts += [quoted(text[plain:])] if plain < len(text) else []
        return " ".join(parts)

    def until(self, name: str, mark: str, among: Iterable[str] = ()) -> str:
        """Any text up to a mark, and the mark. Those of `among` that are tokens may be in it, too."""
        if mark not in self._tokens:
            self._rules[f"{name}[suffix={json.dumps(mark)}]"] = f"/{ANY}*/"
            return name
        text = self.text(name.upper(), (mark,))
        others = " | ".join(self.literal(one) for one in dict.fromkeys(among) if one in self._tokens and one != mark)
        free = f"({text}? ({others}))* {text}?" if others else f"{text}?"
        return self.add(name, f"{free} {self.literal(mark)}")

    def space(self) -> str:
        """White space between the parts of an answer."""
        return self.add("space", r"/[ \n]{0,8}/")

    def text(self, name: str, without: Iterable[str], shape: str = f"/{ANY}+/") -> str:
        """Text of this shape that has none of these marks in it, also not spelled in other tokens: a reader would find
        them there. `name` is in capitals."""
        marks = "|".join(map(pattern, without))
        return self.add(name, f"({shape}) & ~/{ANY}*({marks}){ANY}*/" if marks else shape)

    def head(self, name: str, mark: str, without: Iterable[str]) -> str:
        """Text up to the first `mark`, which is no token, and the mark; the text has none of `without` in it."""
        marks = "|".join(pattern(one) for one in without if one not in mark)
        terminal = self.add(
            name.upper(), f"/{ANY}*{pattern(mark)}/" + (f" & ~/{ANY}*({marks}){ANY}*/" if marks else "")
        )
        self._rules[f"{name}[lazy]"] = terminal
        return name


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark has control characters escaped


def pattern(text: str) -> str:
    """A text as a part of a regular expression of Lark."""
    return "".join(map(_in_pattern, text))


def _in_pattern(char: str) -> str:
    if char == "\n":
        return "\\n"
    return f"\\{char}" if char.isascii() and not char.isalnum() and char not in "_ <>" else char
