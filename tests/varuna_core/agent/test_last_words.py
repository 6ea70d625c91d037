"""The last words of a rank are those after which it did not go on."""

from __future__ import annotations

import pytest

from varuna_core.agent.processes.last_words import WENT_ON_S, LastWords

TRACE = [b"Traceback (most recent call last):", b'  File "t.py", line 3, in <module>']
ERROR = b"ValueError: no data"


@pytest.mark.parametrize(
    ("lines", "error", "exception"),
    [
        ([*TRACE, ERROR], "ValueError: no data", "ValueError: no data"),
        (
            [*TRACE, ERROR, b"", b"[rank0]:[W1128] bye"],
            "ValueError: no data",
            "ValueError: no data",
        ),
        ([b"giving up", b"a.py:3: UserWarning: old", b"  warnings.warn(x)"], "giving up", ""),
        ([b"giving up", b"a.py:3: FutureWarning: old", b"  set_timeout(0)"], "giving up", ""),
        ([b"[W1130 05:19:54.507 socket.cpp:207] [c10d] The hostname cannot be found."], "", ""),
        ([ERROR, b"===="], "ValueError: no data", ""),
        ([b"giving up"], "giving up", ""),
        ([], "", ""),
    ],
)
def test_the_last_line_and_the_last_traceback(
    lines: list[bytes], error: str, exception: str
) -> None:
    words = LastWords()
    words.note_err(lines, 10.0)
    assert (words.error, words.exception) == (error, exception)
    words.note_out(10.0 + WENT_ON_S)
    assert (words.error, words.exception) == (error, exception), "a buffer that the end flushed"
    words.note_out(11.0 + WENT_ON_S)
    assert (words.error, words.exception) == ("", ""), "the rank went on"
