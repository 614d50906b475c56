"""What `mkdocs.yml` calls: the navigation of the site is the list in `docs/README.md`, and a link to what is not below
`docs/`, such as a source file, becomes its name.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^- \[(.+?)\]\(([\w./-]+\.md)\)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    listed = [
        {title: [{name: page} for name, page in ITEM.findall(body) if not page.startswith("..")]}
        for title, body in SECTION.findall((ROOT / "docs/README.md").read_text())
    ]
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    config.nav = [{"Home": "README.md"}, *listed, {"Each decision": [f"decisions/{name}" for name in decisions]}]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def inside(found: re.Match[str]) -> str:
        image, text, target, _ = found.groups()
        parts = list[str]()
        for part in (PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent / target).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        if parts[:1] == ["docs"] or image:
            return found[0]
        path = "/".join(parts)
        return f"{text} (`{path}`)" if path not in text else text

    return LINK.sub(inside, markdown)
