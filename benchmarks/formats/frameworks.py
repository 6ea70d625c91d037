"""Frameworks and trainers that train any model."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, program


def _say_trainer(log: Log, num_epochs: int, per_epoch: int) -> None:
    for text in (
        "***** Running training *****",
        f"  Num examples = {per_epoch * 32:,}",
        f"  Num Epochs = {num_epochs}",
        "  Instantaneous batch size per device = 8",
        "  Total train batch size (w. parallel, distributed & accumulation) = 32",
        "  Gradient Accumulation steps = 1",
        f"  Total optimization steps = {num_epochs * per_epoch:,}",
        "  Number of trainable parameters = 124,439,808",
    ):
        log.err(f"[INFO|trainer.py:1618] {log.stamp()} >> {text}")


@program("huggingface/transformers", "src/transformers/trainer_callback.py", "ProgressCallback")
def hf_trainer_bar(log: Log) -> Truth:
    """A bar of steps and one of evaluation on standard error, the losses on standard output."""
    num_epochs, per_epoch = 3, log.pick(300, 420)
    total, last = num_epochs * per_epoch, per_epoch + log.pick(40, 190)
    _say_trainer(log, num_epochs, per_epoch)
    loss = val = 0.0
    for step in log.steps(last, 1, 1, 0.9):
        log.bar(render_tqdm(step, total, step * 0.9))
        epoch = step / per_epoch
        if step % 25 == 0:
            loss = log.loss(step / total, 3)
            log.bar(" " * 60)
            log.out(
                str({
                    "loss": f"{loss:.4g}",
                    "grad_norm": f"{log.near(1.4):.4g}",
                    "learning_rate": f"{5e-5 * (1 - step / total):.4g}",
                    "epoch": f"{epoch:.4g}",
                })
            )  # fmt: skip
        if step == per_epoch:
            log.err(f"\n[INFO|trainer.py:4643] {log.stamp()} >> ***** Running Evaluation *****")
            log.err("  Num examples = 1,000\n  Batch size = 8")
            for done in range(1, 126):
                log.lower_bar(render_tqdm(done, 125, done * 0.2))
                log.wait(0.2)
            val = log.loss(step / total, 3)
            log.out(
                str({
                    "eval_loss": f"{val:.4g}",
                    "eval_runtime": "25.11",
                    "eval_samples_per_second": "39.8",
                    "eval_steps_per_second": "4.98",
                    "epoch": f"{epoch:.4g}",
                })
            )  # fmt: skip
    return Truth(
        steps=(last,),
        totals=(total,),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("huggingface/transformers", "src/transformers/trainer_callback.py", "PrinterCallback")
def hf_trainer_no_bar(log: Log) -> Truth:
    """`disable_tqdm`: no line has a step. The epoch says how far it is, its head how long."""
    num_epochs, per_epoch = 4, 250
    total, last = num_epochs * per_epoch, log.pick(300, 900, 10)
    _say_trainer(log, num_epochs, per_epoch)
    loss = val = 0.0
    for step in log.steps(last, 10, 10, 0.4):
        loss = log.loss(step / total, 3)
        log.out(
            f"{{'loss': '{loss:.4g}', 'grad_norm': '{log.near(1.4):.4g}', "
            f"'learning_rate': '{5e-5 * (1 - step / total):.4g}', "
            f"'epoch': '{step / per_epoch:.4g}'}}"
        )
        if step % per_epoch == 0:
            val = log.loss(step / total, 3)
            log.wait(20.0)
            log.out(
                f"{{'eval_loss': '{val:.4g}', 'eval_runtime': '19.9', "
                f"'eval_samples_per_second': '50.1', 'epoch': '{step / per_epoch:.4g}'}}"
            )
    return Truth(
        steps=(last,),
        totals=(total,),
        also=(Count((last // per_epoch,), (num_epochs, None)),),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("Lightning-AI/pytorch-lightning", "src/lightning/pytorch/callbacks/progress/"
         "tqdm_progress.py", "TQDMProgressBar")  # fmt: skip
def lightning_tqdm(log: Log) -> Truth:
    """A bar an epoch, from epoch 0, with the bar of the validation below it."""
    batches = log.pick(150, 260)
    stop = 2 * batches + log.pick(30, 120)
    log.err("GPU available: True (cuda), used: True")
    log.err("  | Name  | Type       | Params | Mode\n---------------------------------------------")
    log.err("0 | model | GPT        | 124 M  | train")
    for done in (0, 1, 2):
        log.bar(render_tqdm(done, 2, done * 0.3, "Sanity Checking DataLoader 0", inverts=False))
        log.wait(0.3)
    log.bar(" " * 80 + "\r")
    loss = val = 0.0
    more = "v_num=3"
    for step in log.steps(stop, 1, 1, 0.35):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        loss = log.loss(step / (5 * batches), 3)
        more = f"v_num=3, train_loss={loss:.3f}" + (f", val_loss={val:.3f}" if val else "")
        log.bar(render_tqdm(done, batches, done * 0.35, f"Epoch {epoch}", more=more, inverts=False))
        if done == batches:
            for at in range(0, 31):
                name = "Validation DataLoader 0"
                log.lower_bar(render_tqdm(at, 30, at * 0.2, name, inverts=False))
                log.wait(0.2)
            val = log.loss(step / (5 * batches), 3)
            log.err()
    return Truth(steps=(stop,), losses=(loss,), val_losses=(val,))


def _render_keras(done: int, batches: int, took_s: float, more: str) -> str:
    width = int(20 * done / batches)
    left = int((batches - done) * 0.06)
    shown = f"{took_s:.0f}s" if done == batches else f"{left}s"
    green = f"\x1b[32m{'━' * width}\x1b[0m" if width else ""
    return (
        f"\x1b[1m{done:{len(str(batches))}d}/{batches}\x1b[0m {green}"
        f"\x1b[37m{'━' * (20 - width)}\x1b[0m \x1b[1m{shown}\x1b[0m 60ms/step{more}"
    )


@program("keras-team/keras", "keras/src/utils/progbar.py", "Progbar.update, verbose 1")
def keras_bar(log: Log) -> Truth:
    """Colours, a state in a line of its own as into a pipe, and the number of epochs above."""
    num_epochs, batches = 10, log.pick(180, 260)
    stop = 2 * batches + log.pick(30, 150)
    loss = val = 0.0
    for step in log.steps(stop, 1, 1, 0.06):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        if done == 1:
            log.out(f"Epoch {epoch + 1}/{num_epochs}")
        loss = log.loss(step / (num_epochs * batches))
        more = f" - accuracy: {log.near(0.4):.4f} - loss: {loss:.4f}"
        if done == batches:
            log.wait(3.0)
            val = log.loss(step / (num_epochs * batches))
            more += f" - val_accuracy: {log.near(0.4):.4f} - val_loss: {val:.4f}\n"
        log.write("\n" + _render_keras(done, batches, done * 0.06, more))
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches,),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("keras-team/keras", "keras/src/utils/progbar.py", "Progbar.update, verbose 2")
def keras_lines(log: Log) -> Truth:
    """A line an epoch, with the number of its batches."""
    num_epochs, batches, last = 40, log.pick(300, 700), log.pick(6, 21)
    loss = val = 0.0
    for epoch in log.steps(last, 1, 1, 31.0):
        loss, val = log.loss(epoch / num_epochs), log.loss(epoch / num_epochs)
        log.out(f"Epoch {epoch}/{num_epochs}")
        log.wait(12.0)
        log.out(
            f"{batches}/{batches} - 31s - 62ms/step - accuracy: {log.near(0.4):.4f} - "
            f"loss: {loss:.4f} - val_accuracy: {log.near(0.4):.4f} - val_loss: {val:.4f}"
        )
        if epoch % 5 == 0:
            log.out(f"\nEpoch {epoch}: saving model to out/{epoch:02d}.keras")
    return Truth(
        steps=(last * batches,),
        totals=(num_epochs * batches,),
        also=(Count((last,), (num_epochs,)),),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("mosaicml/composer", "composer/loggers/console_logger.py", "_get_progress_string")
def composer(log: Log) -> Truth:
    """The batch stands in a head, metrics in lines of their own; evaluations have batches too."""
    total, last = 4800, log.pick(1100, 1900, 50)
    log.out("*" * 30 + "\nConfig:\nnum_gpus: 8\nnum_nodes: 1\nrank_zero_seed: 17\n\n" + "*" * 30)
    loss = val = 0.0
    for step in log.steps(last, 50, 50, 0.7):
        loss = log.loss(step / total)
        log.out(
            f"[batch={step}/{total}]:\n"
            f"\t Train time/batch: {step - 1}\n"
            f"\t Train time/sample: {(step - 1) * 256}\n"
            f"\t Train time/token: {(step - 1) * 524288}\n"
            f"\t Train loss/train/total: {loss:.4f}\n"
            f"\t Train metrics/train/LanguagePerplexity: {loss * 9:.4f}\n"
            f"\t Train throughput/batches_per_sec: {log.near(1.4):.4f}\n"
            f"\t Train lr-DecoupledAdamW/group0: 0.0002"
        )
        if step % 500 == 0:
            for batch in (1, 9, 18, 27, 36, 45, 54, 63, 72):
                log.out(f"[Eval batch={batch}/80] Eval on eval data")
                log.wait(1.0)
            val = log.loss(step / total)
            log.out(
                "[Eval batch=80/80] Eval on eval data:\n"
                f"\t Eval metrics/eval/LanguageCrossEntropy: {val:.4f}\n"
                f"\t Eval metrics/eval/LanguagePerplexity: {val * 9:.4f}"
            )
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,))


@program("fastai/fastprogress", "fastprogress/fastprogress.py", "ConsoleProgressBar.on_update")
def fastai(log: Log) -> Truth:
    """A bar that counts epochs from 1 over rows that count them from 0."""
    num_epochs, batches = 6, log.pick(180, 260)
    stop = 3 * batches + log.pick(30, 150)
    loss = val = shown = 0.0
    log.out(f"{'epoch':<10}{'train_loss':<12}{'valid_loss':<12}{'accuracy':<10}{'time':<10}")
    for step in log.steps(stop, 1, 1, 0.2):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        shown = log.loss(step / (num_epochs * batches))
        fill = int(60 * done / batches)
        log.bar(
            f"Epoch {epoch + 1}/{num_epochs} : |{'█' * fill}{'-' * (60 - fill)}| "
            f"{100 * done / batches:.2f}% [{done}/{batches} "
            f"00:{done // 5 % 60:02d}<00:09 {shown:.4f}]",
            "out",
        )
        if done == batches:
            for at in range(1, 41):
                fill = int(60 * at / 40)
                log.bar(
                    f"Epoch {epoch + 1}/{num_epochs} : |{'█' * fill}{'-' * (60 - fill)}| "
                    f"{100 * at / 40:.2f}% [{at}/40 00:0{at // 10}<00:03 {shown:.4f}]",
                    "out",
                )
                log.wait(0.1)
            loss, val = (log.loss(step / (num_epochs * batches), 6) for _ in range(2))
            log.bar(" " * 100, "out")
            log.bar(
                f"{epoch:<10}{loss:<12.6f}{val:<12.6f}{log.near(0.6):<10.6f}{'00:52':<10}\n", "out"
            )
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches,),
        also=(Count((2, 3, 4), (num_epochs, None)),),
        losses=(loss, shown),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("skorch-dev/skorch", "skorch/callbacks/logging.py", "PrintLog.on_epoch_end")
def skorch(log: Log) -> Truth:
    """A table with a head, rows of epochs, and colours for the best so far."""
    last = log.pick(12, 44)
    log.out("  epoch    train_loss    valid_acc    valid_loss      dur")
    log.out("-------  ------------  -----------  ------------  -------")
    loss = val = 0.0
    for epoch in log.steps(last, 1, 1, 12.0):
        loss, val = log.loss(epoch / 50), log.loss(epoch / 50)
        best = "\x1b[32m" if epoch % 3 else ""
        log.out(
            f"{epoch:7d}  \x1b[36m{loss:12.4f}\x1b[0m  {log.near(0.6):11.4f}  "
            f"{best}{val:12.4f}{best and chr(27) + '[0m'}  {log.near(12.0):7.4f}"
        )
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("allenai/allennlp", "allennlp/training/gradient_descent_trainer.py",
         "training_util.description_from_metrics(metrics)")  # fmt: skip
def allennlp(log: Log) -> Truth:
    """Bars with their figures before them, of validation as of training; epochs from 0."""
    num_epochs, batches = 12, log.pick(150, 260)
    stop = 2 * batches + log.pick(30, 120)
    loss = val = shown = 0.0

    def say(name: str, text: str) -> None:
        log.err(f"{log.stamp()} - INFO - allennlp.training.{name} - {text}")

    for step in log.steps(stop, 1, 1, 0.4):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        if done == 1:
            say("gradient_descent_trainer", f"Epoch {epoch}/{num_epochs - 1}")
            say("gradient_descent_trainer", "Worker 0 memory usage: 4.1G")
            say("gradient_descent_trainer", "Training")
        shown = log.loss(step / (num_epochs * batches))
        name = f"accuracy: {log.near(0.5):.4f}, batch_loss: {shown:.4f}, loss: {shown:.4f} ||"
        log.bar(render_tqdm(done, batches, done * 0.4, name))
        if done < batches:
            continue
        log.err()
        say("gradient_descent_trainer", "Validating")
        loss, val = (log.loss(step / (num_epochs * batches), 3) for _ in range(2))
        for at in range(1, 51):
            name = f"accuracy: {log.near(0.5):.4f}, batch_loss: {val:.4f}, loss: {val:.4f} ||"
            log.bar(render_tqdm(at, 50, at * 0.2, name))
            log.wait(0.2)
        log.err()
        say("callbacks.console_logger", "                       Training |  Validation")
        say("callbacks.console_logger", "accuracy           |     0.512  |     0.498")
        say("callbacks.console_logger", f"loss               |  {loss:8.3f}  |  {val:8.3f}")
        say("gradient_descent_trainer", "Epoch duration: 0:01:32.120399")
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches, None),
        losses=(shown,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("facebookresearch/fairseq", "fairseq/logging/progress_bar.py", "JsonProgressBar.log")
def fairseq_json(log: Log) -> Truth:
    """JSON behind a logger's head, figures as text; epochs and validation by other names."""
    per_epoch, last = 800, log.pick(1700, 2300, 20)
    loss = val = 0.0

    def say(name: str, text: str) -> None:
        log.err(f"{log.clock()} | INFO | {name} | {text}")

    say("fairseq_cli.train", "task: LanguageModelingTask")
    say("fairseq_cli.train", "max tokens per device = 2048 and max sentences per device = None")
    say("fairseq.trainer", "begin training epoch 1")
    for step in log.steps(last, 20, 20, 0.3):
        epoch = 1 + (step - 1) // per_epoch
        loss = log.loss(step / 4000, 3)
        say(
            "train_inner",
            f'{{"epoch": {epoch}, "update": {step / per_epoch:.3f}, "loss": "{loss}", '
            f'"ppl": "{loss * 20:.2f}", "wps": "{log.near(51000):.1f}", '
            f'"ups": "{log.near(3.1):.2f}", "wpb": "16384", "bsz": "32", '
            f'"num_updates": "{step}", "lr": "0.000214", "gnorm": "{log.near(0.9):.3f}", '
            f'"loss_scale": "64", "train_wall": "60", "gb_free": "8.1", "wall": "{step}"}}',
        )
        if step % per_epoch == 0:
            val = log.loss(step / 4000, 3)
            log.wait(8.0)
            say(
                "valid",
                f'{{"epoch": {epoch}, "valid_loss": "{val}", "valid_ppl": "{val * 20:.2f}", '
                f'"valid_num_updates": "{step}"}}',
            )
            say(
                "fairseq.checkpoint_utils",
                f"Preparing to save checkpoint for epoch {epoch} @ {step}",
            )
            say(
                "train",
                f'{{"epoch": {epoch}, "train_loss": "{log.loss(step / 4000, 3)}", '
                f'"train_num_updates": "{step}", "train_lr": "0.0002"}}',
            )
            say("fairseq.trainer", f"begin training epoch {epoch + 1}")
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("open-mmlab/mmengine", "mmengine/runner/log_processor.py", "Epoch({mode})")
def mmengine_epochs(log: Log) -> Truth:
    """Epoch and iteration in brackets for training and validation; the epochs are in the config."""
    num_epochs, batches = 12, 50 * log.pick(4, 9)
    stop = 2 * batches + 50 * log.pick(1, 3)
    log.out(
        f"train_cfg = dict(max_epochs={num_epochs}, type='EpochBasedTrainLoop', val_interval=1)"
    )
    log.out("work_dir = './work_dirs/resnet50'\n")

    def say(text: str) -> None:
        log.out(f"{log.clock('%Y/%m/%d %H:%M:%S')} - mmengine - INFO - {text}")

    say("Checkpoints will be saved to work_dirs/resnet50.")
    loss = 0.0
    for step in log.steps(stop, 50, 50, 0.3):
        epoch, done = (step - 1) // batches + 1, (step - 1) % batches + 1
        loss = log.loss(step / (num_epochs * batches))
        say(
            f"Epoch(train)  [{epoch}][{done:{len(str(batches))}d}/{batches}]  lr: 1.0000e-02  "
            f"eta: {render_span((num_epochs * batches - step) * 0.3)}  time: {log.near(0.3):.4f}  "
            f"data_time: 0.0081  memory: 4912  loss: {loss:.4f}  loss_cls: {loss * 0.6:.4f}"
        )
        if done == batches:
            say(f"Saving checkpoint at {epoch} epochs")
            say(f"Epoch(val)  [{epoch}][ 50/79]    eta: 0:00:02  time: 0.0711  data_time: 0.0200")
            say(
                f"Epoch(val) [{epoch}][79/79]    accuracy/top1: {log.near(60):.4f}  "
                "data_time: 0.0193  time: 0.0704"
            )
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches, None),
        losses=(loss,),
        num_epochs=num_epochs,
    )


