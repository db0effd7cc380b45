"""A piece of a page as data: charts and tables that answer one question."""

from collections.abc import Sequence
from typing import NamedTuple

from copfl.charts import Chart
from copfl.tables import Table


class Section(NamedTuple):
    """Charts and tables that answer one question."""

    name: str  # the anchor
    short: str  # in the list of sections
    title: str
    charts: Sequence[Chart]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()  # above the charts
