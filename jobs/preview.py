"""What `submit --dry-run` and `--test-only` show. Writes nothing."""

from __future__ import annotations

from dataclasses import replace

from jobs.conf import REDACTED, is_secret
from jobs.errors import InputError
from jobs.submit import Prepared
from varuna_core.records.plan import Plan, render_plan


def render_preview(ready: Prepared) -> str:
    """Each file that a submit would write, headed by a shell comment with its name."""
    parts = [
        (ready.run.batch_script(group).name, text) for group, text in ready.scripts.batch.items()
    ]
    parts.append((ready.run.node_script.name, ready.scripts.node))
    plan = "".join(f"# {line}\n" for line in render_plan(redact_plan(ready.plan)).splitlines())
    parts.append((ready.run.plan.name, plan))
    head = f"# Nothing is written or submitted. The run folder would be {ready.run.path}\n"
    return head + "".join(f"\n# ---- {name}\n{text}" for name, text in parts)


def redact_plan(plan: Plan) -> Plan:
    """The plan with secret environment values hidden, for the screen."""
    groups = tuple(replace(group, env=_redact(group.env)) for group in plan.groups)
    return replace(plan, env=_redact(plan.env), groups=groups)


def _redact(env: dict[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name) else value for name, value in env.items()}


def test_only(ready: Prepared) -> str:
    """Slurm's own estimate for each job of the run."""
    if ready.plan.scheduler != "slurm":
        raise InputError(
            "--test-only asks Slurm, and this conf runs on this machine; use --dry-run"
        )
    from jobs.slurm_executor import SlurmExecutor

    executor = SlurmExecutor()
    return "\n".join(
        executor.test(ready.run, group, text) for group, text in ready.scripts.batch.items()
    )
