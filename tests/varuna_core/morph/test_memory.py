"""The folder of a node in memory: held while its `stay` lives, removed by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from varuna_core.morph.memory import Home, sweep

HOLDS = """
import sys
from pathlib import Path
from varuna_core.morph.memory import Home
home = Home("killed", Path(sys.argv[1]))
(home.path / "varuna_ckpt_5.0.1.partial").mkdir()
print(home.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_its_users_alone_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    home = Home("run-1", tmp_path)
    (home.path / "varuna_ckpt_5.0.1.partial").mkdir()
    assert {path.stat().st_mode & 0o777 for path in (home.path, home.path.parent)} == {0o700}
    home.close()
    home.close()
    assert list(home.path.parent.iterdir()) == []


def test_what_a_killed_stay_left_goes_and_what_is_held_stays(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = Home("run-2", tmp_path)
        assert theirs.is_dir()
        other.kill()
    sweep(mine.path.parent)
    assert not theirs.exists() and mine.path.is_dir()
    mine.close()
    assert list(mine.path.parent.iterdir()) == []


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_a_folder_that_another_may_have_laid_there_is_refused(tmp_path: Path, what: str) -> None:
    own = tmp_path / f"vjob-{os.getuid()}"
    if what == "open to others":
        own.mkdir()
        own.chmod(0o770)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.touch(mode=0o600)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        Home("run", tmp_path)
