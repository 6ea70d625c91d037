"""Remedies are rendered in the words of the job at hand, or not at all."""

from __future__ import annotations

import itertools
import re

import pytest

from varuna_core.facts.remedy import (
    NEED_TARGET,
    SPELLINGS,
    Action,
    Context,
    Remedy,
    Target,
    context_of,
    explain,
    render,
    render_all,
)

CONF_KEY = re.compile(
    r"\b(train|cluster|morph|parallel|container|program|model|sbatch)\.[a-z_]+"
    r"|\blog_folder\b|\bnode group\b|\bpass_env\b|\bset env\b"
)
OPTIONS = {words.get(Context.SBATCH, "") for words in SPELLINGS.values()}
OPTION = re.compile("|".join(rf"{name}\b" for name in sorted(OPTIONS) if name.startswith("--")))
OF_SLURM = re.compile(
    r"\.queue\b|cluster\.(account|qos|exclude|sbatch|hetero|requeue)|memory_gb|cpus of|scontrol"
)
"""What a conf with `scheduler: local` has no use for."""
WRONG_WORDS = {
    Context.CONF: OPTION,
    Context.PYTHON: OPTION,
    Context.SBATCH: CONF_KEY,
    Context.LOCAL: re.compile(f"{OF_SLURM.pattern}|machine_list|morph|{OPTION.pattern}"),
    Context.ALLOCATION: re.compile(
        r"\.queue\b|cluster\.(account|qos|exclude|sbatch|hetero|requeue|walltime)|memory_gb|morph"
    ),
    Context.MACHINES: re.compile(f"{OF_SLURM.pattern}|walltime|{OPTION.pattern}"),
}
"""What no remedy says in a context. Commands of vjob may have options everywhere."""


def names_wrong_words(text: str, context: Context) -> bool:
    return WRONG_WORDS[context].search(re.sub(r"`vjob [^`]*`", "", text)) is not None


def test_a_remedy_names_the_key_of_a_conf_and_the_option_of_sbatch() -> None:
    remedy = Remedy(Action.RAISE, Target.WALLTIME)
    assert render(remedy, Context.CONF) == "raise cluster.walltime_min"
    assert render(remedy, Context.SBATCH) == "raise --time"
    assert render(remedy, Context.MACHINES) == ""


def test_a_remedy_that_a_context_lacks_is_left_out() -> None:
    remedies = (Remedy(Action.SET, Target.QOS, "normal"), Remedy(Action.RESUBMIT))
    assert render_all(remedies, Context.LOCAL) == "submit again"
    assert render_all(remedies, Context.SBATCH) == "set --qos to normal; submit again"


def test_steps_and_alternatives_are_told_apart() -> None:
    remedies = (
        Remedy(Action.RAISE, Target.MEMORY, detail="(0 is all)"),
        Remedy(Action.LOWER, Target.WORKERS, instead=True),
        Remedy(Action.EXCLUDE, Target.NODE, "its node", when="only one node does it"),
    )
    assert render_all(remedies, Context.CONF) == (
        "raise memory_gb of the node group (0 is all), or lower the number of data workers; "
        "if only one node does it, leave its node out with cluster.exclude"
    )
    assert render_all(remedies, Context.LOCAL) == "lower the number of data workers"
    assert explain("memory was used up", remedies[:1], Context.LOCAL) == "memory was used up"


def test_a_variable_and_a_command_have_their_own_words() -> None:
    variable = Remedy(Action.SET, Target.ENVIRONMENT, "NCCL_DEBUG=INFO")
    assert render(variable, Context.CONF) == "set env NCCL_DEBUG=INFO"
    assert render(variable, Context.SBATCH) == "set the environment variable NCCL_DEBUG=INFO"
    stacks = Remedy(Action.INSPECT, Target.STACKS, detail="while it hangs")
    assert render(stacks, Context.CONF) == "look at `vjob stacks JOB` while it hangs"
    assert render(stacks, Context.PYTHON) == "look at `job.stacks()` while it hangs"


def test_a_job_of_ones_own_script_is_promised_no_checkpoint() -> None:
    assert "checkpoint" in render(Remedy(Action.RESUME), Context.CONF)
    assert render(Remedy(Action.RESUME), Context.SBATCH) == "submit again"


@pytest.mark.parametrize("context", Context)
def test_no_context_has_words_of_another(context: Context) -> None:
    for action, target in itertools.product(Action, (None, *Target)):
        if target is None and action in NEED_TARGET:
            continue
        for remedy in (Remedy(action, target), Remedy(action, target, "x", "for it")):
            text = render(remedy, context)
            assert not names_wrong_words(text, context), text
            assert "  " not in text and text == text.strip()


@pytest.mark.parametrize("action", Action)
def test_every_action_makes_a_clause(action: Action) -> None:
    assert render(Remedy(action, Target.JOB, "x", "for it"), Context.CONF)


def test_a_remedy_that_changes_something_says_what() -> None:
    with pytest.raises(ValueError, match="needs a target"):
        Remedy(Action.SET)


def test_every_target_is_spelled_somewhere() -> None:
    assert set(SPELLINGS) == set(Target)
    assert all(SPELLINGS[target] for target in Target)


@pytest.mark.parametrize(
    ("scheduler", "has_conf", "context"),
    [
        ("slurm", True, Context.CONF),
        ("slurm", False, Context.SBATCH),
        ("local", True, Context.LOCAL),
        ("ssh", True, Context.MACHINES),
    ],
)
def test_the_context_of_a_job(scheduler: str, has_conf: bool, context: Context) -> None:
    assert context_of(scheduler, has_conf=has_conf) is context
