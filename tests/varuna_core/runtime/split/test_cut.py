"""CutPoints alone: the identity, and who watches them."""

import subprocess
import sys

import torch

from varuna_core.runtime.split.cut import CutPoint, announce_segments


def test_an_unwatched_cut_returns_what_it_got() -> None:
    cut, x = CutPoint(), torch.ones(2)
    assert cut(x) is x
    assert cut(x, None) == (x, None)
    assert cut({"x": x}) == {"x": x}


def test_a_hook_on_a_cut_is_called() -> None:
    cut = CutPoint()
    cut.register_forward_hook(lambda module, args, out: out * 3)
    assert cut(torch.ones(1)) == 3


def test_segments_are_announced_in_order_and_the_watch_ends() -> None:
    cuts, seen = [CutPoint() for _ in range(2)], []
    with announce_segments(seen.append):
        for cut in cuts:
            cut(torch.ones(1))
    cuts[0](torch.ones(1))
    assert seen == [0, 1, 2]


def test_the_package_gives_cutpoint_and_imports_no_torch_for_itself() -> None:
    code = (
        "import sys, varuna_core\n"
        "assert 'torch' not in sys.modules\n"
        "from varuna_core import CutPoint\n"
        "assert CutPoint.__module__ == 'varuna_core.runtime.split.cut'\n"
        "assert not hasattr(varuna_core, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
