"""One typed description of a run: the records, and how layers of settings become one."""

from copfl.settings.checking import SettingError
from copfl.settings.schema import Run, RunSettings

__all__ = ["Run", "RunSettings", "SettingError"]
