"""Hooks of the documentation's site (mkdocs.yml): navigation, and links into the repository.

    mkdocs build --strict

Pages that no section below names go to "Reference" by themselves, so that a new page needs nothing
but its file. Links to files outside of docs/ become their names: the site is read without a
repository next to it. A link to a file that is not there fails the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "Start": ["index.md", "tutorial.md"],
    "How to": ["howto-model.md", "howto-operate.md", "howto-api.md", "traces.md", "planning.md"],
    "How it works": ["architecture.md", "wire.md", "hca.md", "ucx.md", "mlx5.md"],
    "Reference": ["api.md"],
}
OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


def sections(pages: list[str]) -> dict[str, list[str]]:
    """Section -> pages; every page is in one, and only pages that are there."""
    named = {page for found in SECTIONS.values() for page in found}
    result = {title: [page for page in found if page in pages]
              for title, found in SECTIONS.items()}
    result["Reference"] += sorted(page for page in pages if page not in named)
    return result


def on_config(config: Any) -> Any:
    folder = Path(config.docs_dir)
    pages = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.md"))
    config.nav = [{title: found} for title, found in sections(pages).items()]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ as code; raises FileNotFoundError if one leads nowhere."""
    def name(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / match[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: a link to {match[2]}")
        shown = str(target.relative_to(ROOT))
        text = match[1].strip("`")
        return f"`{shown}`" if text in shown else f"{match[1]} (`{shown}`)"

    return OUTSIDE.sub(name, markdown)
