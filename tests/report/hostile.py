"""Names that try to become markup, and what a page may not have because of them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
NAME = (
    '<img src=x onerror=alert(1)> "\' onmouseover=alert(1) x=" </title></style></script><script>alert(1)</script><!-- '
    "javascript:alert(1)// {{ 7 * 7 }} north\u202egnp.exe\u2066"
)


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(html: str) -> Page:
    """The page, which has no element, event or direction of somebody else's."""
    page = Page(html)
    assert page.elements.count("script") == 3  # the data and the two scripts of copfl
    assert not {"img", "iframe", "object", "embed", "base"} & {*page.elements}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not [
        value for name, value in page.attributes if name == "href" and value[:1] != "#" and value != "data:,"
    ]
    assert not DIRECTIONS.search(html)
    return page
