"""Tests that take long run where COPFL_SLOW=1 asks for them: the others must end within minutes."""

from __future__ import annotations

import os

import pytest

SLOW = os.environ.get("COPFL_SLOW") == "1"
slow = pytest.mark.skipif(not SLOW, reason="takes long: set COPFL_SLOW=1")
