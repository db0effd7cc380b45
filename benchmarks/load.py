"""200 nodes against one server process, round after round: `python benchmarks/load.py --minutes 60`

The server is `copfl.federation.server.rounds.Server` with its registry, its codec, its masks on disk and its checkpoint
after every round. Plain TCP replaces Flower: one connection per node, to a second process with all nodes.
Nodes do not train: an upload is the global model with a small change, and a mask that grows now and then.

A known number of faults is injected:
    gone      disconnects in place of an answer and returns as another node; must be asked again and counted
    twice     answers twice, at once or later; must be counted once
    damaged   one bit of its upload is changed; must be left out of that round by name
    replayed  sends its upload of the previous round; must be left out by name
    late      answers after the deadline; must be left out by name, and its answer must never count

Every --every seconds a JSON line: memory, descriptors, rounds, replies. The last line is the result; the exit
code is 1 if memory or descriptors grow or a reply is lost. --summary FILE prints the short record of a log.
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
import traceback
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from copfl import wire
from copfl.core.algorithm import blank_samples, example_output
from copfl.federation.node.incoming import decode
from copfl.federation.protocol.messages import HELLO, Content, Field, Reply
from copfl.federation.protocol.settings import settings_of
from copfl.federation.server.folder import ServerFolder
from copfl.federation.server.rounds import new_server

SIZES = struct.Struct("!III")  # of the envelope, the head and the body
MAX_GROWTH = 8.0  # MiB from the second to the last quarter of the time
FAULTS = {"gone": 0.7, "twice": 0.7, "damaged": 0.1, "replayed": 0.1, "late": 0.004}  # probability in a round
REASONS = {"damaged": "damaged on its way", "replayed": "its round is", "late": "no reply within"}


def config(nodes: int, deadline: float) -> dict[str, Any]:
    """The run config of both processes; the time ends the run, not the number of rounds."""
    return {
        "session.run": "load",
        "run.rounds": 10**9,
        "run.clients": nodes,
        "network.deadline": deadline,
        "algorithm.name": "copfl",
        "model.name": "mlp",
        "samples.shape": [1, 8, 8],
        "samples.mean": [0.3],
        "samples.std": [0.37],
        "model.width": 16,
        "network.wire": "fp32",
    }


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


# The server


def framed(envelope: dict[str, Any], content: Content) -> bytes:
    """One message as bytes."""
    head, body = content
    parts = json.dumps(envelope).encode(), head.encode(), body
    return SIZES.pack(*map(len, parts)) + b"".join(parts)


class Sockets:
    """A transport over TCP: a node is a connection."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.connections: dict[int, socket.socket] = {}  # by node
        self.unread: dict[int, bytearray] = {}  # by node: the start of an incomplete message
        self.inbox: dict[str, Reply] = {}  # by message id
        self.message_ids, self.node_ids = itertools.count(), itertools.count(1)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def nodes(self) -> list[int]:
        self._poll()
        return list(self.connections)

    def send(self, node: int, request: str, content: Content, seconds: float) -> str:
        message_id = str(next(self.message_ids))
        connection = self.connections.get(node)
        if connection is None:
            return message_id  # never answered: it has just disconnected
        try:
            connection.settimeout(60)  # the nodes' process always reads; this waits for its buffer only
            connection.sendall(framed({"id": message_id, "request": request}, content))
            connection.setblocking(False)
        except OSError:
            self._drop(node)
        return message_id

    def replies(self, message_ids: Collection[str]) -> list[Reply]:
        self._poll()
        return [self.inbox.pop(message_id) for message_id in message_ids if message_id in self.inbox]

    def discard(self) -> int:
        """Number of replies to messages that are not pending any more; they are removed, as Flower does."""
        count = len(self.inbox)
        self.inbox.clear()
        return count

    def _poll(self) -> None:
        for key, _ in self.selector.select(0):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._accept(self.listener.accept()[0])
            else:
                self._read(key.data)

    def _accept(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        node = next(self.node_ids)
        self.connections[node], self.unread[node] = connection, bytearray()
        self.selector.register(connection, selectors.EVENT_READ, node)

    def _read(self, node: int) -> None:
        unread = self.unread[node]
        try:
            while True:
                content = self.connections[node].recv(1 << 16)
                if not content:
                    return self._drop(node)
                unread += content
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(node)
        while len(unread) >= SIZES.size:
            envelope, head, body = SIZES.unpack_from(unread)
            ends = list(itertools.accumulate((SIZES.size, envelope, head, body)))
            if len(unread) < ends[3]:
                break
            message_id = json.loads(unread[ends[0] : ends[1]])["id"]
            content = unread[ends[1] : ends[2]].decode(), bytes(unread[ends[2] : ends[3]])
            self.inbox[message_id] = Reply(message_id, content)
            del unread[: ends[3]]

    def _drop(self, node: int) -> None:
        connection = self.connections.pop(node)
        self.selector.unregister(connection)
        connection.close()
        del self.unread[node]

    def close(self) -> None:
        for node in list(self.connections):
            self._drop(node)
        self.selector.close()
        self.listener.close()


class Load:
    """The counts and the samples of the server's process."""

    def __init__(self, nodes: int, transport: Sockets, nodes_pid: int) -> None:
        self.nodes, self.transport = nodes, transport
        self.pids = {"server": os.getpid(), "nodes": nodes_pid}
        self.count: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  # by reason
        self.samples: list[dict[str, Any]] = []
        self.started = self.sampled = time.monotonic()
        self.rounds_sampled = 0

    def add(self, record: dict[str, Any]) -> None:
        """Counts one round."""
        self.count["rounds"] += 1
        self.count["asked"] += self.nodes
        self.count["counted"] += len(record["clients"])
        self.count["left out"] += len(record["left_out"])
        self.count["void"] += self.transport.discard()  # second and late answers
        self.count["bytes"] += record["bytes"]["up"] + record["bytes"]["down"]
        for text in record["why"].values():
            self.left_out[next((name for name, part in REASONS.items() if part in text), text)] += 1

    def sample(self) -> dict[str, Any]:
        now, rounds = time.monotonic(), self.count["rounds"]
        self.samples.append(
            {
                "minutes": round((now - self.started) / 60, 2),
                **{f"{side}_mib": memory(pid) for side, pid in self.pids.items()},
                **{f"{side}_fds": descriptors(pid) for side, pid in self.pids.items()},
                "rounds_per_s": round((rounds - self.rounds_sampled) / (now - self.sampled), 3),
                "connected": len(self.transport.connections),
                **self.count,
            }
        )
        self.sampled, self.rounds_sampled = now, rounds
        return self.samples[-1]

    def growth(self, side: str) -> tuple[float, float]:
        """MiB from the second to the last quarter, and MiB per hour after the first quarter."""
        values = [sample[f"{side}_mib"] for sample in self.samples]
        quarter = max(1, len(values) // 4)
        second = values[quarter : 2 * quarter] or values
        growth = statistics.fmean(values[-quarter:]) - statistics.fmean(second)
        minutes = [sample["minutes"] for sample in self.samples[quarter:]]
        slope = float(np.polyfit(minutes, values[quarter:], 1)[0]) * 60 if len(minutes) > 1 else 0.0
        return round(growth, 2), round(slope, 2)

    def descriptors(self, side: str) -> list[int]:
        """The first and the last number, without connections: a node may have just disconnected."""
        first, last = self.samples[0], self.samples[-1]
        return [s[f"{side}_fds"] - (s["connected"] if side == "server" else 0) for s in (first, last)]

    def result(self, injected: dict[str, int]) -> dict[str, Any]:
        """The growth of memory and descriptors, and the number of lost replies."""
        sides, seconds = tuple(self.pids), time.monotonic() - self.started
        growth = {side: self.growth(side) for side in sides}
        fds = {side: self.descriptors(side) for side in sides}
        # All that were asked must count, except where a fault prevents it.
        lost = self.count["asked"] - sum(injected[name] for name in REASONS) - self.count["counted"]
        all_named = self.left_out == Counter({name: injected[name] for name in REASONS})
        is_constant = max(mib for mib, _ in growth.values()) <= MAX_GROWTH
        is_closed = fds["server"][1] <= fds["server"][0] and abs(fds["nodes"][1] - fds["nodes"][0]) <= 2
        return {
            "passed": lost == 0 and all_named and is_constant and is_closed,
            "hours": round(seconds / 3600, 3),
            "nodes": self.nodes,
            "rounds": self.count["rounds"],
            "rounds_per_s": round(self.count["rounds"] / seconds, 3),
            "replies_counted": self.count["counted"],
            "lost": lost,
            "void": self.count["void"],
            "faults": injected,
            "left_out": dict(self.left_out),
            "all_named": all_named,
            "gigabytes": round(self.count["bytes"] / 1e9, 2),
            "memory_growth_mib": {side: growth[side][0] for side in sides},
            "memory_slope_mib_per_hour": {side: growth[side][1] for side in sides},
            "memory_mib": {
                side: [s[f"{side}_mib"] for s in (self.samples[0], self.samples[-1])] for side in sides
            },
            "descriptors_without_connections": fds,
        }


def serve(args: argparse.Namespace) -> int:
    """Runs rounds for some minutes; 1 if the result is not as expected."""
    torch.set_num_threads(1)
    settings, transport = settings_of(config(args.nodes, args.deadline)), Sockets()
    options = ["--nodes", str(args.nodes), "--deadline", str(args.deadline)]
    command = [sys.executable, __file__, "--port", str(transport.port), *options]
    with (
        tempfile.TemporaryDirectory() as runs,
        open(args.log, "w", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

        load = Load(args.nodes, transport, process.pid)
        folder = ServerFolder(runs, "load", resume=False)
        for record in new_server(settings, transport, folder, pause=0.05).rounds():
            load.add(record)
            now = time.monotonic()
            if now - load.sampled >= args.every or load.count["rounds"] == 1:
                write(load.sample())
            if now - load.started >= args.minutes * 60:
                break
            time.sleep(args.pause)  # without it, the test uses two whole cores
        seconds = time.monotonic() - load.started
        cores = {side: round(seconds_of(pid) / seconds, 2) for side, pid in load.pids.items()}
        output, _ = process.communicate("done\n", timeout=120)
        transport.close()
        result = load.result(json.loads(output))
        write({"result": {**result, "cores": cores}})
    return 0 if result["passed"] else 1


# The nodes


class Nodes:
    """All nodes in one process; each has its own connection."""

    def __init__(self, port: int, nodes: int, deadline: float) -> None:
        torch.set_num_threads(1)
        self.port, self.deadline = port, deadline
        self.settings = settings_of(config(nodes, deadline))
        algorithm, task = self.settings.algorithm, self.settings.task
        blank = blank_samples(self.settings.shape, task.device)
        self.like = example_output(algorithm, task, blank, augment=False, clients=nodes).upload
        self.injected: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
        self.draw = random.Random(8)
        self.noise = torch.Generator().manual_seed(8)
        size = self.settings.task.initial.numel()
        self.masks = [torch.zeros(size, dtype=torch.bool) for _ in range(nodes)]
        self.plans: dict[int, dict[int, str]] = {}  # round -> client -> fault

    def fault(self, round: int, client: int) -> str:
        """The fault of this client in this round; empty: none. A round has each fault at most once."""
        if round not in self.plans:
            self.plans = {round: {}}
            for name, probability in FAULTS.items():
                if round > 0 and self.draw.random() < probability:
                    self.plans[round].setdefault(self.draw.randrange(len(self.masks)), name)
        fault = self.plans[round].pop(client, "")
        if fault:
            self.injected[fault] += 1
        return fault

    def upload(self, config: dict[str, Any], content: Content, fault: str) -> wire.Packet:
        """The client's answer, decoded and encoded as on a node: the global model with a small change."""
        head, down, about = decode(self.settings, config, wire.Packet(*content))
        mask = self.masks[head.client]
        if self.draw.random() < 0.02 and float(mask.float().mean()) < 0.4:
            mask[torch.randint(len(mask), (1,), generator=self.noise)] = True
        w = down.w + 1e-3 * torch.randn(len(mask), generator=self.noise)
        shared = type(self.like.shared)(torch.where(mask, 0, w), mask)
        return wire.encode(
            self.like._replace(shared=shared, score=torch.ones_like(self.like.score)),
            head._replace(kind="upload", round=head.round - (fault == "replayed")),
            self.settings.federation.network.wire,
            receiver_masks=about.get(Field.KNOWN_MASKS),
            about={Field.NOTE: "", Field.METRICS: {"loss": self.draw.random(), "weight": 1.0}},
        )

    async def serve(self, client: int) -> None:
        """One node without end: it connects again after it has disconnected."""
        config = {"client": client, "state-dir": "."}
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                while True:
                    sizes = SIZES.unpack(await reader.readexactly(SIZES.size))
                    parts = [await reader.readexactly(size) for size in sizes]
                    envelope, content = json.loads(parts[0]), (parts[1].decode(), parts[2])
                    if envelope["request"] == HELLO:
                        writer.write(framed(envelope, (json.dumps({"client": client}), b"")))
                        continue
                    fault = self.fault(json.loads(content[0])["round"], client)
                    if fault == "gone":
                        break
                    await self.reply(writer, envelope, self.upload(config, content, fault), fault)
            except (asyncio.IncompleteReadError, ConnectionError):
                await asyncio.sleep(0.2)
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def reply(
        self, writer: asyncio.StreamWriter, envelope: dict[str, Any], packet: wire.Packet, fault: str
    ) -> None:
        body = packet.body
        if fault == "damaged":
            body = body[:-1] + bytes([body[-1] ^ 1])
        message = framed(envelope, (packet.head, body))
        if fault == "late":
            await asyncio.sleep(self.deadline + 2)
        writer.write(message)
        if fault == "twice":
            await asyncio.sleep(self.draw.choice((0, 0.3)))
            writer.write(message)
        await writer.drain()

    async def run(self) -> None:
        """Runs the nodes until a line arrives on stdin, and prints the number of injected faults."""
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        nodes = [asyncio.create_task(self.serve(client)) for client in range(len(self.masks))]
        ended, _ = await asyncio.wait([end, *nodes], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if error := task.exception():  # of a node: a bug here, and the server would wait without end
                traceback.print_exception(error)
                os._exit(1)
        for task in nodes:
            task.cancel()
        await asyncio.gather(*nodes, return_exceptions=True)
        print(json.dumps(self.injected))


def summary(log: Path, points: int = 13) -> dict[str, Any]:
    """The short record of a finished log: the result and a few samples."""
    *lines, last = [json.loads(line) for line in log.read_text().splitlines()]
    if "result" not in last:
        raise SystemExit(f"{log} has no result: the run has not ended")
    step = max(1, (len(lines) - 1) // (points - 1))
    return {**last, "samples": [*lines[:-1:step], lines[-1]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=60)
    add("--nodes", type=int, default=200)
    add("--pause", type=float, default=1.0, help="seconds between rounds")
    add("--every", type=float, default=30, help="seconds between two lines")
    add("--deadline", type=float, default=60, help="seconds that a round waits for a reply")
    add("--log", type=Path, default=Path("load.jsonl"))
    add("--port", type=int, help=argparse.SUPPRESS)  # of the server: this process is the nodes
    add("--summary", type=Path, metavar="FILE", help="print the short record of this log, and nothing else")
    args = parser.parse_args()
    if args.summary:
        print(json.dumps(summary(args.summary), indent=1))
        return 0
    if args.port:
        asyncio.run(Nodes(args.port, args.nodes, args.deadline).run())
        return 0
    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
