"""Build HTML in which every text is escaped.

Names of tensors, paths and values of config.json are untrusted. What is not `Markup` is text, so
that nothing has to be escaped by hand.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Content = str | Iterable[str]

_VOID = frozenset({"br", "link", "meta"})


class Markup(str):
    """HTML; what `element` and `join` return."""

    __slots__ = ()


"""A text, HTML, or several of them."""


def element(name: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """An element with escaped texts.

    Args:
        name: of the element.
        content: what it holds.
        attributes: by name, where `class_` is class and other underscores are hyphens; those that
            are None are left out.
    """
    given = "".join(
        f' {_attribute(key)}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: Content) -> Markup:
    """Texts and HTML behind each other."""
    parts = (part for item in content for part in ([item] if isinstance(item, str) else item))
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str,
    class_: str | None = None,
) -> Markup:
    """A table with headers for columns and for rows, which are their first cells.

    A column whose name begins with `>` holds numbers and is right-aligned. It is in a box of its
    own that scrolls, so that a wide one does not widen the page.
    """
    classes = ["number" if column.startswith(">") else None for column in columns]
    head = [
        element("th", _title(column), scope="col", class_=kind)
        for column, kind in zip(columns, classes, strict=True)
    ]
    body = [
        element(
            "tr",
            *(
                element("td" if place else "th", cell, scope=None if place else "row", class_=kind)
                for place, (cell, kind) in enumerate(zip(row, classes, strict=True))
            ),
        )
        for row in rows
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", head)),
        element("tbody", body),
        class_=class_,
    )
    return element("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _title(column: str) -> str:
    return column if isinstance(column, Markup) else column.removeprefix(">")


def code(text: str) -> Markup:
    """A name or command, cut to a length that a page can show."""
    return element("code", shortened(text))


def shortened(text: str, most: int = 400) -> str:
    """A text of at most `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}..."


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _escaped(text: str) -> str:
    """Escaped for HTML; control characters, also those that reorder text, by their codes."""
    if not text.replace("\n", "").isprintable():
        text = "".join(
            c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
        )
    return escape(text, quote=True)
