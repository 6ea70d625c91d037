"""Programs that the reader met once, when it was done; the two faults found were fixed later."""

from __future__ import annotations

import math

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, program


@program("NVIDIA/tacotron2", "train.py", "Train loss {} {:.6f} Grad Norm")
def tacotron2(log: Log) -> Truth:
    """The step stands behind the word loss; a validation line has the same words."""
    last, loss, val = log.pick(700, 1900), 0.0, 0.0
    log.out("Epoch: 0")
    for at in log.steps(last, 1, 0, 0.7):
        loss = log.loss(at / 3000, 6)
        log.out(f"Train loss {at} {loss:.6f} Grad Norm {log.near(1.3):.6f} {log.near(0.7):.2f}s/it")
        if at and at % 500 == 0:
            val = log.loss(at / 3000, 6)
            log.out(f"Validation loss {at}: {val:9f}  ")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,), epochs=(0, 1))


@program("jik876/hifi-gan", "train.py", "Steps : {:d}, Gen Loss Total")
def hifi_gan(log: Log) -> Truth:
    last = log.pick(200, 900, 5)
    size, loss = 203, 0.0
    for at in log.steps(last, 5, 0, 0.4):
        if at % size < 5:
            log.out(f"Epoch: {at // size + 1}")
        loss = log.loss(at / 2000, 3)
        error = log.near(0.6)
        log.out(
            f"Steps : {at:d}, Gen Loss Total : {loss:4.3f}, Mel-Spec. Error : {error:4.3f}, "
            f"s/b : {log.near(0.4):4.3f}"
        )
        if (at + 5) % size < 5:
            log.out(f"Time taken for epoch {at // size + 1} is {round(log.near(82.0))} sec\n")
    epoch = last // size + 1
    return Truth(steps=(last, last + 1), losses=(loss,), epochs=(epoch, epoch - 1))


@program("harvardnlp/annotated-transformer", "the_annotated_transformer.py", "Epoch Step: %6d")
def annotated_transformer(log: Log) -> Truth:
    """Step within the epoch and steps of the optimizer, which are a tenth."""
    size, last, loss = 906, log.pick(81, 881, 40), 0.0
    for epoch in (0, 1):
        log.out(f"[GPU0] Epoch {epoch} Training ====")
        for at in log.steps(last if epoch == 1 else 881, 40, 1, 0.1):
            loss = round(log.loss((epoch * size + at) / 3000), 2)
            log.out(
                f"Epoch Step: {at:6d} | Accumulation Step: {at // 10 + 1:3d} | Loss: {loss:6.2f} "
                f"| Tokens / Sec: {log.near(2900.0):7.1f} | Learning Rate: {at * 5e-7:6.1e}"
            )
        if epoch == 0:
            log.out(f"[GPU0] Epoch {epoch} Validation ====")
            log.wait(20.0)
            log.out(f"({log.loss(0.3)}, <the_annotated_transformer.TrainState object>)")
    return Truth(
        steps=tuple(range(size + last - 25, size + last + 2)), losses=(loss,), epochs=(1, 2)
    )


@program("ikostrikov/pytorch-a2c-ppo-acktr-gail", "main.py", "Updates {}, num timesteps {}")
def a2c_ppo(log: Log) -> Truth:
    last = log.pick(200, 900, 10)
    for at in log.steps(last, 10, 0, 1.2):
        log.out(
            f"Updates {at}, num timesteps {(at + 1) * 2048}, FPS {round(log.near(1650.0))} \n"
            f" Last 10 training episodes: mean/median reward {at / 9:.1f}/{at / 8:.1f}, "
            f"min/max reward {at / 12:.1f}/{at / 5:.1f}\n"
        )
    return Truth(steps=(last, last + 1), also=(Count(((last + 1) * 2048,)),))


@program("eriklindernoren/PyTorch-GAN", "implementations/gan/gan.py", "[Epoch %d/%d] [Batch")
def pytorch_gan(log: Log) -> Truth:
    size, last = 938, log.pick(100, 900)
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else size - 1, 1, 0, 0.05):
            log.out(
                f"[Epoch {epoch}/200] [Batch {at}/{size}] [D loss: {log.loss(0.4, 6):f}] "
                f"[G loss: {log.loss(0.3, 6):f}]"
            )
    return Truth(
        steps=(size + last, size + last + 1), totals=(200 * size, None), epochs=(1,),
        also=(Count((last, last + 1), (size,)),),
    )  # fmt: skip


