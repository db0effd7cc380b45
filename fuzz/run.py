"""Feeds damaged and invented input to every reader of foreign bytes: `python fuzz/run.py`

    python fuzz/run.py                          all targets, a million cases, most of them for fast targets
    python fuzz/run.py set npz --cases 20000    these targets, 20,000 cases each
    python fuzz/run.py set --atheris            one target under atheris, a fuzzer guided by coverage
    python fuzz/run.py set --replay FILE        one target with one input

Each case is a valid example with a few changes: bits, bytes, pieces, numbers, tokens of the format. The cases
depend on --seed alone. A target may raise only a CopflError, within --seconds of processor time and --mib of
memory.
An input that fails is written to --out under a name made of its hash, and the exit code is 1.
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

if "--atheris" in sys.argv:  # it instruments modules while they are imported
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    instrumented = atheris.instrument_imports(include=["copfl"])
else:
    instrumented = contextlib.nullcontext()
with instrumented:
    from fuzz.targets import TARGETS, Target

    from copfl.errors import CopflError

INTEGERS = b"0 -1 1 2 255 256 65536 2147483648 4294967295 9223372036854775807 18446744073709551616 0x10"
FLOATS = b"1e999 -1e999 1e308 1e-320 nan NaN inf Infinity -0.0"
OTHERS = b'null true false [] {} ""'
NUMBERS = (*INTEGERS.split(), *FLOATS.split(), *OTHERS.split(), b"9" * 400, b"9" * 5000)
CHARACTERS = [bytes([code]) for code in b"\0\xff\n\r =.,:\"'[]{}#\\/-"]
WORDS = (b"..", b"name", b"value", b"round", b"\x80\x02", b"PK\3\4", b"\xed\xa0\x80", "é".encode())
PIECES = (*CHARACTERS, *WORDS, b"[" * 3000, b'{"a":' * 3000)


class Slow(BaseException):
    """A case that takes too long."""


def changed(draw: random.Random, examples: list[bytes]) -> bytes:
    """One of the examples with a few changes."""
    data = bytearray(draw.choice(examples))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice((1, 1, 2, 4, 8, 64)))
        change = draw.randrange(10)
        if change == 0 and data:
            data[start % len(data)] ^= 1 << draw.randrange(8)
        elif change == 1 and data:
            data[start % len(data)] = draw.randrange(256)
        elif change == 2:
            del data[start:end]
        elif change == 3:
            data[start:start] = data[start:end]
        elif change == 4:
            data[start:start] = draw.choice(PIECES)
        elif change == 5:
            data[start:end] = draw.choice(PIECES)
        elif change in (6, 7) and (numbers := list(re.finditer(rb"-?\d[\d.e+]*", bytes(data)))):
            number = draw.choice(numbers)
            data[number.start() : number.end()] = draw.choice(NUMBERS)
        elif change == 8:
            other = draw.choice(examples)
            data[start:] = other[draw.randrange(len(other) + 1) :]
        else:
            del data[start:]
    return bytes(data)


@contextlib.contextmanager
def memory_limit(mib: int) -> Iterator[None]:
    """Inside, this process may allocate at most so much memory in addition to its present size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mib * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(target: Target, data: bytes, seconds: float) -> tuple[str, str]:
    """accepted, refused or failed; and for a failure the reason and its place in the code."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        target.read(data)
        return "accepted", ""
    except CopflError as error:
        text = str(error)
        if not text or "Traceback" in text:
            return "failed", f"an error without a reason: {text!r}"
        return "refused", ""
    except (Exception, Slow) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "copfl" in f.filename or "fuzz" in f.filename] or list(frames)
        place = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
        return "failed", f"{type(error).__name__} in {place}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fuzz(name: str, cases: int, seed: int, seconds: float, out: Path | None) -> dict[str, Any]:
    """The counts of one target."""
    target, draw = TARGETS[name], random.Random(f"{name} {seed}")
    examples, count, failures = target.examples(), Counter[str](), dict[str, str]()
    for data in examples:
        result, reason = outcome(target, data, seconds)
        if result == "failed":
            print(f"{name}: a valid example fails: {reason}", flush=True)
    started = time.process_time()
    for _ in range(cases):
        data = changed(draw, examples)
        result, reason = outcome(target, data, seconds)
        count[result] += 1
        place = ":".join(reason.split(":")[:2])
        if result == "failed" and place not in failures:  # one input per exception and place
            failures[place] = hashlib.sha256(data).hexdigest()[:12]
            print(f"{name}: {reason} ({failures[place]})", flush=True)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{name}-{failures[place]}").write_bytes(data)
    return {
        "cases": cases,
        "seed": seed,
        **{result: count[result] for result in ("accepted", "refused", "failed")},
        "seconds": round(time.process_time() - started, 1),
    }


def under_atheris(name: str, cases: int, seconds: float) -> NoReturn:
    target = TARGETS[name]

    def read(data: bytes) -> None:
        with contextlib.suppress(CopflError):
            target.read(data)

    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{name}-"))
    for number, data in enumerate(target.examples()):
        (corpus / f"example-{number}").write_bytes(data)
    options = [f"-runs={cases}", f"-timeout={int(seconds)}", "-rss_limit_mb=4096", str(corpus)]
    atheris.Setup([sys.argv[0], *options], read)
    atheris.Fuzz()
    raise AssertionError("atheris ends the process")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("targets", nargs="*", help="default: all")
    add("--cases", type=int, help="for each named target; for all targets: in total (default: a million)")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=10, help="processor time of one case")
    add("--mib", type=int, default=1024, help="memory in addition to the size of the process at the start")
    add("--out", type=Path, help="folder for inputs that fail")
    add("--json", type=Path, help="file for the counts; those of an existing file are extended")
    add("--atheris", action="store_true", help="let atheris choose the cases (pip install atheris)")
    add("--replay", type=Path, help="run the one target with this file")
    return parser


def main() -> int:
    args = parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def interrupt(*_: object) -> NoReturn:
        raise Slow(f"more than {args.seconds:g} s")

    signal.signal(signal.SIGPROF, interrupt)
    if args.replay:
        TARGETS[args.targets[0]].read(args.replay.read_bytes())
        return 0
    if args.atheris:
        under_atheris(args.targets[0], args.cases or 10_000, args.seconds)
    cases = dict.fromkeys(args.targets, args.cases or 10_000)
    if not cases:
        factor = (args.cases or 10**6) / sum(target.weight for target in TARGETS.values())
        cases = {name: int(factor * target.weight) + 1 for name, target in TARGETS.items()}
    has_counts = args.json and args.json.exists()
    counts: dict[str, list[Any]] = json.loads(args.json.read_text()) if has_counts else {}
    failed = 0
    for name, number in cases.items():
        TARGETS[name].examples()  # runs and files made once do not count against the limit
        with memory_limit(args.mib):
            result = fuzz(name, number, args.seed, args.seconds, args.out)
        text = ", ".join(f"{value:,} {key}" for key, value in result.items() if key != "seed")
        print(f"{name:16} {text}", flush=True)
        counts.setdefault(name, []).append(result)
        failed += result["failed"]
        if args.json:
            args.json.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"{sum(cases.values()):,} cases, {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
