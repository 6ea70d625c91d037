"""Generators of images, and radiance fields."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_tqdm
from benchmarks.formats.model import Count, Truth, program


@program("junyanz/pytorch-CycleGAN-and-pix2pix", "util/visualizer.py", "print_current_losses")
def cyclegan(log: Log) -> Truth:
    """Images of an epoch in parentheses, with many losses; a line says how many there are."""
    num_epochs, images, every = 200, log.pick(1010, 1390), 100
    stop = 2 * images + every * log.pick(2, 9)
    log.out("dataset [UnalignedDataset] was created")
    log.out(f"The number of training images = {images}")
    names = ("D_A", "G_A", "cycle_A", "idt_A", "D_B", "G_B", "cycle_B", "idt_B")
    losses: tuple[float, ...] = ()
    seen = 0
    for at in log.steps(stop, 1, 1, 0.1):
        epoch, done = (at - 1) // images + 1, (at - 1) % images + 1
        if done % every == 0:
            losses = tuple(log.loss(at / 50000, 3) for _ in names)
            figures = " ".join(
                f"{name}: {loss:.3f}" for name, loss in zip(names, losses, strict=True)
            )
            seen = at
            times = f"time: {log.near(0.1):.3f}, data: 0.002"
            log.out(f"(epoch: {epoch}, iters: {done}, {times}) {figures} ")
        if done == images:
            log.out(f"saving the latest model (epoch {epoch}, total_iters {at})")
            log.out(f"End of epoch {epoch} / {num_epochs} \t Time Taken: {int(images * 0.1)} sec")
            log.out("learning rate 0.0002000 -> 0.0002000")
    return Truth(
        steps=(seen,),
        totals=(num_epochs * images, None),
        also=(Count((2, 3), (num_epochs, None)),),
        losses=losses,
        num_epochs=num_epochs,
    )


@program("NVlabs/stylegan3", "training/training_loop.py", 'f"tick {training_stats.report0')
def stylegan3(log: Log) -> Truth:
    """Ticks and thousands of images in columns without colons; metrics as JSON between."""
    last, total = log.pick(21, 60), 25000
    log.out(f"Training for {total} kimg...\n")
    for tick in log.steps(last, 1, 0, 240.0):
        spent = f"{tick * 4 // 60}h {tick * 4 % 60:02d}m 11s"
        log.out(
            f"tick {tick:<5d} kimg {tick * 4.0:<8.1f} time {spent:<12s} "
            f"sec/tick {log.near(240.0):<7.1f} sec/kimg {log.near(60.0):<7.2f} maintenance 0.1    "
            "cpumem 5.41   gpumem 11.31  reserved 12.60  augment 0.021"
        )
        if tick % 20 == 0:
            log.out("Evaluating metrics...")
            log.out(
                '{"results": {"fid50k_full": 48.12}, "metric": "fid50k_full", "total_time": 121.4, '
                f'"snapshot_pkl": "network-snapshot-{tick * 4:06d}.pkl"}}'
            )
    return Truth(
        steps=(last, last + 1),
        totals=(None,),
        also=(Count((last * 4,), (total, None)), Count((last * 4000,), (total * 1000, None))),
    )


@program("yenchenlin/nerf-pytorch", "run_nerf.py", "[TRAIN] Iter: {i} Loss:")
def nerf_pytorch(log: Log) -> Truth:
    """A resumed run: lines go on with the count, the bar begins anew with what is left."""
    first, all_ = 50001, 200000
    last = log.pick(51210, 52890)
    log.out("Found ckpts ['logs/fern/050000.tar']\nReloading from logs/fern/050000.tar\nBegin")
    loss, said = 0.0, first
    for step in log.steps(last, 1, first, 0.06):
        done = step - first + 1
        log.bar(render_tqdm(done, all_ - first + 1, done * 0.06))
        if step % 100 == 0:
            loss, said = log.loss(step / all_, 9), step
            log.bar(" " * 70 + "\r")
            log.out(f"[TRAIN] Iter: {step} Loss: {loss}  PSNR: {log.near(24.1):.7f}")
    done = last - first + 1
    return Truth(
        steps=(said, last, last + 1),
        totals=(None, all_, all_ + 1),
        also=(Count((done,), (all_ - first + 1,)),),
        losses=(loss,),
    )


@program("huggingface/diffusers", "examples/text_to_image/train_text_to_image.py",
         'desc="Steps", progress_bar.set_postfix')  # fmt: skip
def diffusers(log: Log) -> Truth:
    """A bar that starts at the step of the checkpoint; bars of pictures that are made between."""
    total, first, last = 15000, 4000, log.pick(4300, 4900)

    def say(text: str) -> None:
        log.err(f"{log.clock('%m/%d/%Y %H:%M:%S')} - INFO - __main__ - {text}")

    say("***** Running training *****")
    say("  Num examples = 833\n  Num Epochs = 72\n  Gradient Accumulation steps = 4")
    say(f"  Total optimization steps = {total}")
    log.out(f"Resuming from checkpoint checkpoint-{first}")
    loss = 0.0
    for step in log.steps(last, 1, first, 0.7):
        loss = log.loss(step / total, 4)
        more = f"lr=1e-05, step_loss={loss:.4f}"
        log.bar(
            render_tqdm(step, total, max(step - first, 0) * 0.7, "Steps", more=more, first=first)
        )
        if step in (4100, 4250):
            log.err()
            say("Running validation... ")
            for done in range(51):
                log.bar(render_tqdm(done, 50, done * 0.1))
                log.wait(0.1)
            log.err()
        if step == 4200:
            say(f"Saved state to out/checkpoint-{step}")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))
