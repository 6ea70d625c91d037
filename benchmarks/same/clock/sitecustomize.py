"""A clock that stands at SAME_CLOCK, and a disk that neither fills nor empties.

It stands first on PYTHONPATH of a compared command and does nothing where SAME_CLOCK is not set.
"""

import datetime
import os
import time
from typing import Any

if os.environ.get("SAME_CLOCK"):
    NOW = float(os.environ["SAME_CLOCK"])
    _localtime, _gmtime, _strftime = time.localtime, time.gmtime, time.strftime
    _stat, _statvfs = os.stat, os.statvfs

    class FixedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(NOW, tz)

    def stat(path: Any, **words: Any) -> os.stat_result:
        """With no time after the clock's: vjob asks a file that it just wrote for the time."""
        facts = _stat(path, **words)
        if facts.st_mtime <= NOW:
            return facts
        names = [name for name in dir(facts) if name.startswith("st_")]
        times = {name: NOW for name in names if name.endswith("time")}
        times_ns = {name: int(NOW * 1e9) for name in names if name.endswith("time_ns")}
        rest = {name: getattr(facts, name) for name in names}
        return os.stat_result(tuple(facts)[:10], {**rest, **times, **times_ns})

    def statvfs(path: Any) -> os.statvfs_result:
        facts = list(_statvfs(path))
        facts[2:8] = [1 << 30, 1 << 29, 1 << 29, 1 << 24, 1 << 23, 1 << 23]
        return os.statvfs_result(facts)

    time.time = lambda: NOW
    time.time_ns = lambda: int(NOW * 1e9)
    time.localtime = lambda seconds=NOW: _localtime(seconds)
    time.gmtime = lambda seconds=NOW: _gmtime(seconds)
    time.strftime = lambda form, moment=None: _strftime(form, moment or _localtime(NOW))
    datetime.datetime = FixedDatetime
    os.stat, os.statvfs = stat, statvfs
    os.supports_dir_fd.add(stat)
    os.supports_follow_symlinks.add(stat)
    os.supports_fd.add(stat)
