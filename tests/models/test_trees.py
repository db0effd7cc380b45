"""Trees as a model: what making one costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from copfl.models.trees import Trees
with torch.device("meta"):
    Trees((3,), 2)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.job
def test_the_size_of_a_model_is_known_without_the_compiler() -> None:
    """A node asks for it before its first round; the compiler would take five seconds of every node."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert said.stdout.strip() == "False", said.stderr