@program("facebookresearch/detectron2", "detectron2/utils/events.py", "CommonMetricPrinter.write")
def detectron2(log: Log) -> Truth:
    """Losses of many names, `eta` before the iteration, and an evaluation that counts images."""
    total, last = 90000, log.pick(1219, 1999, 20)

    def say(name: str, text: str) -> None:
        log.out(f"\x1b[32m[{log.clock('%m/%d %H:%M:%S')} d2.{name}]: \x1b[0m{text}")

    log.out(f"SOLVER:\n  BASE_LR: 0.02\n  CHECKPOINT_PERIOD: 5000\n  MAX_ITER: {total}")
    say("engine.train_loop", "Starting training from iteration 0")
    loss = 0.0
    for step in log.steps(last, 20, 19, 0.2):
        loss = log.loss(step / 4000, 3)
        say(
            "utils.events",
            f" eta: {render_span((total - step) * 0.2)}  iter: {step}  total_loss: {loss:.4g}  "
            f"loss_cls: {loss * 0.4:.4g}  loss_box_reg: {loss * 0.3:.4g}  "
            f"loss_rpn_cls: {loss * 0.2:.4g}  time: {log.near(0.2):.4f}  last_time: 0.2019  "
            f"data_time: 0.0061  last_data_time: 0.0044   lr: 0.0199  max_mem: 5120M",
        )
        if step == 1019:
            for done in (11, 431, 862, 1250):
                say(
                    "evaluation.evaluator",
                    f"Inference done {done}/1250. Dataloading: 0.0011 s/iter. Inference: 0.0411 "
                    "s/iter. Eval: 0.0003 s/iter. Total: 0.0425 s/iter. ETA=0:00:35",
                )
                log.wait(15.0)
    return Truth(steps=(last, last + 1), totals=(total, None), losses=(loss,))


