"""Programs that the reader met once, when it was done: nothing was changed in it for them."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span
from benchmarks.formats.model import Count, Truth, program


@program("dmlc/dgl", "examples/pytorch/graphsage/dist/train_dist.py", '"Part {} | Epoch {:05d} |')
def dgl_dist(log: Log) -> Truth:
    """Two ranks, each of which names its part of the graph; steps are those of the epoch."""
    size, last, first, loss = 197, log.pick(20, 180, 20), 0.0, 0.0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else 180, 20, 0, 0.1):
            for rank in (0, 1):
                loss = log.loss((epoch * size + at) / 900)
                log.out(
                    f"Part {rank} | Epoch {epoch:05d} | Step {at:05d} | Loss {loss:.4f} | Train "
                    f"Acc {log.near(0.6):.4f} | Speed (samples/sec) {log.near(9100.0):.4f} | GPU "
                    f"{log.near(880.0):.1f} MB | time {log.near(0.1):.3f} s",
                    rank,
                )
                if rank == 0:
                    first = loss
        if epoch == 0:
            log.out("Part 0, Epoch Time(s): 21.2043, sample+data_copy: 9.1203, forward: 3.2")
    return Truth(steps=(size + last, size + last + 1), losses=(first, loss), epochs=(1,))


@program("openai/baselines", "baselines/deepq/deepq.py", 'logger.record_tabular("% time spent')
def baselines_deepq(log: Log) -> Truth:
    """Steps of the environment and episodes in a box; no loss."""
    last, steps = log.pick(100, 900, 10), 0
    for at in log.steps(last, 10, 10, 0.6):
        steps = at * 198 - at % 7
        log.out(
            "-" * 38 + f"\n| % time spent exploring  | {max(2, 98 - at // 10):<8} |\n"
            f"| episodes                | {at:<8} |\n"
            f"| mean 100 episode reward | {-log.near(150.0):<8.3g} |\n"
            f"| steps                   | {steps:<8} |\n" + "-" * 38
        )
    return Truth(steps=(steps,), also=(Count((last,)),))


@program("NVIDIA/DeepLearningExamples", "PyTorch/LanguageModeling/BERT/run_pretraining.py",
         "def format_step(step)")  # fmt: skip
def nvidia_bert(log: Log) -> Truth:
    last, loss = log.pick(50, 900, 10), 0.0
    log.out(
        f"DLL {log.clock()}.120312 - PARAMETER num_steps_per_checkpoint : 200  max_steps : 7038.0"
    )
    for at in log.steps(last, 10, 10, 1.1):
        loss = log.loss(at / 7038, 14)
        log.out(
            f"DLL {log.clock()}.512332 - Training Epoch: 0 Training Iteration: {at}  "
            f"average_loss : {log.near(loss)}  step_loss : {loss}  learning_rate : "
            f"{6e-3 * at / 7038}"
        )
    return Truth(steps=(last,), totals=(7038, None), losses=(loss,), epochs=(0,))


@program("lucidrains/DALLE-pytorch", "train_dalle.py", "print(epoch, i, f'loss - {avg_loss")
def dalle_pytorch(log: Log) -> Truth:
    """Two bare numbers before the word loss."""
    size, last, loss = 1310, log.pick(100, 1290, 10), 0.0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else 1300, 10, 0, 0.4):
            if at % 100 == 0:
                log.out(f"{epoch} {at} sample_per_sec - {log.near(9.1)}")
            loss = log.loss((epoch * size + at) / 4000, 12)
            log.out(f"{epoch} {at} loss - {loss}")
    return Truth(steps=tuple(range(size + last - 9, size + last + 2)), losses=(loss,), epochs=(1,))


@program("google-research/vision_transformer", "vit_jax/train.py", "Step: {step}/{total_steps}")
def vision_transformer(log: Log) -> Truth:
    last, total = log.pick(300, 9000, 100), 10000
    for at in log.steps(last, 100, 100, 0.2):
        log.err(
            f"I{log.clock('%m%d %H:%M:%S')}.123456 140001 train.py:229] Step: {at}/{total} "
            f"{100 * at / total:.1f}%, img/sec/core: {log.near(70.0):.1f}, ETA: "
            f"{(total - at) * 0.2 / 3600:.2f}h"
        )
        if at % 1000 == 0:
            log.err(
                f"I{log.clock('%m%d %H:%M:%S')}.223456 140001 train.py:260] Step: {at} Learning "
                f"rate: 0.0299, Test accuracy: {log.near(0.9):.5f}, img/sec/core: 210.2"
            )
    return Truth(steps=(last,), totals=(total,))


@program("karpathy/char-rnn", "train.lua", 'string.format("%d/%d (epoch %.3f), train_loss')
def char_rnn(log: Log) -> Truth:
    total, last, loss = 21150, log.pick(200, 2400), 0.0
    for at in log.steps(last, 1, 1, 0.12):
        loss = log.loss(at / total, 8)
        log.out(
            f"{at}/{total} (epoch {at / 423:.3f}), train_loss = {loss:6.8f}, grad/param norm = "
            f"{log.near(0.004):6.4e}, time/batch = {log.near(0.12):.4f}s"
        )
        if at % 1000 == 0:
            log.out("evaluating loss over split index 2")
            for batch in range(1, 24):
                log.out(f"{batch}/23...")
                log.wait(0.1)
            log.out("saving checkpoint to cv/lm_lstm_epoch2.36_1.9012.t7")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("jcjohnson/torch-rnn", "train.lua", "'Epoch %.2f / %d, i = %d / %d, loss = %f'")
def torch_rnn(log: Log) -> Truth:
    total, last, loss = 17800, log.pick(200, 2400), 0.0
    vals: tuple[float, ...] = ()
    log.out("Running in CPU mode")
    for at in log.steps(last, 1, 1, 0.12):
        loss = log.loss(at / total, 6)
        log.out(f"Epoch {1 + at / 356:.2f} / 50, i = {at} / {total}, loss = {loss:.6f}")
        if at % 1000 == 0:
            vals = (log.loss(at / total, 12),)
            log.out(f"val_loss = \t{vals[0]}\t")
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=vals, num_epochs=50)


@program("mozilla/DeepSpeech", "training/deepspeech_training/train.py", "' | Steps: '")
def deepspeech(log: Log) -> Truth:
    """A bar an epoch that names no total, and that of its validation."""
    size, last, loss, val = 310, log.pick(20, 300), 0.0, 0.0
    log.out("I STARTING Optimization")
    for epoch in (0, 1):
        begun = log.now_s
        for at in log.steps(last if epoch == 1 else size, 1, 1, 0.4):
            loss = log.loss((epoch * size + at) / 900, 6)
            log.bar(
                f"Epoch {epoch} |   Training | Elapsed Time: {render_span(log.now_s - begun)} | "
                f"Steps: {at} | Loss: {loss:.6f}", "err",
            )  # fmt: skip
        log.err()
        if epoch == 0:
            begun = log.now_s
            for at in log.steps(24, 1, 1, 0.2):
                val = log.loss(0.4, 6)
                log.bar(
                    f"Epoch {epoch} | Validation | Elapsed Time: {render_span(log.now_s - begun)} "
                    f"| Steps: {at} | Loss: {val:.6f} | Dataset: dev.csv", "err",
                )  # fmt: skip
            log.err()
            log.out(f"I Saved new best validating model with loss {val:.6f} to: best_dev-{size}")
    return Truth(
        steps=(size + last, size + last - 1), losses=(loss,), val_losses=(val,), epochs=(1,)
    )


@program("NVIDIA/apex", "examples/imagenet/main_amp.py", "'Epoch: [{0}][{1}/{2}]\\t'")
def apex_imagenet(log: Log) -> Truth:
    size, last, loss = 391, log.pick(10, 380, 10), 0.0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else 390, 10, 10, 0.3):
            loss = log.loss((epoch * size + at) / 2000, 10)
            log.out(
                f"Epoch: [{epoch}][{at}/{size}]\tTime {log.near(0.3):.3f} (0.302)\tSpeed "
                f"{log.near(820.0):.3f} (815.212)\tLoss {loss:.10f} ({log.near(loss):.4f})\t"
                f"Prec@1 {log.near(40.0):.3f} (38.112)\tPrec@5 {log.near(60.0):.3f} (58.002)"
            )
        if epoch == 0:
            for at in log.steps(40, 10, 10, 0.2):
                log.out(
                    f"Test: [{at}/49]\tTime {log.near(0.2):.3f} (0.203)\tSpeed 910.123 (899.120)\t"
                    f"Loss {log.loss(0.2):.4f} (3.1021)\tPrec@1 41.211 (40.112)\tPrec@5 62.0 (61.2)"
                )
            log.out(" * Prec@1 40.112 Prec@5 61.200")
    return Truth(
        steps=(size + last, size + last + 1), totals=(None,), losses=(loss,), epochs=(1, 2)
    )


@program("nshepperd/gpt-2", "train.py", "[{counter} | {time:2.2f}] loss={loss:2.2f} avg=")
def gpt2_finetune(log: Log) -> Truth:
    last, loss = log.pick(60, 900), 0.0
    log.out("Loading dataset...\ndataset has 338025 tokens\nTraining...")
    for at in log.steps(last, 1, 1, 0.9):
        loss = round(log.loss(at / 1000), 2)
        log.out(f"[{at} | {log.now_s:2.2f}] loss={loss:2.2f} avg={log.near(loss):2.2f}")
        if at % 100 == 0:
            log.out("Generating samples...\n======== SAMPLE 1 ========\n and then 12 of them went.")
    return Truth(steps=(last,), losses=(loss,))


@program("google-research/electra", "util/training_utils.py", '"{:}/{:} = {:.1f}%, SPS: {:.1f}')
def electra(log: Log) -> Truth:
    total, last, loss = 766000, log.pick(1000, 9000, 100), 0.0
    for at in log.steps(last, 100, 100, 0.1):
        loss = log.loss(at / 20000)
        log.out(
            f"{at}/{total} = {100 * at / total:.1f}%, SPS: {log.near(9.8):.1f}, ELAP: "
            f"{int(log.now_s) // 60}:{int(log.now_s) % 60:02d}, ETA: 20:11:02 - loss: {loss:.4f}"
        )
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("facebookresearch/XLM", "xlm/trainer.py", 's_iter = "%7i - " % self.n_total_iter')
def xlm(log: Log) -> Truth:
    """A logger's time since the start, then the iteration without a word."""
    last, loss = log.pick(50, 900, 5), 0.0
    log.err(f"INFO - {log.clock('%m/%d/%y %H:%M:%S')} - 0:00:00 - ==== Starting epoch 0 ... ====")
    for at in log.steps(last, 5, 5, 0.5):
        loss = round(log.loss(at / 1000), 4)
        log.err(
            f"INFO - {log.clock('%m/%d/%y %H:%M:%S')} - {render_span(log.now_s)} - {at:7d} - "
            f"{log.near(120.0):7.2f} sent/s - {log.near(31000.0):8.2f} words/s - MLM-en: "
            f"{loss:7.4f} -  - model LR: {1e-4:.4e}"
        )
    return Truth(steps=(last,), losses=(loss,), epochs=(0,))


