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


@program("vwxyzjn/cleanrl", "cleanrl/ppo.py", 'print(f"global_step={global_step}, episodic_return=')
def cleanrl(log: Log) -> Truth:
    """Ends of games, at uneven steps of all environments, and a rate without a step."""
    step, last = 0, log.pick(60000, 140000)
    while step < last:
        step += 4 * log.pick(2, 90)
        log.out(f"global_step={step}, episodic_return=[{log.pick(9, 500)}.]")
        log.wait(log.near(0.3))
        if step % 7 == 0:
            log.out(f"SPS: {log.pick(700, 760)}")
    return Truth(steps=(step,))


@program("openai/spinningup", "spinup/utils/logx.py", "EpochLogger.dump_tabular")
def spinning_up(log: Log) -> Truth:
    """A table with right-aligned figures of three digits; epochs from 0."""
    last = log.pick(12, 45)
    losses: tuple[float, ...] = ()
    for epoch in log.steps(last, 1, 0, 14.0):
        losses = tuple(float(f"{log.loss(epoch / 50):.3g}") for _ in range(2))
        figures = {
            "Epoch": float(epoch),
            "AverageEpRet": log.near(210),
            "EpLen": log.near(210),
            "TotalEnvInteracts": (epoch + 1) * 4000.0,
            "LossPi": losses[0],
            "LossV": losses[1],
            "Entropy": 0.61,
            "Time": (epoch + 1) * 14.0,
        }
        rule = "-" * (22 + 17)
        rows = [f"| {name:>17s} | {f'{value:8.3g}':>15s} |" for name, value in figures.items()]
        log.out("\n".join([rule, *rows, rule]))
    interacts = (last + 1) * 4000
    return Truth(
        steps=(last, last + 1),
        also=(Count((interacts, int(float(f"{interacts:.3g}")))),),
        losses=losses,
    )
