"""Federations of real machines, by Flower: `pip install "copfl[flower]"`.

    init(folder)      writes a Flower app          up(folder)      tries it on this machine
    resume(folder)    goes on after a crash        join(folder)    personalises a newcomer

What runs: `settings` (the run config, checked) -> `server` (the rounds, over any `post`) <-> `node` (a client's turn).
`flower_post`, `client_app` and `server_app` put Flower in between; nothing else here knows it.
"""

from copfl.flower.app import init
from copfl.flower.trial import join, resume, up

__all__ = ["init", "join", "resume", "up"]
