"""Optimizer steps are counted as the program does them, and nothing of them changes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests import ROOT  # noqa: E402
from varuna_core.agent.bundle import write_bundle  # noqa: E402
from varuna_core.agent.setup.ranks import STARTUP  # noqa: E402
from varuna_core.records.logs import step_counts  # noqa: E402
from varuna_core.records.logs.step_counts import parse_counts  # noqa: E402
from varuna_core.trace.startup import counter  # noqa: E402

Module = torch.nn.Linear
Case = Callable[[], object]


class Hooks:
    """torch's module of optimizers, whose hooks end with the test."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self._real = sys.modules["torch.optim.optimizer"]

    def register_optimizer_step_pre_hook(self, hook: Any) -> None:
        self.handles.append(self._real.register_optimizer_step_pre_hook(hook))

    def register_optimizer_step_post_hook(self, hook: Any) -> None:
        self.handles.append(self._real.register_optimizer_step_post_hook(hook))


@pytest.fixture
def count(tmp_path: Path) -> Iterator[Callable[[Case], int | None]]:
    """Count the steps of a function; None without a file."""
    hooks = Hooks()

    def run(case: Case) -> int | None:
        path = tmp_path / "0.steps"
        own = counter.Counter(step_counts, str(path), torch)
        own.start(hooks)
        case()
        own._close()
        found = parse_counts(path.read_bytes()) if path.exists() else None
        return None if found is None else found.count

    yield run
    for handle in hooks.handles:
        handle.remove()


def make(optimizer: Any = torch.optim.SGD, **more: Any) -> Any:
    """An optimizer with gradients."""
    module = Module(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    return optimizer(module.parameters(), lr=0.1, **more)


def step(*optimizers: Any, times: int = 1) -> None:
    for _ in range(times):
        for optimizer in optimizers:
            optimizer.step()


class Parent(torch.optim.SGD):
    """Calls the step that it overrides, which has hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Holds an optimizer of the same parameters, as SAM and Lookahead."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        self.base = torch.optim.SGD(params, lr=lr)
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.base.step()


def step_in_backward() -> None:
    """One optimizer for each parameter, called as soon as its gradient is there."""
    module = torch.nn.Sequential(Module(2, 2), Module(2, 2))
    for parameter in module.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def update(_: Any, own: Any = own) -> None:
            own.step()

        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(5):
        module(torch.ones(1, 2)).sum().backward()


def step_by_groups() -> None:
    """DeepSpeed's ZeRO steps one group at a time, with the other groups taken out."""
    first, second = Module(2, 2), Module(2, 2)
    own = torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters()}], lr=0.1)
    groups = own.param_groups
    for _ in range(5):
        for group in groups:
            own.param_groups = [group]
            own.step()
            own.param_groups = groups


def step_with_closure() -> None:
    own = make(torch.optim.LBFGS)
    module = own.param_groups[0]["params"]
    for _ in range(5):
        own.step(lambda: sum((p**2).sum() for p in module))


def fail_and_go_on() -> None:
    own = make()

    def fail() -> float:
        raise ValueError("out of memory")

    for _ in range(3):
        with pytest.raises(ValueError, match="memory"):
            own.step(fail)
    step(own, times=5)


def fill_before_the_first() -> None:
    """torch's checkpoints fill an optimizer's state by a step of it."""

    def _init_optim_state(own: Any) -> None:
        own.step()

    own = make(torch.optim.Adam)
    _init_optim_state(own)
    step(own, times=5)


def train_one_after_the_other() -> None:
    step(make(), times=3)
    step(make(), times=counter.OTHERS + 2)


def step_compiled() -> None:
    own = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(own.step, backend="eager")
        for _ in range(3):
            compiled()


def step_in_a_fork() -> None:
    own = make()
    step(own, times=5)
    if not os.fork():
        step(own, times=100)
        os._exit(0)
    os.wait()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(lambda: step(make(), times=5), 5, id="one"),
        pytest.param(lambda: step(make(), make(torch.optim.Adam), times=5), 5, id="two at once"),
        pytest.param(lambda: step(*[make()] * 3, times=5), 15, id="critic three times"),
        pytest.param(lambda: step(make(Parent), times=5), 5, id="parent's step"),
        pytest.param(lambda: (make(), step(make(Parent), times=5)), 5, id="parent has hooks"),
        pytest.param(lambda: step(make(Around), times=5), 5, id="within a step"),
        pytest.param(step_in_backward, 5, id="in backward"),
        pytest.param(step_by_groups, 5, id="by groups"),
        pytest.param(step_with_closure, 5, id="closure"),
        pytest.param(fail_and_go_on, 5, id="fails"),
        pytest.param(fill_before_the_first, 5, id="state is filled"),
        pytest.param(train_one_after_the_other, 5 + counter.OTHERS, id="one after the other"),
        pytest.param(step_in_a_fork, 5, id="fork"),
        pytest.param(step_compiled, None, id="compiled"),
        pytest.param(lambda: make(), None, id="none"),
    ],
)
def test_a_round_of_updates_is_one_step(
    case: Case, expected: int | None, count: Callable[[Case], int | None]
) -> None:
    assert count(case) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "/r/3.steps"),
        ({"RANK": "3"}, "/r/3.steps"),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "VJOB_NODE_RANKS": "2"}, "/r/1.steps"),
        ({"VJOB_NODE_RANKS": "2"}, "/r/3.steps"),
    ],
)
def test_each_rank_has_one_file(environ: dict[str, str], expected: str | None) -> None:
    assert counter.choose_path("/r/3.steps", environ) == expected


def test_a_program_of_any_python_is_counted_by_its_start(tmp_path: Path) -> None:
    """From the agent's own zip file, with its result as without, and killed in the midst."""
    write_bundle(tmp_path / "agent.pyz")
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "own = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(12):\n"
        "    own.zero_grad(); model(torch.ones(1, 2)).sum().backward(); own.step()\n"
        "print(model.weight.tolist(), 'varuna_core' in sys.modules, sys.path[1:2])\n"
        "sys.stdout.flush(); os.kill(os.getpid(), int(sys.argv[1]))\n"
    )
    said = []
    for signal in ("0", "9"):
        steps = tmp_path / f"{signal}.steps"
        for env in ({}, {"PYTHONPATH": f"{tmp_path}/{STARTUP}", "VJOB_STEPS": str(steps)}):
            done = subprocess.run(
                [sys.executable, "train.py", signal], cwd=tmp_path, capture_output=True, text=True,
                env={"OMP_NUM_THREADS": "1", **env}, timeout=120, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (-int(signal), "")
            said.append(done.stdout)
        counts = parse_counts(steps.read_bytes())
        assert counts is not None and counts.count in ((12,) if signal == "0" else range(1, 13))
    assert len(set(said)) == 1, said
    assert ROOT.exists()


def test_a_torch_built_for_gpus_counts_on_a_node_without_any(
    count: Callable[[Case], int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda refuses every question there until the program has used it."""

    def refuse() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert count(lambda: step(make(), times=3)) == 3
