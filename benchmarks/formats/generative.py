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
    """A resumed run: lines go on with the count, the bar restarts with the steps that are left."""
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


@program("lucidrains/denoising-diffusion-pytorch",
         "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py",
         "pbar.set_description(f'loss: {total_loss:.4f}')")  # fmt: skip
def denoising_diffusion(log: Log) -> Truth:
    """A resumed bar whose name is the loss; bars of sampling that call themselves time steps."""
    total, first, last = 70000, 12000, log.pick(12700, 13900)
    loss = 0.0
    for step in log.steps(last, 1, first, 0.2):
        loss = round(log.loss(step / total) / 40, 4)
        took_s = (step - first) * 0.2
        log.bar(render_tqdm(step, total, took_s, f"loss: {loss:.4f}", first=first))
        if step == first + 500:
            for done in range(251):
                log.lower_bar(render_tqdm(done, 250, done * 0.1, "sampling loop time step"))
                log.wait(0.1)
            log.err()
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("facebookresearch/DiT", "train.py", "(step={train_steps:07d}) Train Loss: {avg_loss:.4f}")
def dit(log: Log) -> Truth:
    """The step with leading zeros in parentheses, behind a coloured time."""
    last = log.pick(2100, 4900, 100)
    loss = 0.0

    def say(text: str) -> None:
        log.out(f"[\x1b[34m{log.clock()}\x1b[0m] {text}")

    say("DiT Parameters: 675,129,632")
    say("Dataset contains 1,281,167 images (imagenet/train)")
    say("Training for 1400 epochs...")
    say("Beginning epoch 0...")
    for step in log.steps(last, 100, 100, 0.2):
        loss = log.loss(step / 9000)
        say(f"(step={step:07d}) Train Loss: {loss:.4f}, Train Steps/Sec: {log.near(4.9):.2f}")
        if step % 1000 == 0:
            say(f"Saved checkpoint to results/000-DiT-XL-2/checkpoints/{step:07d}.pt")
            say(f"Beginning epoch {step // 1000}...")
    return Truth(steps=(last,), losses=(loss,))


@program("graphdeco-inria/gaussian-splatting", "train.py", 'desc="Training progress"')
def gaussian_splatting(log: Log) -> Truth:
    """A bar that goes on by tens; iterations in capitals that evaluate and save."""
    total, last = 30000, log.pick(7300, 8900, 10)
    loss = 0.0
    log.out("Optimizing output/garden\nOutput folder: output/garden [02/03 09:00:00]")
    log.err("Loading Training Cameras [02/03 09:00:09]")
    for step in log.steps(last, 10, 10, 0.02):
        loss = round(log.loss(step / total) / 20, 7)
        log.bar(render_tqdm(step, total, step * 0.02, "Training progress", more=f"Loss={loss:.7f}"))
        if step == 7000:
            log.out("\n[ITER 7000] Evaluating train: L1 0.0210 PSNR 28.1021 [02/03 09:02:31]")
            log.out("\n[ITER 7000] Saving Gaussians [02/03 09:02:31]")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("openai/improved-diffusion", "improved_diffusion/train_util.py", 'logger.logkv("step"')
def improved_diffusion(log: Log) -> Truth:
    """A table in the order of the alphabet, whose large numbers have three digits."""
    last = log.pick(2400, 6900, 10)
    loss = step_said = samples = 0.0
    log.out("Logging to logs/openai-2026-03-02\ncreating model and diffusion...\ntraining...")
    for step in log.steps(last, 10, 0, 0.3):
        figures = {name: log.loss(step / 9000) / 60 for name in ("grad_norm", "loss", "loss_q0")}
        figures |= {"loss_q3": log.loss(step / 9000) / 600, "mse": figures["loss"]}
        figures |= {"samples": (step + 1) * 128.0, "step": float(step)}
        cells = {name: f"{value:<8.3g}" for name, value in figures.items()}
        loss, step_said = float(cells["loss"]), float(cells["step"])
        samples = float(cells["samples"])
        wide = max(map(len, cells))
        rule = "-" * (wide + 8 + 7)
        rows = [f"| {name:<{wide}} | {cell} |" for name, cell in cells.items()]
        log.out("\n".join([rule, *rows, rule]))
    return Truth(
        steps=(last, last + 1, int(step_said)),
        also=(Count((int(samples), (last + 1) * 128)),),
        losses=(loss,),
    )


@program("kohya-ss/sd-scripts", "train_network.py", 'desc="steps", avr_loss')
def kohya(log: Log) -> Truth:
    """A bar of steps, epochs in lines of their own, bars of validation steps between."""
    num_epochs, batches = 10, log.pick(120, 200)
    total, last = num_epochs * batches, 2 * batches + log.pick(20, 90)
    loss = val = 0.0
    log.out("running training / 学習開始\n  num epochs / epoch数: 10")
    log.out(f"  total optimization steps / 学習ステップ数: {total}")
    for step in log.steps(last, 1, 1, 0.9):
        if (step - 1) % batches == 0:
            if step > 1:
                for at in range(1, 17):
                    val = log.loss(step / total, 3)
                    more = f"val_avg_loss={val:.3f}, timestep={at % 4 * 200 + 200}"
                    log.bar(render_tqdm(at, 16, at * 0.5, "validation steps", more=more))
                    log.wait(0.5)
                log.err()
            log.out(f"\nepoch {(step - 1) // batches + 1}/{num_epochs}\n")
        loss = log.loss(step / total, 3)
        log.bar(render_tqdm(step, total, step * 0.9, "steps", more=f"avr_loss={loss:.3f}"))
    return Truth(
        steps=(last,),
        totals=(total,),
        losses=(loss,),
        val_losses=(val,),
        num_epochs=num_epochs,
    )
