"""200 nodes against one server process, round after round: `python benchmarks/load.py --minutes 60`

The server is `copfl.flower.server.Server`, with its registry, its codec, its masks on disk and its checkpoint after
every round; only Flower is replaced, by plain TCP connections, one per node, to a second process that plays all nodes.
Nodes do not train: an upload is the global model, slightly changed, and a mask that grows now and then.

Some nodes fail, a known number of times, each in one of these ways:
    gone     disconnects instead of answering and returns as another node; it must be asked again and be counted
    twice    answers twice, at once or a moment apart; it must be counted once
    damaged  a bit of its upload is flipped; it must be named and left out of that round
    replayed sends its upload of the round before; it must be named and left out
    late     answers after the deadline; it must be named and left out, and its answer must not count anywhere

Every --every seconds a JSON line: memory, descriptors, rounds, replies. The last line is the verdict; exit code 1 if
memory or descriptors grow or a reply is lost. With --thin FILE, makes the short record of a finished log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

SIZES = struct.Struct("!III")  # of the envelope, the head and the body
GREETING = "query"
FLAT = 8.0  # MiB that a process may have more in the last quarter than in the second
WRONG = ("gone", "twice", "damaged", "replayed", "late")
REASONS = {"damaged": "damaged on its way", "replayed": "its round is", "late": "no reply within"}


def config(nodes: int, deadline: float) -> dict[str, Any]:
    """The federation's settings, the same on both sides; rounds without end, as the clock ends it."""
    return {
        "run": "load", "rounds": 10**9, "clients": nodes, "deadline": deadline, "algorithm": "copfl", "model": "mlp",
        "shape": "1,8,8", "mean": "0.3", "std": "0.37", "model-options.width": 16, "wire": "fp32",
    }  # fmt: skip


def memory(pid: int) -> float:
    """The resident memory of a process in MiB."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 2)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def seconds_of(pid: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the server's side -------------------------------------------------------------------------------------------------


def framed(envelope: dict[str, Any], head: str, body: bytes) -> bytes:
    first, second = json.dumps(envelope).encode(), head.encode()
    return SIZES.pack(len(first), len(second), len(body)) + first + second + body


class Sockets:
    """A `Transport` over plain connections: a node is a connection."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.listener.setblocking(False)
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.listener, selectors.EVENT_READ, None)
        self.lines: dict[int, socket.socket] = {}
        self.rest: dict[int, bytearray] = {}  # what has come of a message that is not whole yet
        self.inbox: dict[str, Any] = {}
        self.count, self.ids = itertools.count(), itertools.count(1)
        self.received: Counter[str] = Counter()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def nodes(self) -> list[int]:
        self._listen()
        return list(self.lines)

    def send(self, node: int, request: str, content: tuple[str, bytes], seconds: float) -> str:
        message_id = str(next(self.count))
        line = self.lines.get(node)
        if line is None:
            return message_id  # never answered: it left a moment ago
        try:
            line.settimeout(60)  # the nodes' process always reads, so this only waits for its buffer
            line.sendall(framed({"id": message_id, "request": request}, *content))
            line.setblocking(False)
        except OSError:
            self._drop(node)
        return message_id

    def replies(self, message_ids: Collection[str]) -> list[Any]:
        self._listen()
        return [self.inbox.pop(i) for i in message_ids if i in self.inbox]

    def drop_expired(self) -> int:
        """Drops the replies to expired messages, as Flower does, and returns their number."""
        left = len(self.inbox)
        self.inbox.clear()
        return left

    def _listen(self) -> None:
        for key, _ in self.ready.select(0):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        line, _ = self.listener.accept()
                        line.setblocking(False)
                        node = next(self.ids)
                        self.lines[node], self.rest[node] = line, bytearray()
                        self.ready.register(line, selectors.EVENT_READ, node)
            else:
                self._read(key.data)

    def _read(self, node: int) -> None:
        from copfl.flower.transport import Reply

        try:
            while True:
                got = self.lines[node].recv(1 << 16)
                if not got:
                    return self._drop(node)
                self.rest[node] += got
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(node)
        rest = self.rest[node]
        while len(rest) >= SIZES.size:
            a, b, c = SIZES.unpack_from(rest)
            end = SIZES.size + a + b + c
            if len(rest) < end:
                break
            envelope = json.loads(rest[SIZES.size : SIZES.size + a])
            head = rest[SIZES.size + a : SIZES.size + a + b].decode()
            self.received["again" if envelope["id"] in self.inbox else "replies"] += 1
            self.inbox[envelope["id"]] = Reply(envelope["id"], (head, bytes(rest[end - c : end])))
            del rest[:end]

    def _drop(self, node: int) -> None:
        line = self.lines.pop(node)
        self.ready.unregister(line)
        line.close()
        del self.rest[node]

    def close(self) -> None:
        for node in list(self.lines):
            self._drop(node)
        self.ready.close()
        self.listener.close()


