"""Commands of vjob one after the other in one process, each with a deadline and little memory.

Reads lists of words as JSON from standard input; prints for each its exit code, what it printed,
and the error that nobody caught.
"""

import io
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

from vjob.shelf.commands.cli import cli

LIMIT_S = int(sys.argv[1])
MOST_BYTES = 8 << 30


def end(number, frame):
    raise TimeoutError(f"still at work after {LIMIT_S} s")


def call(words):
    out, error, code = io.TextIOWrapper(io.BytesIO(), errors="surrogateescape"), "", 0
    signal.alarm(LIMIT_S)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            cli.main(words, prog_name="vjob")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        error = traceback.format_exc()
    finally:
        signal.alarm(0)
    out.flush()
    text = out.buffer.getvalue().decode(errors="surrogateescape")
    return {"words": words, "code": code, "text": text, "error": error}


resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
signal.signal(signal.SIGALRM, end)
os.environ["OPENBLAS_NUM_THREADS"] = "1"
print(json.dumps([call(words) for words in json.load(sys.stdin)]))
