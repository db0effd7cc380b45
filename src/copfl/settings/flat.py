"""Settings as Flower's run config has them: one level of keys with a dot; values are words and numbers.

A server writes a run config with it, and a node reads it.
"""

import json
from collections.abc import Mapping
from typing import Any

from copfl.settings.checking import SettingError
from copfl.settings.toml import Tables

JSON = ("[", '"')  # how a text begins that is JSON


def flattened(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"run.rounds": 5} of {"run": {"rounds": 5}}.

    A list is its JSON. So is a text that begins like JSON: `nested` gives back what was there.
    """
    return {f"{title}.{key}": flat(value) for title, table in tables.items() for key, value in table.items()}


def flat(value: Any) -> Any:
    """A value as `flattened` writes it."""
    is_like_json = isinstance(value, str) and value.startswith(JSON)
    return json.dumps(value) if is_like_json or isinstance(value, list | tuple) else value


def nested(run_config: Mapping[str, Any]) -> Tables:
    """The tables of a run config, flat or with tables as in pyproject.toml; SettingError if it is none."""
    tables: Tables = {}
    for path, value in run_config.items():
        title, dot, key = path.partition(".")
        if not isinstance(value, Mapping) and not dot:
            raise SettingError(path, value, "is no setting; a setting is TABLE.KEY, such as run.rounds")
        entries = value if isinstance(value, Mapping) else {key: value}
        for name, entry in entries.items():
            table = tables.setdefault(title, {})
            if (dot and isinstance(value, Mapping)) or "." in str(name):
                raise SettingError(
                    f"{path}.{name}" if isinstance(value, Mapping) else path, None, "is no setting"
                )
            if name in table:
                raise SettingError(f"{title}.{name}", entry, "is given twice")
            table[name] = _unflat(f"{title}.{name}", entry)
    return tables


def _unflat(path: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(JSON):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SettingError(path, value, f"must be a list such as [1, 2], or a word ({error})") from error
