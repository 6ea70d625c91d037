"""Vision: classification, detection, self-supervision."""

from __future__ import annotations

import json

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, program


@program("facebookresearch/mae", "util/misc.py", "MetricLogger.log_every")
def mae(log: Log) -> Truth:
    """torchvision's layout over a list of settings; the epoch is summed up at its end."""
    num_epochs, batches = 400, log.pick(240, 320)
    stop = 2 * batches + 20 * log.pick(3, 10)
    log.out(f"Namespace(accum_iter=1,\nbatch_size=64,\nblr=0.00015,\nepochs={num_epochs},")
    log.out("mask_ratio=0.75,\nmodel='mae_vit_large_patch16',\nwarmup_epochs=40,\nworld_size=8)")
    log.out(f"Start training for {num_epochs} epochs")
    loss = mean = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.3):
        epoch, at = divmod(step, batches)
        if at % 20 and at != batches - 1:
            continue
        done, loss, mean = step, log.loss(step / 5000), log.loss(step / 5000)
        log.out(
            f"Epoch: [{epoch}]  [{at:{len(str(batches))}d}/{batches}]  "
            f"eta: {render_span((batches - at) * 0.3)}  lr: 0.000002  loss: {loss:.4f} "
            f"({mean:.4f})  time: {log.near(0.3):.4f}  data: 0.0003  max mem: 10211"
        )
        if at == batches - 1:
            log.out(f"Epoch: [{epoch}] Total time: {render_span(batches * 0.3)} (0.3011 s / it)")
            log.out(f"Averaged stats: lr: 0.000002  loss: {loss:.4f} ({mean:.4f})")
    return Truth(
        steps=(done, done + 1),
        totals=(None, num_epochs * batches),
        losses=(loss, mean),
        num_epochs=num_epochs,
    )


@program("facebookresearch/dinov2", "dinov2/logging/helpers.py", "MetricLogger.log_every")
def dinov2(log: Log) -> Truth:
    """torchvision's layout over all iterations, behind a head, resumed, with an ETA in days."""
    total, first, last = 125000, 11250, log.pick(11900, 12900, 10)
    head = "4112 dinov2"
    clock = log.clock("%Y%m%d %H:%M:%S")
    log.out(f"I{clock} {head} train.py:217] Starting training from iteration {first}")
    loss = mean = 0.0
    for step in log.steps(last, 10, first, 0.9):
        loss, mean = log.loss(step / total), log.loss(step / total)
        hours = (total - step) * 0.9 / 3600
        log.out(
            f"I{log.clock('%Y%m%d %H:%M:%S')} {head} helpers.py:102] Training  "
            f"[{step:6d}/{total}]  eta: {int(hours // 24)} day, {int(hours % 24)}:12:41  "
            f"lr: 0.0020 (0.0018)  wd: 0.0512 (0.0459)  mom: 0.9941 (0.9940)  "
            f"last_layer_lr: 0.0020 (0.0017)  current_batch_size: 1024.0000 (1024.0000)  "
            f"total_loss: {loss:.4f} ({mean:.4f})  dino_local_crops_loss: {loss * 0.6:.4f} "
            f"({mean * 0.6:.4f})  koleo_loss: -0.0912 (-0.0870)  time: {log.near(0.9):.6f}  "
            "data: 0.000911  max mem: 35122"
        )
    return Truth(steps=(last, last + 1), totals=(total,), losses=(loss, mean))