@program("huggingface/transformers", "examples/pytorch/language-modeling/run_clm_no_trainer.py",
         "progress_bar = tqdm(range(args.max_train_steps)")  # fmt: skip
def accelerate_no_trainer(log: Log) -> Truth:
    """One bar without a name over all epochs; a line an epoch has the loss of the evaluation."""
    num_epochs, per_epoch = 3, log.pick(210, 330)
    total, last = num_epochs * per_epoch, per_epoch + log.pick(40, 190)

    def say(text: str) -> None:
        log.err(f"{log.clock('%m/%d/%Y %H:%M:%S')} - INFO - __main__ - {text}")

    for text in (
        "***** Running training *****",
        f"  Num examples = {per_epoch * 8}",
        f"  Num Epochs = {num_epochs}",
        "  Gradient Accumulation steps = 1",
        f"  Total optimization steps = {total}",
    ):
        say(text)
    val = 0.0
    for step in log.steps(last, 1, 1, 0.6):
        log.bar(render_tqdm(step, total, step * 0.6))
        if step == per_epoch:
            log.wait(12.0)
            val = log.loss(step / total, 6)
            log.err()
            say(f"epoch 0: perplexity: {val * 9} eval_loss: {val}")
    return Truth(steps=(last,), totals=(total,), val_losses=(val,), num_epochs=num_epochs)