@program("NVIDIA/waveglow", "train.py", 'print("{}:\\t{:.9f}".format(iteration, reduced_loss))')
def waveglow(log: Log) -> Truth:
    """A number, a colon and the loss, which is negative."""
    last, loss = log.pick(60, 1800), 0.0
    log.out("Epoch: 0")
    for at in log.steps(last, 1, 0, 0.7):
        loss = -log.loss(at / 3000, 9)
        log.out(f"{at}:\t{loss:.9f}")
        if at and at % 1000 == 0:
            log.out(f"Saving model and optimizer state at iteration {at} to ckpt/waveglow_{at}")
            log.out("Epoch: 1")
    return Truth(steps=(last, last + 1), losses=(loss,), epochs=(last // 1000,))


@program("facebookresearch/dlrm", "dlrm_s_pytorch.py", '"Finished {} it {}/{} of epoch {}, {:.2f}')
def dlrm(log: Log) -> Truth:
    size, last, loss = 30690, log.pick(1024, 29000, 1024), 0.0
    log.out("time/loss/accuracy (if enabled):")
    for at in log.steps(last, 1024, 1024, 0.01):
        loss = log.loss(at / size, 6)
        log.out(
            f"Finished training it {at}/{size} of epoch 0, {log.near(10.1):.2f} ms/it, loss "
            f"{loss:.6f}"
        )
        if at % 10240 == 0:
            log.out(f"Testing at - {at}/{size} of epoch 0,\n accuracy 77.012 %, best 77.012 %")
    return Truth(steps=(last,), totals=(size, None), losses=(loss,), epochs=(0,))


@program("DeepGraphLearning/KnowledgeGraphEmbedding", "codes/run.py",
         "'%s %s at step %d: %f' % (mode, metric")  # fmt: skip
def kge(log: Log) -> Truth:
    """A line for each part of the loss, then one for the loss."""
    last, loss = log.pick(300, 9000, 100), 0.0
    log.err(f"{log.clock()} INFO     Start Training...")
    for at in log.steps(last, 100, 100, 0.05):
        loss = log.loss(at / 20000, 6)
        for name in ("positive_sample_loss", "negative_sample_loss", "loss"):
            value = loss if name == "loss" else log.near(loss)
            log.err(f"{log.clock()} INFO     Training average {name} at step {at}: {value:f}")
        if at % 5000 == 0:
            log.err(f"{log.clock()} INFO     Evaluating on Valid Dataset...")
            for done in range(0, 2000, 1000):
                log.err(f"{log.clock()} INFO     Evaluating the model... ({done}/2204)")
            log.err(f"{log.clock()} INFO     Valid MRR at step {at}: {log.near(0.3):f}")
    return Truth(steps=(last,), totals=(None,), losses=(loss,))


@program("zhouhaoyi/Informer2020", "exp/exp_informer.py", '"\\titers: {0}, epoch: {1} | loss: {2')
def informer(log: Log) -> Truth:
    """A line of the epoch names losses of three parts of the data behind a number of steps."""
    size, last, loss, val = 265, log.pick(100, 200, 100), 0.0, 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 200, 100, 100, 0.06):
            loss = log.loss((epoch * size + at) / 2000, 7)
            log.out(f"\titers: {at}, epoch: {epoch} | loss: {loss:.7f}")
            log.out(f"\tspeed: {log.near(0.06):.4f}s/iter; left time: {log.near(90.0):.4f}s")
        if epoch == 1:
            val = log.loss(0.4, 7)
            log.out(f"Epoch: {epoch} cost time: {log.near(16.0)}")
            log.out(
                f"Epoch: {epoch}, Steps: {size} | Train Loss: {log.loss(0.2, 7):.7f} Vali Loss: "
                f"{val:.7f} Test Loss: {log.loss(0.4, 7):.7f}"
            )
            log.out("Validation loss decreased (inf --> 0.671234).  Saving model ...")
    return Truth(
        steps=(size + last,), losses=(loss,), val_losses=(val,), epochs=(1, 2)
    )  # fmt: skip
