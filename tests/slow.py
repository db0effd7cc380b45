"""Tests that take long run where COPFL_SLOW=1 asks for them: the others must end within minutes."""

from __future__ import annotations

import os

import pytest

slow = pytest.mark.skipif(os.environ.get("COPFL_SLOW") != "1", reason="takes long: set COPFL_SLOW=1")
