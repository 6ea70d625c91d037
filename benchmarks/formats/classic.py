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


@program("catboost/catboost", "catboost/libs/loggers/logger.h", "TConsoleLoggingBackend")
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


@program("microsoft/LightGBM", "python-package/lightgbm/callback.py", "log_evaluation")
def lightgbm(log: Log) -> Truth:
    """A round in brackets, every ten, and a metric of each set; notes of the library above."""
    last = log.pick(120, 690, 10)
    log.out("[LightGBM] [Info] Number of positive: 357, number of negative: 1143")
    log.out(
        "[LightGBM] [Info] Total Bins 2040\n[LightGBM] [Info] Start training from score -1.163676"
    )
    loss = val = 0.0
    for step in log.steps(last, 10, 10, 0.2):
        loss, val = log.loss(step / 1000, 6), log.loss(step / 1000, 6)
        log.out(f"[{step}]\ttraining's binary_logloss: {loss:g}\tvalid_1's binary_logloss: {val:g}")
    return Truth(steps=(last,), losses=(float(f"{loss:g}"),), val_losses=(float(f"{val:g}"),))


@program("scikit-learn/scikit-learn", "sklearn/neural_network/_multilayer_perceptron.py",
         "Iteration %d, loss = %.8f")  # fmt: skip
def sklearn_mlp(log: Log) -> Truth:
    """An iteration is an epoch; a score of validation in the line below."""
    last = log.pick(14, 90)
    loss = 0.0
    for step in log.steps(last, 1, 1, 2.0):
        loss = log.loss(step / 100, 8)
        log.out(f"Iteration {step}, loss = {loss:.8f}")
        log.out(f"Validation score: {log.near(0.8):f}")
    return Truth(steps=(last,), losses=(loss,))


@program("facebookresearch/fastText", "src/fasttext.cc", "FastText::printInfo")
def fasttext(log: Log) -> Truth:
    """A line that is drawn again and again, with per cent, a loss and no step."""
    log.err("Read 12M words\nNumber of words:  71290\nNumber of labels: 0")
    share = loss = 0.0
    for at in log.steps(log.pick(400, 900), 1, 0, 0.1):
        share, loss = at / 10, log.loss(at / 1000, 6)
        log.bar(
            f"Progress: {share:5.1f}% words/sec/thread: {log.pick(51000, 52000):7d} lr: "
            f"{0.05 * (1 - share / 100):9.6f} avg.loss: {loss:9.6f} ETA:   0h 1m12s"
        )
    return Truth(steps=(), also=(Count((int(share), round(share)), (100, None)),), losses=(loss,))


@program(
    "piskvorky/gensim", "gensim/models/word2vec.py", '"EPOCH %i - PROGRESS: at %.2f%% examples'
)
def gensim(log: Log) -> Truth:
    """Epochs from 0 and per cent within them; the vocabulary has a progress of its own."""
    last = log.pick(2, 8)

    def say(text: str) -> None:
        log.err(f"{log.stamp()} : INFO : {text}")

    for at in range(0, 90000, 10000):
        say(f"PROGRESS: at sentence #{at}, processed {at * 21} words, keeping {at // 9} word types")
    say("Word2Vec lifecycle event {'msg': 'training model with 3 workers on 71290 vocabulary'}")
    for at in log.steps(last * 20 + 9, 1, 0, 1.0):
        epoch, share = at // 20, 5 * (at % 20)
        say(
            f"EPOCH {epoch} - PROGRESS: at {log.near(share + 1, 0.01):.2f}% examples, "
            f"{log.pick(800000, 830000)} words/s, in_qsize 5, out_qsize 0"
        )
        if at % 20 == 19:
            say(
                f"EPOCH {epoch}: training on 17005207 raw words (12506280 effective words) "
                "took 20.1s"
            )
    return Truth(steps=(last, last + 1))
