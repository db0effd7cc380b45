"""Three sites' tables with other categories, orders of columns and missing values, and the pooled table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from copfl.data.contract.contract import Column, Contract

WARDS = {"north": ("heart", "lung"), "south": ("lung", "skin"), "west": ("skin", "bone", "heart")}
NUMBERS = ("age", "sodium", "income")
CONTRACT = Contract(
    missing="fill",
    columns=(
        Column(name="age", type="number", minimum=0, maximum=120),
        Column(name="sodium", type="number", minimum=100, maximum=200, missing=True),
        Column(name="income", type="number", minimum=0, maximum=1e10),
        Column(name="ward", type="category"),
    ),
    targets=(Column(name="outcome", type="category"),),
)
CANDIDATES = CONTRACT.replaced(
    {
        "ward": {"candidates": ("bone", "brain", "heart", "lung", "skin")},
        "outcome": {"candidates": ("dead", "ill", "well")},
    }
)


def rows_of(name: str, seed: int = 0) -> list[dict[str, object]]:
    """A site's rows."""
    draw = np.random.default_rng([seed, sorted(WARDS).index(name)])
    rows: list[dict[str, object]] = []
    for n in range(60 + 25 * sorted(WARDS).index(name)):
        ward = WARDS[name][n % len(WARDS[name])]
        age, sodium = int(draw.integers(20, 90)), round(float(draw.normal(140, 4)), 2)
        row: dict[str, object] = {"age": age, "sodium": "" if n % 9 == 4 else sodium}
        row |= {"income": f"{1e9 + float(draw.normal()):.6f}", "ward": ward, "note": f"{name}{n}"}
        rows.append(row | {"outcome": "ill" if age + 5 * (sodium - 140) > 60 else "well"})
    return rows


def write_rows(path: Path, rows: list[dict[str, object]], columns: list[str] | None = None) -> Path:
    columns = columns or list(rows[0])
    lines: list[list[object]] = [[*columns], *([row[name] for name in columns] for row in rows)]
    path.write_text("\n".join(",".join(map(str, line)) for line in lines) + "\n")
    return path


def write_sites(folder: Path) -> dict[str, list[Path]]:
    """Each site's tables of train and test rows; those of the south have their columns in another order."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in WARDS:
        columns = list(rows_of(name)[0])
        columns = columns[::-1] if name == "south" else columns
        files[name] = [
            write_rows(folder / f"{name}-{part}.csv", rows_of(name, seed), columns)
            for seed, part in enumerate(("train", "test"))
        ]
    return files


def write_pooled(folder: Path) -> list[Path]:
    """The tables of all sites' train and test rows."""
    return [
        write_rows(folder / f"all-{part}.csv", [row for name in WARDS for row in rows_of(name, seed)])
        for seed, part in enumerate(("train", "test"))
    ]
