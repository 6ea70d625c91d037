"""Speech and translation."""

from __future__ import annotations

from benchmarks.formats.log import Log
from benchmarks.formats.model import Truth, program


@program("OpenNMT/OpenNMT-py", "onmt/utils/statistics.py", '"Step %s; acc: %2.1f; ppl')
def opennmt(log: Log) -> Truth:
    """Figures between semicolons, the loss under the name xent; a validation by perplexity."""
    total, last = 100000, log.pick(5200, 8400, 100)

    def say(text: str) -> None:
        log.err(f"[{log.stamp()} INFO] {text}")

    say("Starting training on GPU: [0, 1]")
    say("Start training loop and validate every 2500 steps...")
    loss = 0.0
    for step in log.steps(last, 100, 100, 0.2):
        loss = log.loss(step / total, 1)
        say(
            f"Step {step}/{total:5d}; acc: {log.near(45):2.1f}; ppl: {loss * 11:5.1f}; "
            f"xent: {loss:2.1f}; lr: 0.00071; sents: {log.near(41000):7.0f}; "
            f"bsz: 3311/3109/51; {log.near(20100):3.0f}/{log.near(19100):3.0f} tok/s; "
            f"{log.now_s:6.0f} sec;"
        )
        if step % 2500 == 0:
            say("valid stats calculation")
            say(f"Train perplexity: {loss * 11:g}")
            say("Validation perplexity: 11.0412")
            say("Validation accuracy: 58.2214")
            say(f"Saving checkpoint models/demo_step_{step}.pt")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))