@program("Lightning-AI/pytorch-lightning", "src/lightning/pytorch/callbacks/progress/"
         "rich_progress.py", "RichProgressBar, into a pipe")  # fmt: skip
def lightning_rich(log: Log) -> Truth:
    """Into a pipe rich draws nothing until the end: one state of the last epoch, in two lines."""
    num_epochs, batches = log.pick(3, 9), log.pick(60, 190)
    log.out("Trainable params: 33                      \nNon-trainable params: 0")
    log.out("Modules in train mode: 1\nModules in eval mode: 0\nTotal FLOPs: 0")
    log.wait(num_epochs * batches * 0.3)
    loss, val = log.loss(0.9, 3), log.loss(0.9, 3)
    log.out(
        f"Epoch {num_epochs - 1}/{num_epochs - 1}  ━━━━━━━━━━━━━━━━━ {batches}/{batches} "
        f"0:00:{batches * 3 // 10 % 60:02d} • 0:00:00 3.31it/s train_loss: {loss:.3f}\n"
        f"{'':63}val_loss: {val:.3f}  "
    )
    return Truth(
        steps=(num_epochs * batches,),
        totals=(num_epochs * batches, None),
        losses=(loss,),
        val_losses=(val,),
    )


@program("facebookresearch/fairseq", "fairseq/logging/progress_bar.py", "SimpleProgressBar.log")
def fairseq_simple(log: Log) -> Truth:
    """Place in the epoch before, all updates within; validation and epoch behind pipes."""
    per_epoch, last = 640, log.pick(1400, 1900, 20)
    loss = val = 0.0

    def say(name: str, text: str) -> None:
        log.err(f"{log.clock()} | INFO | {name} | {text}")

    say("fairseq.trainer", "begin training epoch 1")
    for step in log.steps(last, 20, 20, 0.3):
        epoch, done = 1 + (step - 1) // per_epoch, 1 + (step - 1) % per_epoch
        loss = log.loss(step / 4000, 3)
        say(
            "train_inner",
            f"epoch {epoch:03d}:  {done:5d} / {per_epoch} loss={loss}, nll_loss={loss - 0.3:.3f}, "
            f"ppl={loss * 20:.2f}, wps={log.near(51000):.1f}, ups=3.1, wpb=16384, bsz=32, "
            f"num_updates={step}, lr=0.000214, gnorm={log.near(0.9):.3f}, clip=0, "
            f"loss_scale=64, train_wall=6, gb_free=8.1, wall={int(log.now_s)}",
        )
        if done == per_epoch:
            val = log.loss(step / 4000, 3)
            log.wait(8.0)
            say(
                "valid",
                f"epoch {epoch:03d} | valid on 'valid' subset | loss {val} | nll_loss 4.1 | "
                f"ppl {val * 20:.2f} | wps 91023.1 | num_updates {step}",
            )
            say(
                "train",
                f"epoch {epoch:03d} | loss {log.loss(step / 4000, 3)} | ppl 310.2 | "
                f"num_updates {step} | lr 0.0002 | wall 211",
            )
            say("fairseq.trainer", f"begin training epoch {epoch + 1}")
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("pytorch/ignite", "examples/cifar10/main.py", "log_metrics, with_pbars=False")
def ignite_cifar10(log: Log) -> Truth:
    """Only epochs: metrics of the training set and of the test set, a line each, in blocks."""
    num_epochs, last = 24, log.pick(5, 17)

    def say(text: str) -> None:
        log.err(f"{log.stamp()} CIFAR10-Training INFO: {text}")

    say("Train resnet18 on CIFAR10")
    say("Configuration:")
    for key, value in {"num_epochs": num_epochs, "num_warmup_epochs": 4, "batch_size": 512}.items():
        say(f"\t{key}: {value}")
    say(f"Engine run starting with max_epochs={num_epochs}.")
    loss = val = 0.0
    for epoch in log.steps(last, 1, 1, 22.0):
        loss, val = log.loss(epoch / num_epochs, 12), log.loss(epoch / num_epochs, 12)
        say(f"Epoch[{epoch}] Complete. Time taken: 00:00:21.402")
        if epoch % 3 and epoch != last:
            continue
        for tag, figure in (("Train", loss), ("Test", val)):
            say(
                f"Epoch[{epoch}] - Evaluation time (seconds): {log.near(4.0):.3f}\n"
                f" - {tag} metrics:\n \tAccuracy: 0.61244\n\tLoss: {figure}"
            )
    return Truth(
        steps=(last,),
        totals=(num_epochs,),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("flairNLP/flair", "flair/trainers/trainer.py", "- iter {batch_no + 1}/{len(batch_loader)}")
def flair(log: Log) -> Truth:
    """Ten lines an epoch, a summary in capitals, and the loss of the development set."""
    num_epochs, batches = 10, 10 * log.pick(40, 70)
    stop = 2 * batches + batches // 10 * log.pick(2, 8)
    loss = val = 0.0

    def say(text: str) -> None:
        log.out(f"{log.clock('%Y-%m-%d %H:%M:%S')},{log.pick(100, 999)} {text}")

    for text in ("Training Params:", f' - max_epochs: "{num_epochs}"', ' - mini_batch_size: "32"'):
        say(text)
    for step in log.steps(stop, batches // 10, batches // 10, 0.2):
        epoch, done = (step - 1) // batches + 1, (step - 1) % batches + 1
        loss = log.loss(step / (num_epochs * batches), 8)
        say(
            f"epoch {epoch} - iter {done}/{batches} - loss {loss:.8f} - time (sec): "
            f"{done * 0.2:.2f} - samples/sec: {log.near(160):.2f} - lr: 0.100000 - "
            "momentum: 0.000000"
        )
        if done == batches:
            val = log.loss(step / (num_epochs * batches), 6)
            say("-" * 100)
            say(f"EPOCH {epoch} done: loss {log.loss(step / (num_epochs * batches)):.4f} - lr: 0.1")
            log.wait(9.0)
            say(f"DEV : loss {val} - f1-score (micro avg)  0.7811")
            say("saving best model")
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches, None),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("explosion/spaCy", "spacy/training/loggers.py", "console_logger, msg.row")
def spacy(log: Log) -> Truth:
    """A table of E and #, losses of parts that are sums, and scores in per cent."""
    last, every = log.pick(2200, 5000, 200), 200
    log.out("\u2139 Pipeline: ['tok2vec', 'ner']\n\u2139 Initial learn rate: 0.001")
    log.out("E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE ")
    log.out("---  ------  ------------  --------  ------  ------  ------  ------")
    part = loss = 0.0
    for step in log.steps(last, every, 0, 0.1):
        part, loss = (round(log.loss(step / 9000, 2) * 40, 2) for _ in range(2))
        log.out(
            f"{step // 900:3d}  {step:6d}  {part:12.2f}  {loss:8.2f}  {log.near(60):6.2f}  "
            f"{log.near(60):6.2f}  {log.near(60):6.2f}  {0.6:6.2f}"
        )
    return Truth(steps=(last,), also=(Count((last // 900, last // 900 + 1)),), losses=(part, loss))


@program("open-mmlab/mmengine", "mmengine/runner/log_processor.py", "Iter({mode})")
def mmengine_iterations(log: Log) -> Truth:
    """Iterations of all, and of a validation in the same brackets."""
    total, last = 160000, log.pick(4250, 7900, 50)

    def say(text: str) -> None:
        log.out(f"{log.clock('%Y/%m/%d %H:%M:%S')} - mmengine - INFO - {text}")

    loss = 0.0
    for step in log.steps(last, 50, 50, 0.3):
        loss = log.loss(step / 20000)
        say(
            f"Iter(train) [{step:6d}/{total}]  base_lr: 9.9001e-03 lr: 9.9001e-03  "
            f"eta: {render_span((total - step) * 0.3)}  time: {log.near(0.3):.4f}  "
            f"data_time: 0.0090  memory: 7120  loss: {loss:.4f}  "
            f"decode.loss_ce: {loss * 0.7:.4f}  decode.acc_seg: {log.near(60):.4f}"
        )
        if step % 2000 == 0:
            say(f"Saving checkpoint at {step} iterations")
            for at in range(50, 501, 50):
                say(f"Iter(val) [{at}/500]    eta: 0:00:20  time: 0.0601  data_time: 0.0011")
                log.wait(3.0)
            say("Iter(val) [500/500]    aAcc: 80.1100  mIoU: 61.2200  mAcc: 70.1000")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("coqui-ai/Trainer", "trainer/logging/console_logger.py", "ConsoleLogger.print_train_step")
def coqui_trainer(log: Log) -> Truth:
    """Blocks in bold: place in the epoch and the global step above, losses below."""
    num_epochs, batches = 1000, log.pick(150, 240)
    stop = 2 * batches + 25 * log.pick(2, 5)
    loss = mean = val = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.5):
        epoch, at = divmod(step, batches)
        if at == 0:
            if epoch:
                val = log.loss(step / 4000, 10)
                log.err("\n\x1b[1m > EVALUATION \x1b[0m\n")
                for one in range(3):
                    log.err(
                        f"\x1b[1m   --> STEP: {one}\x1b[0m\n     | > loss: {val + 0.1}  ({val})\n"
                    )
                log.err(f"\n  \x1b[1m--> EVAL PERFORMANCE\x1b[0m\n     | > avg_loss:\x1b[92m {val} "
                        "\x1b[0m(-0.021)\n")  # fmt: skip
            log.err(f"\n\x1b[4m\x1b[1m > EPOCH: {epoch}/{num_epochs}\x1b[0m")
            log.err(f"\n\x1b[1m > TRAINING ({log.clock()}) \x1b[0m")
        if step % 25:
            continue
        done, loss, mean = step, log.loss(step / 4000, 10), log.loss(step / 4000, 10)
        log.err(
            f"\n\x1b[1m   --> TIME: {log.clock()} -- STEP: {at}/{batches} -- "
            f"GLOBAL_STEP: {step}\x1b[0m\n"
            f"     | > loss: {loss}  ({mean})\n"
            f"     | > grad_norm: {log.near(1.1):.10f}  (1.2011)\n"
            "     | > current_lr: 0.0002 \n"
            f"     | > step_time: {log.near(0.5):.4f}  (0.5113)\n"
        )
    return Truth(
        steps=(done, done + 1),
        totals=(num_epochs * batches, None),
        losses=(loss, mean),
        val_losses=(val,),
        num_epochs=num_epochs,
    )
