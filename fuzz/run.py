"""Feeds damaged and made-up input to whatever reads what comes from outside: `python fuzz/run.py`

    python fuzz/run.py                          all targets, a million cases in all, dealt by how quick each is
    python fuzz/run.py set npz --cases 20000    these targets, so many cases each
    python fuzz/run.py set --atheris            one target under atheris, which looks for new paths through the code
    python fuzz/run.py set --replay FILE        one input again

Each case is a good example that was changed in a few places (bits, bytes, pieces, numbers, words of the format), drawn
from --seed: the same seed gives the same cases. Only a CopflError may come out; a case may take --seconds of processor
time and --mib of memory. What fails is written to --out by a name made of its content, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

if "--atheris" in sys.argv:  # it must see our code as it is imported, to know which paths there are
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    seen = atheris.instrument_imports(include=["copfl"])
else:
    seen = contextlib.nullcontext()
with seen:
    from fuzz.targets import TARGETS, Target

    from copfl.errors import CopflError

NUMBERS = (
    b"0", b"-1", b"1", b"2", b"255", b"256", b"65536", b"2147483648", b"4294967295", b"9223372036854775807",
    b"18446744073709551616", b"1e999", b"-1e999", b"1e308", b"1e-320", b"nan", b"NaN", b"inf", b"Infinity", b"0x10",
    b"-0.0",    b"9" * 400, b"9" * 5000, b"null", b"true", b"false", b"[]", b"{}", b'""',
)  # fmt: skip
PIECES = (
    b"\0", b"\xff", b"\n", b"\r", b" ", b"=", b".", b",", b":", b'"', b"'", b"[", b"]", b"{", b"}", b"#", b"\\", b"/",
    b"..",     b"[" * 3000, b'{"a":' * 3000, b"\xed\xa0\x80", "é".encode(), b"name", b"value", b"round", b"\x80\x02",
    b"PK\3\4", b"-",
)  # fmt: skip


class Slow(BaseException):
    """A case that takes too long."""


def changed(draw: random.Random, seeds: list[bytes]) -> bytes:
    """One of the seeds with a few changes."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
        place = draw.randrange(len(data) + 1)
        end = min(len(data), place + draw.choice((1, 1, 2, 4, 8, 64)))
        how = draw.randrange(10)
        if how == 0 and data:
            data[place % len(data)] ^= 1 << draw.randrange(8)
        elif how == 1 and data:
            data[place % len(data)] = draw.randrange(256)
        elif how == 2:
            del data[place:end]
        elif how == 3:
            data[place:place] = data[place:end]
        elif how == 4:
            data[place:place] = draw.choice(PIECES)
        elif how == 5:
            data[place:end] = draw.choice(PIECES)
        elif how in (6, 7) and (found := list(re.finditer(rb"-?\d[\d.e+]*", bytes(data)))):
            number = draw.choice(found)
            data[number.start() : number.end()] = draw.choice(NUMBERS)
        elif how == 8:
            other = draw.choice(seeds)
            cut = draw.randrange(len(other) + 1)
            data[place:] = other[cut:]
        else:
            del data[place:]
    return bytes(data)


@contextlib.contextmanager
def limits(mib: int) -> Iterator[None]:
    """Inside, this process may not take more than so much memory beyond what it has."""
    have = int(
        next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize")).split()[
            1
        ]
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (have * 1024 + mib * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tried(target: Target, data: bytes, seconds: float) -> tuple[str, str]:
    """("accepted" | "refused" | "failed", where and why)."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        target.one(data)
        return "accepted", ""
    except CopflError as error:
        text = str(error)
        if not text or "Traceback" in text:
            return "failed", f"an error that says nothing: {text!r}"
        return "refused", ""
    except (Exception, Slow) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "copfl" in f.filename or "fuzz" in f.filename] or list(frames)
        return (
            "failed",
            f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}: {str(error)[:200]}",
        )
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz(name: str, cases: int, seed: int, seconds: float, out: Path | None) -> dict[str, Any]:
    """The counts of one target."""
    target, draw = TARGETS[name], random.Random(f"{name} {seed}")
    seeds, count, failures = target.seeds(), Counter[str](), dict[str, str]()
    for data in seeds:  # what is good is read, or the rest means little
        if tried(target, data, seconds)[0] == "failed":
            print(f"{name}: its own example fails: {tried(target, data, seconds)[1]}", flush=True)
    begun = time.process_time()
    for _ in range(cases):
        data = changed(draw, seeds)
        how, why = tried(target, data, seconds)
        count[how] += 1
        if how == "failed":
            place = ":".join(why.split(":")[:2])
            if place not in failures:  # one input for each kind and place
                failures[place] = hashlib.sha256(data).hexdigest()[:12]
                print(f"{name}: {why} ({failures[place]})", flush=True)
                if out is not None:
                    out.mkdir(parents=True, exist_ok=True)
                    (out / f"{name}-{failures[place]}").write_bytes(data)
    took = time.process_time() - begun
    result = {"cases": cases, "seed": seed, **{how: count[how] for how in ("accepted", "refused", "failed")}}
    return {**result, "seconds": round(took, 1)}


def under_atheris(name: str, cases: int, seconds: float) -> NoReturn:
    target = TARGETS[name]

    def one(data: bytes) -> None:
        with contextlib.suppress(CopflError):
            target.one(data)

    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{name}-"))
    for place, data in enumerate(target.seeds()):
        (corpus / f"seed-{place}").write_bytes(data)
    atheris.Setup(
        [sys.argv[0], f"-runs={cases}", f"-timeout={int(seconds)}", "-rss_limit_mb=4096", str(corpus)], one
    )
    atheris.Fuzz()
    raise AssertionError("atheris ends the process")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument(
        "--cases", type=int, help="for each named target; for all: in total, default a million"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10, help="of processor time for one case")
    parser.add_argument(
        "--mib", type=int, default=1024, help="memory beyond what the process has at the start"
    )
    parser.add_argument("--out", type=Path, help="where inputs that fail are kept")
    parser.add_argument("--json", type=Path, help="where the counts go; a file that is there is added to")
    parser.add_argument(
        "--atheris", action="store_true", help="let atheris choose the cases (pip install atheris)"
    )
    parser.add_argument("--replay", type=Path, help="run the one target on this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def slow(*_: object) -> NoReturn:
        raise Slow(f"more than {given.seconds:g} s")

    signal.signal(signal.SIGPROF, slow)
    if given.replay:
        TARGETS[given.targets[0]].one(given.replay.read_bytes())
        return 0
    if given.atheris:
        under_atheris(given.targets[0], given.cases or 10_000, given.seconds)
    shares = sum(target.share for target in TARGETS.values())
    whole = {
        name: int((given.cases or 10**6) * target.share / shares) + 1 for name, target in TARGETS.items()
    }
    wanted = dict.fromkeys(given.targets, given.cases or 10000) or whole
    counts: dict[str, list[Any]] = (
        json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    )
    failed = 0
    for name, cases in wanted.items():
        TARGETS[name].seeds()  # what is made once is made outside the limit
        with limits(given.mib):
            result = fuzz(name, cases, given.seed, given.seconds, given.out)
        print(
            f"{name:16} " + ", ".join(f"{value:,} {key}" for key, value in result.items() if key != "seed"),
            flush=True,
        )
        counts.setdefault(name, []).append(result)
        failed += result["failed"]
        if given.json:
            given.json.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"{sum(wanted.values()):,} cases, {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