@program("mlfoundations/open_clip", "src/open_clip_train/train.py", "Train Epoch: {epoch} [")
def open_clip(log: Log) -> Truth:
    """Samples of an epoch, several losses with their means, an evaluation that counts samples."""
    num_epochs, batch, samples = 32, 512, 512 * log.pick(180, 260)
    stop = samples // batch + log.pick(40, 160)
    loss = mean = val = 0.0
    seen = 0

    def say(text: str) -> None:
        log.err(f"{log.clock('%Y-%m-%d,%H:%M:%S')} | INFO | {text}")

    say("Running with a single process. Device cuda:0.")
    say(f"Params:\n  batch_size: {batch}\n  epochs: {num_epochs}\n  lr: 0.0005\n  warmup: 2000")
    for at in log.steps(stop, 1, 0, 0.8):
        epoch, index = divmod(at, samples // batch)
        if index == 0:
            say(f"Start epoch {epoch}")
        if index % 20 and index != samples // batch - 1:
            continue
        loss, mean = log.loss(at / 6000), log.loss(at / 6000)
        seen = (index + 1) * batch
        say(
            f"Train Epoch: {epoch} [{seen:>{len(str(samples))}}/{samples} "
            f"({100 * seen / samples:.0f}%)] Data (t): 0.012 Batch (t): {log.near(0.8):.3f}, "
            f"{log.near(640):.3f}/s, {log.near(640):.3f}/s/gpu LR: 0.000012 "
            f"Logit Scale: 14.286 Contrastive_loss: {loss:.5g} ({mean:.5g}) "
            f"Loss: {loss:.5g} ({mean:.5g})"
        )
        seen += epoch * samples
        if index == samples // batch - 1:
            say(f"End epoch {epoch} | Avg Loss: {mean:.5g}")
            val = log.loss(at / 6000)
            say(f"Eval Epoch: {epoch + 1} [512 / 10000]\tClip Loss: {val + 0.2:.6f}\t")
            say(
                f"Eval Epoch: {epoch + 1} image_to_text_R@1: 0.1021\ttext_to_image_R@1: 0.0980\t"
                f"clip_val_loss: {val:.4f}\tepoch: {epoch + 1:.4f}\tnum_samples: 10000.0000"
            )
    return Truth(
        steps=(seen,),
        totals=(None, num_epochs * samples),
        also=(Count((seen // batch, seen // batch - 1), (None, num_epochs * samples // batch)),),
        losses=(loss, mean),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("ultralytics/ultralytics", "ultralytics/utils/tqdm.py", "TQDM._display")
def ultralytics(log: Log) -> Truth:
    """A bar of its own kind, named by epoch and losses in columns; then one of validation."""
    num_epochs, batches = 60, log.pick(150, 260)
    stop = 2 * batches + log.pick(30, 120)
    box = cls = dfl = 0.0
    head = f"{'Epoch':>11}{'GPU_mem':>11}{'box_loss':>11}{'cls_loss':>11}{'dfl_loss':>11}"

    def draw(name: str, done: int, all_: int, took_s: float) -> None:
        fill = int(12 * done / all_)
        left = f"<{(all_ - done) * 0.2:.1f}s" if done < all_ else ""
        log.bar(
            f"\x1b[K{name}: {100 * done / all_:.0f}% {'━' * fill}{'─' * (12 - fill)} "
            f"{done}/{all_} {log.near(5.0):.1f}it/s {took_s:.1f}s{left}",
            "out",
        )

    log.out(f"Starting training for {num_epochs} epochs...")
    for step in log.steps(stop, 1, 1, 0.2):
        epoch, done = (step - 1) // batches + 1, (step - 1) % batches + 1
        if done == 1:
            log.out(f"\n{head}{'Instances':>11}{'Size':>11}")
        box, cls, dfl = (log.loss(step / (num_epochs * batches), 3) for _ in range(3))
        name = f"{f'{epoch}/{num_epochs}':>11}{'3.21G':>11}{box:>11.4g}{cls:>11.4g}{dfl:>11.4g}"
        draw(f"{name}{log.pick(9, 61):>11}{640:>11}", done, batches, done * 0.2)
        if done == batches:
            log.out()
            for at in range(1, 17):
                draw(
                    f"{'Class':>22}{'Images':>11}{'Instances':>11}{'Box(P':>11}{'R':>11}"
                    f"{'mAP50':>11}{'mAP50-95)':>11}",
                    at,
                    16,
                    at * 0.2,
                )
                log.wait(0.2)
            log.out()
            log.out(f"{'all':>22}{128:>11}{929:>11}{0.641:>11}{0.538:>11}{0.61:>11}{0.446:>11}")
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches,),
        also=(Count((2, 3), (num_epochs,)),),
        losses=(box, cls, dfl),
        num_epochs=num_epochs,
    )


@program("facebookresearch/vicreg", "main_vicreg.py", "print(json.dumps(stats))")
def vicreg(log: Log) -> Truth:
    """JSON once a minute, so at uneven steps; `time` is since the start."""
    last, step = log.pick(3000, 5200), 0
    loss = 0.0
    log.out("main_vicreg.py --data-dir imagenet --exp-dir exp --arch resnet50 --epochs 100")
    while step < last:
        log.wait(log.random.uniform(60.1, 60.9))
        step += log.pick(147, 181)
        loss = log.loss(step / 50000, 14)
        stats = {"epoch": step // 1251, "step": step, "loss": loss, "time": int(log.now_s)}
        log.out(json.dumps({**stats, "lr": 0.0431}))
    return Truth(steps=(step, step + 1), losses=(loss,))


@program("pytorch/examples", "imagenet/main.py", 'prefix="Epoch: [{}]".format(epoch)')
def pytorch_imagenet(log: Log) -> Truth:
    """Resumed at an epoch; batches counted from 1, a test with the same columns between."""
    first, batches = 30, log.pick(600, 800)
    stop = batches + 10 * log.pick(12, 40)
    log.out("=> loaded checkpoint 'checkpoint.pth.tar' (epoch 30)")
    loss = mean = val = 0.0
    done = 0
    for at in log.steps(stop, 1, 0, 0.2):
        epoch, index = first + at // batches, at % batches
        if index % 10:
            continue
        done = epoch * batches + index
        loss, mean = log.loss(at / 4000), log.loss(at / 4000)
        wide = len(str(batches))
        log.out(
            f"Epoch: [{epoch}][{index + 1:{wide}d}/{batches}]\tTime {log.near(0.2):6.3f} "
            f"( 0.204)\tData  0.001 ( 0.003)\tLoss {loss:.4e} ({mean:.4e})\t"
            f"Acc@1  {log.near(31):.2f} ( 30.11)\tAcc@5  {log.near(55):.2f} ( 54.91)"
        )
        loss, mean = float(f"{loss:.4e}"), float(f"{mean:.4e}")
        if at + 10 > batches > at:
            for test in range(1, 200, 10):
                val = log.loss(at / 4000)
                log.out(
                    f"Test: [{test:3d}/196]\tTime  0.141 ( 0.160)\tLoss {val:.4e} ({val:.4e})\t"
                    "Acc@1  50.78 ( 48.11)\tAcc@5  75.00 ( 73.20)"
                )
            log.out(" *   Acc@1 48.210 Acc@5 73.402")
    return Truth(steps=(done, done + 1), losses=(loss, mean), val_losses=(val,))


@program("pytorch/examples", "mnist/main.py", "'Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss")
def pytorch_mnist(log: Log) -> Truth:
    """Samples of an epoch; a test set that is told with its own average loss."""
    batches, every = 938, 10
    stop = 2 * batches + every * log.pick(12, 80)
    loss = val = 0.0
    seen = 0
    for at in log.steps(stop, 1, 0, 0.01):
        epoch, index = at // batches + 1, at % batches
        if index % every == 0:
            loss = log.loss(at / 9000, 6)
            seen = (epoch - 1) * 60000 + index * 64
            log.out(
                f"Train Epoch: {epoch} [{index * 64}/60000 ({100 * index / batches:.0f}%)]"
                f"\tLoss: {loss:.6f}"
            )
        if index == batches - 1:
            val = log.loss(at / 9000)
            log.out(f"\nTest set: Average loss: {val:.4f}, Accuracy: 9831/10000 (98%)\n")
    done = seen // 60000 * batches + seen % 60000 // 64
    return Truth(
        steps=(seen,),
        also=(Count((done, done + 1)),),
        losses=(loss,),
        val_losses=(val,),
    )


@program("huggingface/pytorch-image-models", "train.py", "f'Train: {epoch} [{update_idx:>4d}/")
def timm(log: Log) -> Truth:
    """Updates of an epoch from 0 with per cent; an evaluation in the same layout."""
    num_epochs, updates = 300, log.pick(240, 390)
    stop = 2 * updates + 50 * log.pick(1, 4)
    log.err(f"Scheduled epochs: {num_epochs} (epochs + cooldown_epochs). LR stepped per epoch.")
    loss = mean = val = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.2):
        epoch, at = divmod(step, updates)
        if at % 50 == 0 or at == updates - 1:
            done, loss, mean = step, log.loss(step / 9000, 2), log.loss(step / 9000, 2)
            log.err(
                f"Train: {epoch} [{at:>4d}/{updates} ({100 * (at + 1) / updates:>3.0f}%)]  "
                f"Loss: {loss:#.3g} ({mean:#.3g})  Time: {log.near(0.2):.3f}s,  612.11/s  "
                f"({log.near(0.2):.3f}s,  620.10/s)  LR: 1.000e-03  Data: 0.011 (0.014)"
            )
        if at == updates - 1:
            for test in (0, 50, 78):
                val = log.loss(step / 9000, 3)
                log.err(
                    f"Test: [{test:>4d}/78]  Time: 0.141 (0.160)  Loss: {val:>7.3f} ({val:>6.3f})"
                    "  Acc@1:  48.110 ( 48.110)  Acc@5:  73.200 ( 73.200)"
                )
            log.err("Current checkpoints:\n ('./out/checkpoint-1.pth.tar', 48.11)\n")
    return Truth(
        steps=(done, done + 1),
        totals=(num_epochs * updates, None),
        losses=(loss, mean),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("microsoft/Swin-Transformer", "main.py", "f'Train: [{epoch}/{config.TRAIN.EPOCHS}][")
def swin(log: Log) -> Truth:
    """Epoch and batch in brackets behind a coloured head, figures with their means."""
    num_epochs, batches = 300, log.pick(400, 620)
    stop = 2 * batches + 10 * log.pick(5, 30)
    loss = mean = val = 0.0
    done = 0

    def say(line: int, text: str) -> None:
        head = f"\x1b[32m[{log.clock()} swin_base]\x1b[0m"
        log.out(f"{head}\x1b[33m(main.py {line})\x1b[0m: INFO {text}")

    for step in log.steps(stop, 1, 0, 0.3):
        epoch, at = divmod(step, batches)
        if at % 10 == 0:
            done, loss, mean = step, log.loss(step / 9000), log.loss(step / 9000)
            say(
                233,
                f"Train: [{epoch}/{num_epochs}][{at}/{batches}]\t"
                f"eta {render_span((batches - at) * 0.3)} lr 0.000021\t wd 0.0500\t"
                f"time {log.near(0.3):.4f} (0.3101)\tloss {loss:.4f} ({mean:.4f})\t"
                f"grad_norm {log.near(2.1):.4f} (2.0441)\t"
                "loss_scale 65536.0000 (65536.0000)\tmem 9921MB",
            )
        if at == batches - 1:
            say(242, f"EPOCH {epoch} training takes {render_span(batches * 0.3)}")
            for test in range(0, 98, 10):
                val = log.loss(step / 9000)
                say(
                    281,
                    f"Test: [{test}/98]\tTime 0.210 (0.231)\tLoss {val:.4f} ({val:.4f})\t"
                    "Acc@1 48.110 (48.110)\tAcc@5 73.200 (73.200)\tMem 9921MB",
                )
            say(289, " * Acc@1 48.110 Acc@5 73.200")
    return Truth(
        steps=(done, done + 1),
        totals=(num_epochs * batches,),
        losses=(loss, mean),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("sthalles/SimCLR", "simclr.py", "for images, _ in tqdm(train_loader)")
def simclr(log: Log) -> Truth:
    """Bars without a name, one an epoch; everything else goes into a file."""
    batches = log.pick(170, 260)
    stop = 2 * batches + log.pick(40, 140)
    for step in log.steps(stop, 1, 1, 0.5):
        done = (step - 1) % batches + 1
        log.bar(render_tqdm(done, batches, done * 0.5))
        if done == batches:
            log.err()
    return Truth(steps=(stop,))


@program("ultralytics/yolov5", "train.py", "pbar.set_description")
def yolov5(log: Log) -> Truth:
    """tqdm's bar named by the epoch, from 0, and losses in columns; one of validation after it."""
    num_epochs, batches = 100, log.pick(120, 220)
    stop = 2 * batches + log.pick(30, 100)
    losses: tuple[float, ...] = ()
    for step in log.steps(stop, 1, 1, 0.3):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        if done == 1:
            names = ("Epoch", "GPU_mem", "box_loss", "obj_loss", "cls_loss", "Instances", "Size")
            log.err("\n" + "".join(f"{name:>11}" for name in names))
        losses = tuple(float(f"{log.loss(step / 9000) / 60:.4g}") for _ in range(3))
        name = f"{f'{epoch}/{num_epochs - 1}':>11}{'3.21G':>11}"
        name += "".join(f"{loss:>11.4g}" for loss in losses) + f"{log.pick(9, 61):>11}{640:>11}"
        log.bar(render_tqdm(done, batches, done * 0.3, name))
        if done == batches:
            log.err()
            name = "".join(f"{one:>11}" for one in ("Images", "Instances", "P", "R", "mAP50"))
            for at in range(1, 13):
                log.bar(render_tqdm(at, 12, at * 0.4, f"{'Class':>22}{name}   mAP50-95"))
                log.wait(0.4)
            log.err()
            log.err(f"{'all':>22}{128:>11}{929:>11}{0.641:>11}{0.538:>11}{0.61:>11}{0.446:>11}")
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches,),
        also=(Count((2, 3), (num_epochs, num_epochs - 1)),),
        losses=losses,
    )


@program("pytorch/vision", "references/classification/train.py", "metric_logger.log_every")
def torchvision(log: Log) -> Truth:
    """The layout that many have copied: epoch and batch in brackets, medians and means."""
    num_epochs, batches = 90, log.pick(300, 480)
    stop = 2 * batches + 10 * log.pick(4, 20)
    log.out(f"Namespace(batch_size=32, device='cuda', epochs={num_epochs}, lr=0.1, print_freq=10)")
    log.out("Loading data\nLoading training data\nTook 11.203\nCreating model\nStart training")
    loss = mean = val = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.2):
        epoch, at = divmod(step, batches)
        wide = len(str(batches))
        if at % 10 == 0 or at == batches - 1:
            done, loss, mean = step, log.loss(step / 9000), log.loss(step / 9000)
            log.out(
                f"Epoch: [{epoch}]  [{at:{wide}d}/{batches}]  "
                f"eta: {render_span((batches - at) * 0.2)}  lr: 0.1  img/s: {log.near(160):.3f}  "
                f"loss: {loss:.4f} ({mean:.4f})  acc1: 21.8750 (20.1100)  acc5: 46.8750 (45.2100)"
                f"  time: {log.near(0.2):.4f}  data: 0.0003  max mem: 5120"
            )
        if at == batches - 1:
            log.out(f"Epoch: [{epoch}] Total time: {render_span(batches * 0.2)}")
            for test in (0, 100, 156):
                val = log.loss(step / 9000)
                log.out(
                    f"Test:   [{test:3d}/157]  eta: 0:00:40  loss: {val:.4f} ({val:.4f})  "
                    "acc1: 31.2500 (30.0000)  acc5: 59.3750 (57.1000)  time: 0.1410  data: 0.0911"
                )
            log.out("Test:  Acc@1 30.102 Acc@5 57.210")
    return Truth(
        steps=(done, done + 1),
        totals=(None, num_epochs * batches),
        losses=(loss, mean),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("pytorch/examples", "dcgan/main.py", "'[%d/%d][%d/%d] Loss_D: %.4f Loss_G: %.4f")
def dcgan(log: Log) -> Truth:
    """Two fractions in brackets, epoch and batch, both from 0; losses of two networks."""
    num_epochs, batches = 25, log.pick(300, 480)
    stop = 2 * batches + log.pick(40, 200)
    losses = (0.0, 0.0)
    for step in log.steps(stop, 1, 0, 0.1):
        epoch, at = divmod(step, batches)
        losses = (log.loss(step / 9000), log.loss(step / 9000))
        log.out(
            f"[{epoch}/{num_epochs}][{at}/{batches}] Loss_D: {losses[0]:.4f} Loss_G: "
            f"{losses[1]:.4f} D(x): {log.near(0.8):.4f} D(G(z)): 0.0812 / 0.0341"
        )
    return Truth(
        steps=(stop, stop + 1),
        totals=(num_epochs * batches,),
        losses=losses,
        num_epochs=num_epochs,
    )


@program("kuangliu/pytorch-cifar", "utils.py", "progress_bar")
def pytorch_cifar(log: Log) -> Truth:
    """A bar with backspaces to its middle, the same for training and test, without a name."""
    batches, tests = 391, 100
    stop = 2 * batches + log.pick(40, 300)
    loss = val = 0.0

    def draw(at: int, total: int, figure: float) -> None:
        fill = int(65 * at / total)
        right = (at + 1) * 61
        log.write(
            f" [{'=' * fill}>{'.' * (64 - fill)}]  Step: 51ms | Tot: {at // 20}s{at * 51 % 1000}ms"
            f" | Loss: {figure:.3f} | Acc: {100 * right / (at + 1) / 128:.3f}% "
            f"({right}/{(at + 1) * 128})" + "\b" * 50 + f" {at + 1}/{total} "
        )
        log.write("\r" if at < total - 1 else "\n")

    log.out("==> Preparing data..\n==> Building model..")
    for step in log.steps(stop, 1, 0, 0.06):
        epoch, at = divmod(step, batches)
        if at == 0:
            if epoch:
                val = log.loss(step / 9000, 3)
                for test in range(tests):
                    draw(test, tests, val)
                    log.wait(0.03)
                log.out("Saving..")
            log.out(f"\nEpoch: {epoch}")
        loss = log.loss(step / 9000, 3)
        draw(at, batches, loss)
    return Truth(steps=(stop + 1, stop), losses=(loss,), val_losses=(val,))


@program("google-research/big_vision", "big_vision/utils.py", "Chrono.tick, measure")
def big_vision(log: Log) -> Truth:
    """The step in brackets and colour before each figure, a line each; notes over several lines."""
    total, last = 20000, log.pick(2400, 5200, 50)
    loss = val = 0.0

    def say(text: str) -> None:
        log.err(f"I0302 {log.clock('%H:%M:%S.%f')} 140215 utils.py:1245] {text}")

    for step in log.steps(last, 50, 50, 0.2):
        loss = log.loss(step / total, 14)
        for name, value in {
            "lr": 0.00091,
            "training_loss": loss,
            "l2_grads": log.near(0.9),
            "uptime": log.now_s,
            "examples_seen": step * 1024.0,
            "progress": step / total,
            "epoch": step * 1024 / 1281167,
            "img/sec/core": log.near(640.0),
        }.items():
            say(f"\x1b[35m[{step}]\x1b[0m {name} = {value}")
        say(
            f"\x1b[33mNOTE\x1b[0m: Steps:{step}/{total} [{step / total:.1%}]\n"
            "Walltime:12m (1m eval)\nETA:1h31m\nTotal train time:1h40m"
        )
        if step % 1000 == 0:
            val = log.loss(step / total, 14)
            say(f"\x1b[33mNOTE\x1b[0m: val evaluation...\nSteps:{step}/{total}")
            say(f"\x1b[35m[{step}]\x1b[0m val/prec@1 = 0.4411")
            say(f"\x1b[35m[{step}]\x1b[0m val/loss = {val}")
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,))


@program("google/flax", "examples/mnist/train.py", "'epoch:% 3d, train_loss: %.4f")
def flax_mnist(log: Log) -> Truth:
    """A line an epoch, with losses of training and test in it."""
    last = log.pick(6, 25)
    loss = val = 0.0
    for epoch in log.steps(last, 1, 1, 9.0):
        loss, val = log.loss(epoch / 30), log.loss(epoch / 30)
        log.err(
            f"I0302 {log.clock('%H:%M:%S.%f')} 140215817963328 train.py:172] epoch:{epoch: 3d}, "
            f"train_loss: {loss:.4f}, train_accuracy: {log.near(90):.2f}, "
            f"test_loss: {val:.4f}, test_accuracy: {log.near(90):.2f}"
        )
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("jax-ml/jax", "examples/mnist_classifier.py", "Epoch {epoch} in {epoch_time:0.2f} sec")
def jax_mnist(log: Log) -> Truth:
    """Epochs from 0 with their time, accuracies in lines of their own, no loss."""
    last = log.pick(4, 18)
    log.out("\nStarting training...")
    for epoch in log.steps(last, 1, 0, 3.0):
        log.out(f"Epoch {epoch} in {log.near(3.0):0.2f} sec")
        log.out(f"Training set accuracy {log.near(0.9):.12f}")
        log.out(f"Test set accuracy {log.near(0.9):.12f}")
    return Truth(steps=(last, last + 1))