@program("carpedm20/DCGAN-tensorflow", "model.py", "[%8d Epoch:[%2d/%2d] [%4d/%4d] time")
def dcgan_tensorflow(log: Log) -> Truth:
    size, last, count = 1582, log.pick(200, 1500), 0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else size - 1, 1, 0, 0.2):
            count += 1
            log.out(
                f"[{count:8d} Epoch:[{epoch:2d}/25] [{at:4d}/{size:4d}] time: {log.now_s:4.4f}, "
                f"d_loss: {log.loss(0.5, 8):.8f}, g_loss: {log.loss(0.4, 8):.8f}"
            )
    return Truth(
        steps=(size + last, size + last + 1), totals=(25 * size, None), epochs=(1,),
        also=(Count((last, last + 1), (size,)),),
    )  # fmt: skip


@program("zihangdai/xlnet", "train_gpu.py", "[{}] | gnorm {:.2f} lr {:8.6f}")
def xlnet(log: Log) -> Truth:
    last, loss = log.pick(4000, 9000, 500), 0.0
    for at in log.steps(last, 500, 500, 0.3):
        loss = round(log.loss(at / 20000), 2)
        log.err(
            f"I{log.clock('%m%d %H:%M:%S')}.120000 140012 train_gpu.py:311] [{at}] | gnorm "
            f"{log.near(0.4):.2f} lr {0.000246:8.6f} | loss {loss:.2f} "
            f"| pplx {math.exp(loss):>7.2f}, bpc {loss / math.log(2):>7.4f}"
        )
    return Truth(steps=(last,), losses=(loss,))


@program("microsoft/LoRA", "examples/NLG/src/gpt2_ft.py", "| epoch {:3d} step {:>8d} |")
def lora(log: Log) -> Truth:
    """A step of all epochs, and a batch of this one."""
    size, last, loss = 5258, log.pick(600, 4800, 100), 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 5200, 100, 100, 0.12):
            done = (epoch - 1) * size + at
            loss = round(log.loss(done / 20000), 2)
            log.out(
                f"| epoch {epoch:3d} step {done:>8d} | {at:>6d} batches | lr {0.0002:.3g} "
                f"| ms/batch {log.near(118.0):5.2f} | loss {loss:5.2f} "
                f"| avg loss {log.near(loss):5.2f} | ppl {math.exp(loss):5.2f}"
            )
    return Truth(steps=(size + last,), losses=(loss,), epochs=(2,), also=(Count((last,)),))


@program("ibab/tensorflow-wavenet", "train.py", "step {:d} - loss = {:.3f}, (")
def wavenet(log: Log) -> Truth:
    last, loss = log.pick(150, 700), 0.0
    for at in log.steps(last, 1, 0, 0.9):
        loss = log.loss(at / 2000, 3)
        log.out(f"step {at:d} - loss = {loss:.3f}, ({log.near(0.9):.3f} sec/step)")
        if at % 50 == 0:
            log.out("Storing checkpoint to ./logdir/train/2026-03-02T09-00-00 ... Done.")
    return Truth(steps=(last, last + 1), losses=(loss,))


