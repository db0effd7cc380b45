"""What is compared, as people write it: algorithms with options, and seeds.

`compare`, `sweep`, `choose`, the bench and files of comparisons make entries here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from copfl.algorithms import ALGORITHMS
from copfl.core.algorithm import AnyAlgorithm
from copfl.errors import UsageError
from copfl.settings import arguments, content, named_code, user_code
from copfl.settings.arguments import plain
from copfl.settings.checking import parameters_of
from copfl.settings.components import factory_of, usual_optimizer
from copfl.settings.record import without_digest
from copfl.settings.toml import Tables
from copfl.settings.values import layer_of

Base = Mapping[str, Mapping[str, Any]]  # tables for every entry

VALIDATION = 0.2  # of each client's training samples
MOST_SEEDS = 10_000  # more is taken for a mistake
# What every row of a comparison has in common; None: the whole table.
COMMON: dict[str, tuple[str, ...] | None] = {
    "data": None,
    "partition": None,
    "run": ("seed", "clients", "new_clients"),
}


class Entry(NamedTuple):
    """A row of the table: an algorithm, and the settings for it alone."""

    name: str
    label: str
    settings: Tables
    optional: bool = False  # left out, if it cannot train on the task

    @property
    def title(self) -> str:
        """Of the table of its own settings, as people write it: the name, without the hash of a class of a program."""
        return without_digest(self.name)


Row = str | Entry | AnyAlgorithm | type[AnyAlgorithm]
Rows = Row | Sequence[Row]  # as an argument: one, or several


def rows_of(rows: Rows) -> list[Row]:
    """The rows, also where there is one without a list."""
    arguments.check_no_data_set(rows)
    several = isinstance(rows, Iterable) and not isinstance(rows, str | Entry | Mapping)
    return list(rows) if several else [rows]  # type: ignore[arg-type, list-item]


def entries_of(rows_or_texts: Rows) -> list[Entry]:
    """The rows of a table.

    Args:
        rows_or_texts: Texts such as "copfl,copfl:score=none,mymodule:FedMine:lr=0.001", entries, and algorithms as
            values or classes. "all" are all algorithms of copfl that can train on the task.
    """
    rows = list[Entry]()
    for row in rows_of(rows_or_texts):
        if isinstance(row, Entry):
            rows.append(checked_entry(row))
        elif not isinstance(row, str):
            rows.append(checked_entry(entry_of_value(arguments.algorithm_of(row))))
        else:
            for text in at_commas(row):
                every = [Entry(name, name, {}, optional=True) for name in ALGORITHMS]
                rows += every if text == "all" else [entry_of(text)]
    return rows


def modules_of(rows_or_texts: Rows) -> list[str]:
    """The modules of code that these rows name as texts and values; an Entry may come from a file, and names none."""
    modules = list[str]()
    for row in rows_of(rows_or_texts):
        if isinstance(row, str):
            words = [word for text in at_commas(row) for word in re.split(arguments.OPTIONS, text)]
            modules += named_code.modules_in([word.partition("=")[2] or word for word in words])
        elif not isinstance(row, Entry):
            kind = row if isinstance(row, type) else type(row)
            modules += [kind.__module__, type(getattr(row, "optimizer", row)).__module__]
    return modules


def entry_of_value(algorithm: AnyAlgorithm) -> Entry:
    """The entry of an algorithm as a value; its optimizer counts if it is not the class's own."""
    layer, title = layer_of("algorithm", algorithm), type(algorithm).__name__
    if not layer:  # more than plain options
        return Entry(content.keep_algorithm(algorithm), title, {})
    name = str(layer["algorithm"].pop("name"))
    usual = parameters_of(type(algorithm))
    options = {key: value for key, value in layer["algorithm"].items() if value != usual[key].default}
    settings: Tables = {"algorithm": options} if options else {}
    if getattr(algorithm, "optimizer", None) != usual_optimizer(name):
        settings["optimizer"] = layer["optimizer"]
    title = name if name in ALGORITHMS else title
    return Entry(name, f"{title} {described(settings, 'algorithm')}".strip(), settings)


def entry_of(text: str) -> Entry:
    """The entry NAME:KEY=VALUE:KEY=VALUE; a key is the algorithm's own, `lr`, `optimizer` or TABLE.KEY."""
    name, settings = arguments.spelled(text)
    user_code.check_no_file("algorithm", name)
    before, colon, _ = name.partition(":")
    if "=" in name or (colon and (before in ALGORITHMS or not user_code.is_reference(name))):
        raise UsageError(f'entry "{text}" must have the form NAME or NAME:KEY=VALUE:KEY=VALUE')
    label = " ".join(part.strip() for part in re.split(arguments.OPTIONS, text))
    return checked_entry(Entry(name, label, settings))


def checked_entry(entry: Entry) -> Entry:
    """The entry, if there is such an algorithm and it does not set what all rows have in common."""
    factory_of("algorithm", entry.name)
    check_own(
        entry.label,
        [(table, key) for table, table_settings in entry.settings.items() for key in table_settings],
    )
    return entry


def check_own(who: str, keys: Iterable[tuple[str, str]]) -> None:
    """Nothing, if none of these keys is one that all rows must have in common.

    Args:
        who: Sets them, for the error.
        keys: The table and the key of each setting.
    """
    for table, key in keys:
        if table in COMMON and key in (COMMON[table] or key):
            advice = "set it for all of them, or sweep over it"
            raise UsageError(f"{who}: {table}.{key} is the same for every row of a comparison; {advice}")


def described(tables: Mapping[str, Mapping[str, Any]], *silent: str) -> str:
    """Such as "lr=0.01 rate=0.05": the settings, with the title of their table unless it is `silent`.

    Args:
        tables: Settings by title and key.
        silent: Titles that are left out.
    """
    flat = [(t, key, value) for t, table in tables.items() for key, value in table.items()]
    words = [(k if t in silent else f"{t}.{k}", f"{v:g}" if isinstance(v, float) else v) for t, k, v in flat]
    return " ".join(f"{key}={value}" for key, value in words)


def seeds_of(text: str, option: str = "--seeds") -> list[int]:
    """The seeds in "0,1,2" or "0-4".

    Args:
        text: From the command line.
        option: Where it stands, for the error.
    """
    seeds: list[int] = []
    for seed_or_range in at_commas(text):
        ends = re.fullmatch(r"([0-9]{1,19})(?:-([0-9]{1,19}))?", seed_or_range)
        if ends is None:
            raise UsageError(
                f'{option}: "{seed_or_range}" is no seed; write whole numbers such as 0,1,2 or 0-4'
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last - first >= MOST_SEEDS:
            raise UsageError(f'{option} "{text}" names too many seeds; at most {MOST_SEEDS:,} are allowed')
        seeds += range(first, last + 1)
    return check_seeds(seeds, option)


def check_seeds(seeds: Sequence[int], option: str = "seeds") -> list[int]:
    """The seeds, if there are any and none is there twice.

    Args:
        seeds: As they were named.
        option: Where they stand, for the error.
    """
    if isinstance(seeds, int):
        raise UsageError(f"{option}={seeds} is a number; name the seeds, as {option}=range({seeds})")
    seeds = [plain(seed) for seed in seeds]
    if not seeds:
        raise UsageError(f"{option} names no seed; name one at least, better three or more: 0,1,2")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"{option} names a seed twice: {', '.join(map(str, seeds))}")
    return seeds


def at_commas(text: str) -> list[str]:
    """The parts between commas, but not those inside brackets or quotes; empty ones are left out."""
    texts = re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^,"'\[]|["'\[])+""", text)
    return [one.strip() for one in texts if one.strip()]
