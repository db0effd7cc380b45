"""One thread per test process, and the same examples in every run."""

from __future__ import annotations

import signal
import threading

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("copfl", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("copfl")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be everything that the tests start: those
# that send SIGINT to a process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
