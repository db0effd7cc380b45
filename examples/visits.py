"""A made-up table, so that the commands of README.md run as they stand: 720 visits to four clinics, and who came back.

    python examples/visits.py      writes visits.csv, and new.csv: the clinic Hafen's visits without the answer

The clinics differ in how many come back and, at Nordring, in age; everything else acts alike in all of them.
"""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

COLUMNS = (
    "patient_id",
    "clinic",
    "admission_date",
    "age",
    "sex",
    "admission",
    "previous_visits",
    "haemoglobin",
    "days",
    "readmitted",
)
CLINICS = {"Lindenhof": (320, -1.0), "Hafen": (210, -0.2), "Westpark": (120, -0.6), "Nordring": (70, 0.4)}


def visits() -> list[list[object]]:
    """The rows, in an order of chance; of each clinic: the number of its visits and the level of its log odds."""
    chance = random.Random(3)
    rows: list[list[object]] = []
    for clinic, (count, level) in CLINICS.items():
        for _ in range(count):
            age = round(chance.gauss(70 if clinic == "Nordring" else 62, 14))
            sex = chance.choice(["m", "f"])
            admission = chance.choice(["emergency", "planned", "planned"])
            previous = min(9, int(chance.expovariate(0.8)))
            haemoglobin = round(chance.gauss(13, 1.8), 1)
            days = max(1, round(chance.expovariate(1 / 6)))
            odds = level - 0.4 + 0.03 * (age - 62) + 0.45 * previous - 0.25 * (haemoglobin - 13)
            odds += 0.05 * (days - 6) + (0.6 if admission == "emergency" else 0)
            readmitted = "yes" if chance.random() < 1 / (1 + math.exp(-odds)) else "no"
            date = f"2024-{chance.randint(1, 12):02d}-{chance.randint(1, 28):02d}"
            measured = "" if chance.random() < 0.08 else haemoglobin
            patient = 1001 + len(rows)
            rows.append([patient, clinic, date, age, sex, admission, previous, measured, days, readmitted])
    chance.shuffle(rows)
    return rows


def write(path: Path, columns: tuple[str, ...], rows: list[list[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    table = visits()
    write(Path("visits.csv"), COLUMNS, table)
    write(Path("new.csv"), COLUMNS[:-1], [row[:-1] for row in table if row[1] == "Hafen"])
