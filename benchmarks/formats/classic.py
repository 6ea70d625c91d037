"""Trees, word vectors, graphs, and models of molecules."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span
from benchmarks.formats.model import Count, Truth, program


@program("dmlc/xgboost", "python-package/xgboost/callback.py", "EvaluationMonitor")
def xgboost(log: Log) -> Truth:
    """A round in brackets, from 0, and the metric of each data set between tabs."""
    last = log.pick(60, 240)
    loss = val = 0.0
    for step in log.steps(last, 1, 0, 0.4):
        loss, val = log.loss(step / 300, 5), log.loss(step / 300, 5)
        log.out(f"[{step}]\ttrain-logloss:{loss:.5f}\teval-logloss:{val:.5f}")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,))


@program(
    "catboost/catboost", "catboost/libs/loggers/logger.cpp", "learn, test, best, total, remaining"
)
def catboost(log: Log) -> Truth:
    """A round before a colon, from 0, every ten, with the time so far and the time left."""
    total, last = 1000, log.pick(310, 690, 10)
    log.out("Learning rate set to 0.061")
    loss = val = best = 0.0
    for step in log.steps(last, 10, 0, 0.06):
        loss, val = log.loss(step / total, 7), log.loss(step / total, 7)
        best = min(best or val, val)
        log.out(
            f"{step}:\tlearn: {loss:.7f}\ttest: {val:.7f}\tbest: {best:.7f} ({step})\t"
            f"total: {step * 0.06:.3g}s\tremaining: {(total - step) * 0.06:.3g}s"
        )
    return Truth(steps=(last, last + 1), totals=(None,), losses=(loss,), val_losses=(val,))


@program("tmikolov/word2vec", "word2vec.c", 'printf("%cAlpha: %f  Progress: %.2f%%')
def word2vec(log: Log) -> Truth:
    """A line that is drawn again and again, with per cent and no step."""
    log.out("Starting training using file text8\nVocab size: 71291\nWords in train file: 16718843")
    share = 0.0
    for at in log.steps(log.pick(500, 800), 1, 0, 0.1):
        share = at / 10
        log.bar(
            f"Alpha: {0.05 * (1 - share / 100):f}  Progress: {share:.2f}%  "
            f"Words/thread/sec: {log.near(121):.2f}k  ",
            "out",
        )
    return Truth(steps=(), also=(Count((int(share), round(share)), (100, None)),))


@program("pyg-team/pytorch_geometric", "torch_geometric/logging.py", "def log(**kwargs)")
def pyg_gcn(log: Log) -> Truth:
    """Epochs with leading zeros, and an accuracy each of three sets."""
    last = log.pick(90, 199)
    loss = 0.0
    for epoch in log.steps(last, 1, 1, 0.1):
        loss = log.loss(epoch / 200)
        log.out(
            f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Train: {log.near(0.9):.4f}, "
            f"Val: {log.near(0.7):.4f}, Test: {log.near(0.7):.4f}"
        )
    return Truth(steps=(last,), losses=(loss,))


@program("ACEsuit/mace", "mace/tools/train.py", "valid_err_log")
def mace(log: Log) -> Truth:
    """An epoch a line behind a logger's head, the loss of validation under the name loss."""
    last = log.pick(24, 90)

    def say(text: str) -> None:
        log.err(f"{log.clock('%Y-%m-%d %H:%M:%S.%f')[:-3]} INFO: {text}")

    say("Started training, reporting errors on validation set")
    say("Loss metrics on validation set")
    say(
        "Initial: head: Default, loss=41.20112873, "
        "RMSE_E_per_atom=  912.11 meV, RMSE_F=  1203.10 meV / A"
    )
    loss = 0.0
    for epoch in log.steps(last, 2, 0, 20.0):
        loss = log.loss(epoch / 100, 8)
        last = epoch
        say(
            f"Epoch {epoch}: head: Default, loss={loss:8.8f}, RMSE_E_per_atom="
            f"{log.near(20):8.2f} meV, RMSE_F={log.near(80):8.2f} meV / A"
        )
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(loss,))


@program("deepmodeling/deepmd-kit", "deepmd/loggers/training.py", "format_training_message")
def deepmd(log: Log) -> Truth:
    """Three lines for a batch: wall time, errors of training, errors of validation."""
    last = log.pick(4200, 8800, 100)

    def say(text: str) -> None:
        log.err(f"[{log.stamp()}] DEEPMD INFO    {text}")

    say("Start to train 1000000 steps.")
    loss = val = 0.0
    for step in log.steps(last, 100, 100, 0.05):
        loss, val = float(f"{log.loss(step / 9000):.2e}"), float(f"{log.loss(step / 9000):.2e}")
        say(
            f"Batch {step:7d}: trn: rmse = {loss:8.2e}, rmse_e = 9.31e-02, "
            "rmse_f = 4.11e-01, lr = 9.71e-04"
        )
        say(f"Batch {step:7d}: val: rmse = {val:8.2e}, rmse_e = 9.80e-02, rmse_f = 4.20e-01")
        say(
            f"Batch {step:7d}: total wall time = {log.near(5.0):.2f} s, "
            f"eta = {render_span((1000000 - step) * 0.05)} at {log.clock('%Y-%m-%d')} 22:54"
        )
    return Truth(steps=(last,), totals=(1000000, None), losses=(loss,), val_losses=(val,))
