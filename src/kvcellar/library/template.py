"""template: checks that TEMPLATE is a chat template in Jinja, as models of Hugging Face have."""

import re

from jinja2 import TemplateError, TemplateSyntaxError

from kvcellar.errors import ModelRefused
from kvcellar.text.sandbox import ChatEnvironment

# Actions that templates of Go have and those of Jinja cannot have.
_GO = re.compile(
    r"\{\{-?\s*(?:(?:if|range|with|template|block|define|eq|ne|and|or|not|len|index|slice|json|currentDate|toTypeScriptType)"
    r"\s+[.$(\"`]|[.$][A-Za-z_]?|(?:end|else|break|continue)\s*-?\}\}|else\s+if\s|/\*)"
)


def check_template(text: str) -> None:
    """Raise `ModelRefused` with the reason if it cannot be used."""
    if found := _GO.search(text):
        action = text[found.start() : found.start() + 40].split("}}")[0].strip() + " }}"
        raise ModelRefused(
            f"TEMPLATE is a template of Go, as Ollama's are ({action}); chat templates of kvcellar are in Jinja. "
            f"Remove TEMPLATE to use that of the model, or write it in Jinja: "
            f"{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
        )
    try:
        ChatEnvironment().compiled(text)
    except TemplateSyntaxError as error:
        raise ModelRefused(
            f"TEMPLATE is no chat template in Jinja: line {error.lineno} of it: {error.message}"
        ) from error
    except (TemplateError, RecursionError, MemoryError, ValueError) as error:
        raise ModelRefused(f"TEMPLATE is no chat template in Jinja: {type(error).__name__}: {error}") from error
