"""Pictures of a report's page as files of their own, such as a model card shows.

The page marks those that need no legend beside them with `data-picture`. A file has the page's
light colors, because who shows it decides about dark ones, and a white ground.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import unescape
from importlib import resources

_SVG = re.compile(
    r'<svg(?P<attributes>[^<>]* data-picture="(?P<name>[a-z-]+)"[^<>]*)>'
    r"<title>(?P<title>[^<]*)</title>(?P<content>.*?)</svg>",
    re.DOTALL,
)
_MEDIA = re.compile(r"@media[^{}]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_GROUND = '<rect width="100%" height="100%" fill="#ffffff"/>'


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a page.

    Attributes:
        name: of its file, without a suffix.
        caption: what it shows.
        svg: the file's content.
    """

    name: str
    caption: str
    svg: str


def pictures_of(page: str) -> list[Picture]:
    """The marked pictures of a page; none if no report has made it."""
    style = _MEDIA.sub("", resources.files("moequant.reporting").joinpath("style.css").read_text())
    style += "svg { font-family: system-ui, sans-serif; }"
    seen: Counter[str] = Counter()
    pictures = []
    for found in _SVG.finditer(page):
        name, title = found["name"], found["title"]
        seen[name] += 1
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg"{found["attributes"]}><title>{title}</title>'
            f"<style>{style}</style>{_GROUND}{found['content']}</svg>\n"
        )
        numbered = name if seen[name] == 1 else f"{name}-{seen[name]}"
        pictures.append(Picture(name=numbered, caption=unescape(title), svg=svg))
    return pictures
