"""Speech and translation."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_tqdm
from benchmarks.formats.model import Count, Truth, program


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


@program("marian-nmt/marian-dev", "src/training/scheduler.h", "Ep. {} : Up. {} : Sen. {}")
def marian(log: Log) -> Truth:
    """Epoch, updates and sentences between colons, a cost with counts behind it."""
    last = log.pick(12000, 27000, 500)
    loss = val = 0.0

    def say(text: str) -> None:
        log.err(f"[{log.clock()}] {text}")

    say("Training started")
    for step in log.steps(last, 500, 500, 0.06):
        epoch = 1 + step // 10000
        loss = log.loss(step / 60000, 8)
        say(
            f"Ep. {epoch} : Up. {step} : Sen. {step % 10000 * 61:,} : Cost {loss:.8f} * "
            f"{log.pick(900000, 990000):,} @ 3,120 after {step * 1900:,} : Time 30.11s : "
            f"{log.near(31000):.2f} words/s : gNorm {log.near(0.8):.4f} : L.r. 3.0000e-04"
        )
        if step % 5000 == 0:
            val = log.loss(step / 60000, 6)
            say("Saving model weights and runtime parameters to model.npz")
            say(f"[valid] Ep. {epoch} : Up. {step} : cross-entropy : {val} : new best")
            say(f"[valid] Ep. {epoch} : Up. {step} : translation : {log.near(24):.4f} : new best")
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("awslabs/sockeye", "sockeye/training.py", "Speedometer, 'E=%d B=%d")
def sockeye(log: Log) -> Truth:
    """Epoch and batch as letters, perplexities, and checkpoints that sum up."""
    last = log.pick(4100, 9900, 50)

    def say(where: str, text: str) -> None:
        log.err(f"[{log.clock('%Y-%m-%d:%H:%M:%S')}:INFO:sockeye.training:{where}] {text}")

    say("fit", "Training started.")
    for step in log.steps(last, 50, 50, 0.15):
        say(
            "__call__",
            f"E={step // 3000} B={step}\ts/sec={log.near(910):.2f} tok/sec={log.near(31000):.2f} "
            f"u/sec={log.near(6.6):.2f}\tppl={log.loss(step / 20000, 6) * 9:f} ",
        )
        if step % 1000 == 0:
            say(
                "_create_checkpoint",
                f"Checkpoint [{step // 1000}]\tUpdates={step} Epoch={step // 3000} "
                f"Samples={step * 140} Time-cost=151.204 Updates/sec=6.610",
            )
            say("_create_checkpoint", f"Checkpoint [{step // 1000}]\tTrain-perplexity=21.204")
            say("_evaluate", f"Checkpoint [{step // 1000}]\tValidation-perplexity=18.511")
    return Truth(steps=(last,))


@program("espnet/espnet", "espnet2/train/reporter.py", "SubReporter.log_message")
def espnet(log: Log) -> Truth:
    """Figures glued to words: the epoch, and batches as a range since the last line."""
    num_epochs, batches, every = 50, 1000, 50
    stop = 2 * batches + every * log.pick(3, 18)
    loss = val = 0.0

    def say(line: int, text: str) -> None:
        log.err(f"[node-1:0/2] {log.stamp()} (trainer:{line}) INFO: {text}")

    say(289, f"1/{num_epochs}epoch started")
    for step in log.steps(stop, every, every, 0.2):
        epoch, done = (step - 1) // batches + 1, (step - 1) % batches + 1
        loss = log.loss(step / 9000, 3)
        say(
            762,
            f"{epoch}epoch:train:{done - every + 1}-{done}batch: iter_time=1.311e-04, "
            f"forward_time=0.112, loss_ctc={loss * 1.3:.3f}, loss_att={loss * 0.8:.3f}, "
            f"acc=0.412, loss={loss:.3f}, backward_time=0.121, optim0_lr0=1.102e-04, "
            "train_time=0.811",
        )
        if done == batches:
            val = log.loss(step / 9000, 3)
            log.wait(20.0)
            say(
                343,
                f"{epoch}epoch results: [train] iter_time=1.1e-04, loss="
                f"{log.loss(step / 9000, 3)}, train_time=0.8, time=3 minutes and 21.1 seconds, "
                f"total_count={step}, gpu_max_cached_mem_GB=20.1, [valid] loss_ctc=41.2, "
                f"acc=0.5, loss={val}, time=20.1 seconds, total_count={epoch * 60}",
            )
            say(391, "The best model has been updated: valid.acc")
            say(283, f"{epoch + 1}/{num_epochs}epoch started. Estimated time to finish: 3 hours")
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches, None),
        also=(Count((2, 3), (num_epochs,)),),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("k2-fsa/icefall", "egs/librispeech/ASR/zipformer/train.py", "Epoch {params.cur_epoch}, ")
def icefall(log: Log) -> Truth:
    """Every rank logs its own. No line has the length of an epoch: a range is right."""
    batches, every = log.pick(1210, 1240), 50
    stop = batches + every * log.pick(3, 14)
    losses: list[float] = [0.0] * 4
    val = 0.0
    done = 0

    def say(rank: int, line: int, text: str) -> None:
        log.err(f"{log.stamp()} INFO [train.py:{line}] ({rank}/4) {text}", rank)

    for step in log.steps(stop, 1, 0, 0.3):
        epoch, at = divmod(step, batches)
        if at % every == 0:
            done = step
            for rank in range(4):
                losses[rank] = log.loss(step / 9000)
                total = log.loss(step / 9000)
                say(
                    rank,
                    1202,
                    f"Epoch {epoch + 1}, batch {at}, loss[loss={losses[rank]:.4g}, simple_loss="
                    f"{total:.4g}, pruned_loss={total:.4g}, over 9021.00 frames. ], "
                    f"tot_loss[loss={total:.4g}, over 1203411.00 frames. ], batch size: 27, "
                    "lr: 3.91e-02, grad_scale: 8.0",
                )
        if at == 1000:
            val = log.loss(step / 9000)
            for rank in range(4):
                say(rank, 1226, "Computing validation loss")
                say(
                    rank,
                    1234,
                    f"Epoch {epoch + 1}, validation: loss={val:.4g}, over 944034.00 frames. ",
                )
    longest = batches // every * every
    at = done - batches
    return Truth(
        steps=tuple(range(longest + at, longest + every + at + 2)),
        epochs=(1, 2),
        losses=tuple(float(f"{loss:.4g}") for loss in losses),
        val_losses=(float(f"{val:.4g}"),),
    )


@program("speechbrain/speechbrain", "speechbrain/core.py", "t.set_postfix(train_loss=")
def speechbrain(log: Log) -> Truth:
    """Coloured bars without a name, of training and validation; a line an epoch sums up."""
    batches = log.pick(150, 240)
    stop = 2 * batches + log.pick(30, 120)
    loss = val = 0.0
    for step in log.steps(stop, 1, 1, 0.5):
        epoch, done = (step - 1) // batches + 1, (step - 1) % batches + 1
        if done == 1:
            log.err(f"speechbrain.utils.epoch_loop - Going into epoch {epoch}")
        loss = log.loss(step / 2000, 3)
        bar = render_tqdm(done, batches, done * 0.5, more=f"train_loss={loss:.3g}")
        loss = float(f"{loss:.3g}")
        log.bar(bar.replace("%|", "%|\x1b[35m", 1).replace("| ", "\x1b[0m| ", 1))
        if done == batches:
            log.err()
            for at in range(1, 31):
                log.bar(render_tqdm(at, 30, at * 0.3).replace("%|", "%|\x1b[33m", 1))
                log.wait(0.3)
            log.err()
            val = log.loss(step / 2000, 2)
            log.err(
                f"speechbrain.utils.train_logger - epoch: {epoch}, lr: 1.00e+00 - train loss: "
                f"{log.loss(step / 2000, 2):.2f} - valid loss: {val:.2f}, valid PER: 40.12"
            )
    return Truth(steps=(stop,), losses=(loss,), val_losses=(val,))


@program(
    "jaywalnut310/vits", "train.py", "logger.info([x.item() for x in losses] + [global_step, lr])"
)
def vits(log: Log) -> Truth:
    """A list of losses that ends with the step and the rate; the epoch in per cent above."""
    batches = 406
    last = log.pick(1400, 3900, 200)
    losses: list[float] = []
    for step in log.steps(last, 200, 200, 0.4):
        losses = [log.loss(step / 9000, 14) for _ in range(6)]
        share = 100 * (step % batches) / batches
        log.out(f"INFO:ljs_base:Train Epoch: {1 + step // batches} [{share:.0f}%]")
        log.out(f"INFO:ljs_base:{[*losses, step, 0.00019987]}")
        if step % 1000 == 0:
            log.out(
                f"INFO:ljs_base:Saving model and optimizer state at iteration {1 + step // batches}"
            )
        if (step + 200) // batches > step // batches:
            log.out(f"INFO:ljs_base:====> Epoch: {1 + step // batches}")
    epoch = last // batches
    return Truth(steps=(last, last + 1), epochs=(epoch, epoch + 1), losses=tuple(losses))


@program("wenet-e2e/wenet", "wenet/utils/train_utils.py", "log_per_step")
def wenet(log: Log) -> Truth:
    """`Batch 3/1200` is an epoch and a batch; training and validation differ by the first word."""
    batches, every = log.pick(1510, 1590), 100
    stop = 2 * batches + every * log.pick(3, 12)
    losses = [0.0, 0.0]
    val = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.2):
        epoch, at = divmod(step, batches)
        if (at + 1) % every == 0:
            done = step
            for rank in range(2):
                losses[rank] = log.loss(step / 9000, 6)
                log.err(
                    f"{log.stamp()} DEBUG TRAIN | steps/sec {log.near(4.9):.3f}| Batch {epoch}/"
                    f"{at + 1} loss {losses[rank]:.6f} loss_att {losses[rank] * 0.8:.6f} loss_ctc "
                    f"{losses[rank] * 1.2:.6f} th_accuracy 0.612031 lr 1.0210e-03 grad_norm "
                    f"{log.near(4.1):.6f} rank {rank}",
                    rank,
                )
        if at == batches - 1:
            for test in (100, 200):
                log.err(
                    f"{log.stamp()} DEBUG CV | steps/sec 9.1| Batch {epoch}/{test} loss 6.102331 "
                )
                log.wait(9.0)
            val = log.loss(step / 9000, 6)
            log.err(f"{log.stamp()} INFO Epoch {epoch} CV info cv_loss {val} acc 0.6 rank 0")
    epochs, at = divmod(done, batches)
    low = epochs * (batches // every * every)
    return Truth(
        steps=tuple(range(low + at, low + epochs * every + at + 2)),
        epochs=(epochs,),
        losses=tuple(losses),
        val_losses=(val,),
    )
