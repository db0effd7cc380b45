"""One thread per test process, and the same examples in every run."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("copfl", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("copfl")