@program("Kaixhin/Rainbow", "main.py", "'T = ' + str(T) + ' / ' + str(args.T_max)")
def rainbow(log: Log) -> Truth:
    """A bar of frames, and a line at each evaluation."""
    total, last = 50_000_000, log.pick(300_000, 900_000)
    for at in log.steps(last, 1000, 1000, 0.005):
        log.bar(render_tqdm(at, total, at * 0.005))
        if at % 100_000 == 0:
            log.err()
            log.out(
                f"[{log.clock('%Y-%m-%dT%H:%M:%S')}] T = {at} / {total} | Avg. reward: "
                f"{log.near(300.0)} | Avg. Q: {log.near(4.0)}"
            )
    last -= last % 1000
    return Truth(
        steps=(last,), totals=(total, None), also=(Count((last // 100_000 * 100_000,), (total,)),)
    )


@program("milesial/Pytorch-UNet", "train.py", "desc=f'Epoch {epoch}/{epochs}', unit='img'")
def unet(log: Log) -> Truth:
    """Images, not batches, in a bar of each epoch, with the time of each."""
    size, last, loss = 4580, log.pick(800, 4200, 4), 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else size, 4, 4, 0.02):
            loss = log.loss((epoch * size + at) / 20000, 3)
            more = f"loss (batch)={loss}"
            log.bar(render_tqdm(at, size, at * 0.02, f"Epoch {epoch}/5", "img", more))
        log.err()
        if epoch == 1:
            log.err(f"INFO: Validation Dice score: {log.near(0.7)}")
    images = size + last
    return Truth(
        steps=(images,), totals=(5 * size, None), losses=(loss,), epochs=(2,),
        also=(Count((last,), (size,)), Count((last // 4,)), Count((images // 4,))),
    )  # fmt: skip


@program("PaddlePaddle/PaddleOCR", "tools/program.py", '"epoch: [{}/{}], global_step: {}, {}')
def paddle_ocr(log: Log) -> Truth:
    last, loss = log.pick(400, 1900, 10), 0.0
    for at in log.steps(last, 10, 10, 0.6):
        loss = log.loss(at / 4000, 6)
        log.out(
            f"[{log.clock('%Y/%m/%d %H:%M:%S')}] ppocr INFO: epoch: [{1 + at // 700}/500], "
            f"global_step: {at}, lr: 0.000980, acc: {log.near(0.4):.6f}, loss: {loss:.6f}, "
            f"avg_reader_cost: {log.near(0.1):.5f} s, avg_batch_cost: {log.near(0.6):.5f} s, "
            f"avg_samples: 128.0, ips: {log.near(210.0):.5f} samples/s, "
            f"eta: {render_span(90000 - log.now_s)}"
        )
    return Truth(steps=(last,), losses=(loss,), epochs=(1 + last // 700,))


@program("jadore801120/attention-is-all-you-need-pytorch", "train.py", "{header:12} ppl: {ppl: 8")
def attention(log: Log) -> Truth:
    """A bar of an epoch, then a block."""
    size, last = 227, log.pick(30, 210)
    for epoch in (0, 1, 2):
        log.out(f"[ Epoch {epoch} ]")
        for at in log.steps(last if epoch == 2 else size, 1, 1, 0.3):
            log.bar(render_tqdm(at, size, at * 0.3, "  - (Training)   "))
        log.err()
        if epoch < 2:
            log.out(
                f"  - (Training)   ppl: {log.near(90.0): 8.5f}, accuracy: {log.near(40.0):3.3f} "
                f"%, lr: {0.0004: 8.5f}, elapse: {1.1:3.3f} min"
            )
            for at in log.steps(8, 1, 1, 0.2):
                log.bar(render_tqdm(at, 8, at * 0.2, "  - (Validation) "))
            log.err()
            log.out(
                f"  - (Validation) ppl: {log.near(80.0): 8.5f}, accuracy: {log.near(42.0):3.3f} "
                f"%, lr: {0.0004: 8.5f}, elapse: {0.03:3.3f} min"
            )
    return Truth(steps=(2 * size + last,), also=(Count((last,), (size,)),), epochs=(2, 3))


@program("EleutherAI/gpt-neox", "megatron/logging.py", '"samples/sec: {:.3f}"')
def gpt_neox(log: Log) -> Truth:
    """Megatron's line with a rate before it."""
    last, total, loss = log.pick(300, 2000, 10), 320000, 0.0
    for at in log.steps(last, 10, 10, 0.9):
        loss = log.loss(at / 10000, 6)
        log.out(
            f" samples/sec: {log.near(31.0):.3f} | iteration {at:8d}/{total:8d} | elapsed time "
            f"per iteration (ms): {log.near(900.0):.1f} | learning rate: 6.000E-04 | approx flops "
            f"per GPU: 61.2TFLOPS | lm_loss: {loss:.6E} | loss scale: 65536.0 | number of skipped "
            f"iterations:   0 | number of nan iterations:   0 |"
        )
    return Truth(steps=(last,), totals=(total,), losses=(round(loss, 6),))


@program("tensorflow/estimator", "python/estimator/basic_session_run_hooks.py", '"loss = %s, step')
def tf_estimator(log: Log) -> Truth:
    last, loss = log.pick(900, 6000, 100), 0.0
    for at in log.steps(last, 100, 0, 0.09):
        loss = log.loss(at / 20000, 6)
        if at:
            log.err(f"INFO:tensorflow:global_step/sec: {log.near(11.0):.5g}")
        took = f" ({log.near(9.0):.3f} sec)" if at else ""
        log.err(f"INFO:tensorflow:loss = {loss}, step = {at}{took}")
        if at % 1000 == 0:
            log.err(f"INFO:tensorflow:Saving checkpoints for {at} into /tmp/m/model.ckpt.")
    return Truth(steps=(last, last + 1), losses=(loss,))


@program("XPixelGroup/BasicSR", "basicsr/utils/logger.py", "[epoch:{epoch:3d}, iter:{current_iter")
def basicsr(log: Log) -> Truth:
    """Thousands with commas, and a loss of pixels alone."""
    last, total = log.pick(1000, 9000, 100), 300_000
    log.out(f"{log.stamp()} INFO: Training statistics:\n\tTotal epochs: 98; iters: {total}.")
    for at in log.steps(last, 100, 100, 0.3):
        log.out(
            f"{log.stamp()} INFO: [101_E..][epoch:{at // 3078:3d}, iter:{at:8,d}, "
            f"lr:(2.000e-04,)] [eta: 1 day, 1:02:40, time (data): {log.near(0.3):.3f} "
            f"({log.near(0.01):.3f})] l_pix: {log.loss(at / 20000) / 100:.4e} "
        )
    return Truth(steps=(last,), totals=(total, None), epochs=(last // 3078, last // 3078 + 1))
