"""Equations of the documentation, `$...$` and `$$...$$`, as MathML, which browsers show without a script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

BLOCK = re.compile(r"^\$\$\n(.+?)^\$\$$", re.MULTILINE | re.DOTALL)
INLINE = r"(?<![\w\\$])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\w)"
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")


class Blocks(Preprocessor):
    """Replaces the blocks before anything else sees them; code is left alone."""

    def run(self, lines: list[str]) -> list[str]:
        return "\n".join(self.parts(lines)).split("\n")

    def parts(self, lines: list[str]) -> Iterator[str]:
        plain: list[str] = []
        fence = ""
        for line in lines:
            found = FENCE.match(line)
            if found and not fence:
                yield self.typeset(plain)
                plain, fence = [], found[1]
                yield line
            elif fence:
                yield line
                fence = "" if found and found[1].startswith(fence) else fence
            else:
                plain.append(line)
        yield self.typeset(plain)

    def typeset(self, lines: list[str]) -> str:
        def stored(found: re.Match[str]) -> str:
            text = (
                found[1].strip().replace("{aligned}", "{align*}")
            )  # GitHub knows one, latex2mathml the other
            html = f'<div class="equation" tabindex="0">{convert(text, display="block")}</div>'
            return f"\n{self.md.htmlStash.store(html)}\n"

        return BLOCK.sub(stored, "\n".join(lines))


class Inline(InlineProcessor):
    def handleMatch(self, found: re.Match[str], data: str) -> tuple[Any, int, int]:  # type: ignore[override]
        return self.md.htmlStash.store(convert(found[1])), found.start(0), found.end(0)


class Equations(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Blocks(md), "equations", 27)  # before fenced code
        md.inlinePatterns.register(Inline(INLINE, md), "equation", 185)  # after `code`


def makeExtension(**options: Any) -> Equations:
    return Equations(**options)