def serve(minutes: float, nodes: int, pause: float, every: float, deadline: float, log: Path) -> int:
    """Runs rounds for so many minutes and checks them."""
    import torch
    from copfl.flower.folder import Folder

    from copfl.flower.server import federate
    from copfl.flower.settings import settings_of
    from copfl.flower.state import ServerFolder

    torch.set_num_threads(1)
    transport, samples = Sockets(), list[dict[str, Any]]()
    command = [
        sys.executable,
        __file__,
        "--play",
        str(transport.port),
        "--nodes",
        str(nodes),
        "--deadline",
        str(deadline),
    ]
    settings = settings_of(config(nodes, deadline))
    tally: Counter[str] = Counter()
    why: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as runs,
        open(log, "w", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as players,
    ):

        def note(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

        begun = last = time.monotonic()
        counted = 0
        folder = ServerFolder(runs, "load", resume=False)
        server = Server(settings, transport, folder, lambda text: None, pause=0.05)
        for record in server.rounds():
            now = time.monotonic()
            tally["rounds"] += 1
            tally["asked"] += nodes
            tally["counted"] += len(record["clients"])
            tally["left out"] += len(record["left_out"])
            tally["void"] += transport.drop_expired()  # second and late answers
            tally["bytes"] += record["bytes"]["up"] + record["bytes"]["down"]
            for reason in record["why"].values():
                why[next((name for name, words in REASONS.items() if words in reason), reason)] += 1
            if now - last >= every or tally["rounds"] == 1:
                samples.append(
                    {
                        "minutes": round((now - begun) / 60, 2),
                        "server_mib": memory(os.getpid()), "server_fds": descriptors(os.getpid()),
                        "nodes_mib": memory(players.pid), "nodes_fds": descriptors(players.pid),
                        "rounds_per_s": round((tally["rounds"] - counted) / (now - last), 3),
                        "connected": len(transport.lines), **tally,
                    }
                )  # fmt: skip
                note(samples[-1])
                last, counted = now, tally["rounds"]
            if now - begun >= minutes * 60:
                break
            time.sleep(pause)  # a round a moment; without it, the test takes whole cores
        took = time.monotonic() - begun
        cores = {
            side: seconds_of(pid) / took for side, pid in (("server", os.getpid()), ("nodes", players.pid))
        }
        out, _ = players.communicate("done\n", timeout=120)
        transport.close()
        result = verdict(samples, tally, why, json.loads(out), nodes, took)
        note({"verdict": {**result, "cores": {k: round(v, 2) for k, v in cores.items()}}})
    return 0 if result["passed"] else 1


def verdict(
    samples: list[dict[str, Any]],
    tally: Counter[str],
    why: Counter[str],
    did: dict[str, int],
    nodes: int,
    took: float,
) -> dict[str, Any]:
    """What the hour showed: growth of memory and descriptors, and what became of every reply."""
    flat, slopes, fds = {}, {}, {}
    for side in ("server", "nodes"):
        seen = [s[f"{side}_mib"] for s in samples]
        quarter = max(1, len(seen) // 4)
        flat[side] = round(
            statistics.fmean(seen[-quarter:]) - statistics.fmean(seen[quarter : 2 * quarter] or seen), 2
        )
        settled = samples[quarter:]
        if len(settled) > 1:
            line = statistics.linear_regression(
                [s["minutes"] for s in settled], [s[f"{side}_mib"] for s in settled]
            )
            slopes[side] = round(line.slope * 60, 2)
        # A node that hung up a moment ago is not there: what belongs to the connections is taken off.
        own = [s[f"{side}_fds"] - (s["connected"] if side == "server" else 0) for s in samples]
        fds[side] = [own[0], own[-1]]
    # Every reply that should have counted did: all that were asked, but for those that a fault kept out.
    expected = tally["asked"] - sum(did[name] for name in REASONS)
    lost = expected - tally["counted"]
    named = why == Counter({name: did[name] for name in REASONS})
    grown = {side: last - first for side, (first, last) in fds.items()}
    return {
        "passed": bool(
            lost == 0 and named and max(flat.values()) <= FLAT and grown["server"] <= 0 and abs(grown["nodes"]) <= 2
        ),
        "hours": round(took / 3600, 3), "nodes": nodes, "rounds": tally["rounds"],
        "rounds_per_s": round(tally["rounds"] / took, 3), "replies_counted": tally["counted"], "lost": lost,
        "void": tally["void"], "faults": did, "left_out": dict(why), "all_named": named,
        "gigabytes": round(tally["bytes"] / 1e9, 2), "memory_growth_mib": flat, "memory_slope_mib_per_hour": slopes,
        "memory_mib": {side: [samples[0][f"{side}_mib"], samples[-1][f"{side}_mib"]] for side in ("server", "nodes")},
        "descriptors_beside_connections": fds,
    }  # fmt: skip


# -- the nodes' side ---------------------------------------------------------------------------------------------------


class Players:
    """All nodes, in one process; each has a connection of its own."""

    def __init__(self, port: int, nodes: int, deadline: float) -> None:
        import torch

        from copfl.core.algorithm import example_upload
        from copfl.flower.settings import settings_of

        torch.set_num_threads(1)
        self.port, self.deadline = port, deadline
        self.settings = settings_of(config(nodes, deadline))
        given = self.settings
        self.like = example_upload(given.algorithm, given.task, given.shape, given.config.augment, nodes)
        self.did: Counter[str] = Counter(dict.fromkeys(WRONG, 0))
        self.draw = random.Random(8)
        self.noise = torch.Generator().manual_seed(8)
        size = self.settings.task.initial.numel()
        self.masks = [torch.zeros(size, dtype=torch.bool) for _ in range(nodes)]
        self.plans: dict[int, dict[int, str]] = {}  # round -> client -> what goes wrong
        self.tasks: set[asyncio.Task[None]] = set()

    def wrong(self, round: int, client: int) -> str:
        """What goes wrong with this client in this round: in most rounds one node hangs up and one answers twice."""
        if round not in self.plans:
            self.plans = {round: {}}
            for what, often in (
                ("gone", 0.7),
                ("twice", 0.7),
                ("damaged", 0.1),
                ("replayed", 0.1),
                ("late", 0.004),
            ):
                if round > 0 and self.draw.random() < often:
                    self.plans[round].setdefault(self.draw.randrange(len(self.masks)), what)
        return self.plans[round].pop(client, "")

    def upload(self, config: dict[str, Any], head: str, body: bytes, what: str) -> Any:
        """The client's upload, through the codec both ways: the global model, slightly changed."""
        import torch

        from copfl import wire
        from copfl.flower.node import decode
        from copfl.flower.transport import Field

        got = decode(self.settings, config, wire.Packet(head, body))
        mask = self.masks[got.head.client]
        if self.draw.random() < 0.02 and float(mask.float().mean()) < 0.4:
            mask[torch.randint(len(mask), (1,), generator=self.noise)] = True
        w = got.down.w + 1e-3 * torch.randn(len(mask), generator=self.noise)
        shared = type(self.like.shared)(torch.where(mask, 0, w), mask)
        upload = self.like._replace(shared=shared, score=torch.ones_like(self.like.score))
        about = {Field.NOTE: "", Field.METRICS: {"loss": self.draw.random(), "weight": 1.0}}
        head_up = got.head._replace(kind="upload", round=got.head.round - (what == "replayed"))
        masks = got.about.get(Field.KNOWN_MASKS)
        return wire.encode(upload, head_up, self.settings.config.wire, receiver_masks=masks, about=about)

    async def node(self, client: int) -> None:
        """One node, for ever: after it disconnected it returns."""
        config = {"client": client, "state-dir": "."}
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                while True:
                    a, b, c = SIZES.unpack(await reader.readexactly(SIZES.size))
                    envelope = json.loads(await reader.readexactly(a))
                    head, body = (await reader.readexactly(b)).decode(), await reader.readexactly(c)
                    if envelope["request"] == GREETING:
                        writer.write(framed(envelope, json.dumps({"client": client}), b""))
                        continue
                    what = self.wrong(json.loads(head)["round"], client)
                    if what:
                        self.did[what] += 1
                    if what == "gone":
                        break
                    await self.reply(writer, envelope, self.upload(config, head, body, what), what)
            except (asyncio.IncompleteReadError, ConnectionError):
                await asyncio.sleep(0.2)
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def reply(
        self, writer: asyncio.StreamWriter, envelope: dict[str, Any], packet: Any, what: str
    ) -> None:
        body = packet.body
        if what == "damaged":
            body = body[:-1] + bytes([body[-1] ^ 1])
        message = framed(envelope, packet.head, body)
        if what == "late":
            await asyncio.sleep(self.deadline + 2)
        writer.write(message)
        if what == "twice":
            await asyncio.sleep(self.draw.choice((0, 0.3)))
            writer.write(message)
        await writer.drain()

    async def play(self) -> None:
        self.tasks = {asyncio.create_task(self.node(client)) for client in range(len(self.masks))}
        await asyncio.to_thread(sys.stdin.readline)  # until the server has seen enough
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        print(json.dumps(self.did))


def thin(log: Path, points: int = 13) -> dict[str, Any]:
    """The short record of a finished log: the verdict and a few of its lines."""
    *lines, last = [json.loads(line) for line in log.read_text().splitlines()]
    if "verdict" not in last:
        raise SystemExit(f"{log} has no verdict: the run is not over")
    step = max(1, (len(lines) - 1) // (points - 1))
    return {**last, "samples": [*lines[:-1:step], lines[-1]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between rounds")
    parser.add_argument("--every", type=float, default=30, help="seconds between two lines")
    parser.add_argument("--deadline", type=float, default=60, help="seconds that a round waits for a reply")
    parser.add_argument("--log", type=Path, default=Path("load.jsonl"))
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--thin", type=Path, metavar="FILE", help="print the short record of the log, and nothing else"
    )
    given = parser.parse_args()
    if given.thin:
        print(json.dumps(thin(given.thin), indent=1))
        return 0
    if given.play:
        asyncio.run(Players(given.play, given.nodes, given.deadline).play())
        return 0
    return serve(given.minutes, given.nodes, given.pause, given.every, given.deadline, given.log)


if __name__ == "__main__":
    sys.exit(main())
