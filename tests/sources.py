"""The library's own files as trees, parsed once for all tests that read them: it takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import copfl

SOURCE = Path(copfl.__file__).parent


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
