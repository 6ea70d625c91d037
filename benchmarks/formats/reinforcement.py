"""Reinforcement learning: steps are those of the environment, of the policy, or iterations."""

from __future__ import annotations

from benchmarks.formats.log import Log
from benchmarks.formats.model import Count, Truth, program


def _render_table(groups: dict[str, dict[str, str]]) -> str:
    rows = []
    for group, figures in groups.items():
        rows += [(f"{group}/", "")] + [(f"   {key}", value) for key, value in figures.items()]
    wide, long = max(len(key) for key, _ in rows), max(len(value) for _, value in rows)
    dashes = "-" * (wide + long + 7)
    lines = [f"| {key:<{wide}} | {value:<{long}} |" for key, value in rows]
    return "\n".join([dashes, *lines, dashes])


@program("DLR-RM/stable-baselines3", "stable_baselines3/common/logger.py", "HumanOutputFormat")
def stable_baselines3(log: Log) -> Truth:
    """A table with a figure a row; three that grow: iterations, updates, time steps."""
    last = log.pick(20, 60)
    log.out("Using cuda device\nWrapping the env with a `Monitor` wrapper")
    loss = 0.0
    for at in log.steps(last, 1, 1, 2.1):
        groups = {
            "rollout": {"ep_len_mean": f"{at * 7}", "ep_rew_mean": f"{at * 7}"},
            "time": {
                "fps": f"{log.pick(930, 990)}",
                "iterations": f"{at}",
                "time_elapsed": f"{int(at * 2.1)}",
                "total_timesteps": f"{at * 2048}",
            },
        }
        if at > 1:
            loss = float(f"{log.loss(at / 90):.3g}")
            groups["train"] = {
                "approx_kl": f"{0.0081 + 0.0001 * (at % 7):.8f}",
                "clip_fraction": "0.0912",
                "entropy_loss": "-0.671",
                "learning_rate": "0.0003",
                "loss": f"{loss:<8.3g}",
                "n_updates": f"{(at - 1) * 10}",
                "value_loss": f"{log.near(31.0):<8.3g}",
            }
        log.out(_render_table(groups))
    return Truth(
        steps=(last * 2048,),
        also=(Count((last,)), Count(((last - 1) * 10,))),
        losses=(loss,),
    )


@program("ray-project/ray", "python/ray/tune/progress_reporter.py", "trial_progress_str")
def rllib(log: Log) -> Truth:
    """Tune's status again and again: a table with a row a trial, results without a loss."""
    last = log.pick(14, 40)
    name = "PPO_CartPole-v1_8c1f2_00000"
    columns = ("Trial name", "status", "loc", "  iter", "  total time (s)", "    ts", "  reward")
    for at in log.steps(last, 1, 1, 9.0):
        row = (
            name,
            "RUNNING",
            "10.1.0.7:4112",
            f"{at:6d}",
            f"{log.now_s:16.4f}",
            f"{at * 4000:6d}",
            f"{at * 3.1:8.2f}",
        )
        wide = [max(len(a), len(b)) for a, b in zip(columns, row, strict=True)]
        rule = "+" + "+".join("-" * (one + 2) for one in wide) + "+"
        log.out(
            f"== Status ==\nCurrent time: {log.clock()} (running for 00:{at * 9 // 60:02d}:"
            f"{at * 9 % 60:02d}.61)\nUsing FIFO scheduling algorithm.\n"
            "Logical resource usage: 3.0/16 CPUs, 1.0/1 GPUs\n"
            f"Result logdir: results/PPO\nNumber of trials: 1/1 (1 RUNNING)\n{rule}"
        )
        log.out("| " + " | ".join(f"{a:<{n}}" for a, n in zip(columns, wide, strict=True)) + " |")
        log.out("|" + "+".join("-" * (one + 2) for one in wide) + "|")
        log.out(
            "| "
            + " | ".join(f"{a:<{n}}" for a, n in zip(row, wide, strict=True))
            + f" |\n{rule}\n\n"
        )
    return Truth(steps=(last,), also=(Count((last * 4000,)),))
