"""Programs of many fields in short form: a function prints what a program prints at one step, and
the loop around it, which `steps` describes, makes the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pprint import pformat

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Format, Source, Truth


@dataclass(frozen=True, kw_only=True)
class At:
    """One step that a program prints."""

    log: Log
    step: int
    """Its number as the program has it, within the epoch if there are several."""
    done: int
    """Its number through all epochs."""
    epoch: int
    loss: float
    is_last: bool
    """The last one of an epoch that is over."""


Printer = Callable[[At], "float | None"]
"""Print a step; return the loss of an evaluation, if one was printed."""


def steps(
    repository: str,
    file: str,
    where: str,
    *,
    total: int | None = None,
    size: int = 0,
    every: int = 1,
    first: int = 1,
    epoch: int = 1,
    last: tuple[int, int] = (20, 90),
    step_s: float = 0.5,
    digits: int = 4,
    has_loss: bool = True,
    also: Callable[[At], Count] | None = None,
) -> Callable[[Printer], Format]:
    """Make a Format of a function that prints one step. `size` is that of an epoch, of which there
    are two then, the first numbered `epoch`; `last` has the prints of the last epoch."""

    def make_format(show: Printer) -> Format:
        def write(log: Log) -> Truth:
            prints, val, shown = log.pick(*last), None, None
            for number in (epoch, epoch + 1) if size else (epoch,):
                is_over = bool(size) and number == epoch
                end = (size - 1 + min(first, 1)) // every * every if is_over else prints * every
                for step in log.steps(end, every, first, step_s):
                    done = (number - epoch) * size + step
                    shown = At(
                        log=log, step=step, done=done, epoch=number,
                        loss=log.loss(done / (3 * size + 400 * every), digits),
                        is_last=is_over and step + every > end,
                    )  # fmt: skip
                    val = show(shown) or val
            assert shown is not None
            return Truth(
                steps=(shown.done, shown.done + 1) if first == 0 else (shown.done,),
                totals=(total, None) if size else (total,),
                losses=(shown.loss,) if has_loss else (),
                val_losses=() if val is None else (val,),
                epochs=(shown.epoch,) if size else (),
                also=(also(shown),) if also else (),
            )

        source = Source(repository=repository, file=file, where=where)
        return Format(name=show.__name__, source=source, write=write)

    return make_format


# Speech and sound.


@steps("fatchord/WaveRNN", "train_wavernn.py", "msg = f'| Epoch: {e}/{epochs} (", size=412,
       total=412 * 20, last=(40, 400))  # fmt: skip
def wavernn(at: At) -> None:
    """A line that is drawn again and again, with thousands of steps."""
    at.log.bar(
        f"| Epoch: {at.epoch}/20 ({at.step}/412) | Loss: {at.loss:.4f} | 2.1 steps/s | "
        f"Step: {at.done // 1000}k | ", "out",
    )  # fmt: skip
    if at.is_last:
        at.log.out()


@steps("Rayhane-mamah/Tacotron-2", "tacotron/train.py", "message = 'Step {:7d} [{:.3f}", digits=5,
       last=(110, 400))  # fmt: skip
def rayhane_tacotron(at: At) -> float | None:
    at.log.bar(
        f"Step {at.step:7d} [{at.log.near(0.5):.3f} sec/step, loss={at.loss:.5f}, "
        f"avg_loss={at.log.near(at.loss):.5f}]", "out",
    )  # fmt: skip
    if at.step % 100:
        return None
    val = at.log.loss(0.2, 3)
    at.log.out(f"\nRunning evaluation at step {at.step}")
    at.log.out(f"Eval loss for global step {at.step}: {val:.3f}")
    return val


@steps("kan-bayashi/ParallelWaveGAN", "parallel_wavegan/bin/train.py", 'f"(Steps: {self.steps}) {k',
       total=400_000, last=(120, 500), step_s=0.2, has_loss=False)  # fmt: skip
def parallel_wavegan(at: At) -> float | None:
    """A bar, and a line for each part of the loss."""
    log = at.log
    log.bar(render_tqdm(at.step, 400_000, at.step * 0.2, "[train]"))
    if at.step == 1 or at.step % 100:
        return None
    head = f"\n{log.stamp()} (train:495) INFO: (Steps: {at.step})"
    log.err(f"{head} train/spectral_convergence_loss = {log.near(0.4):.4f}.")
    log.err(f"{head[1:]} train/generator_loss = {at.loss:.4f}.")
    return None


@steps("SWivid/F5-TTS", "src/f5_tts/model/trainer.py", 'unit="update"', size=311, total=3110,
       digits=3, last=(30, 290), has_loss=True)  # fmt: skip
def f5_tts(at: At) -> None:
    """A bar of updates, an epoch each."""
    more = f"loss={at.loss}, update={at.done}"
    at.log.bar(
        render_tqdm(at.step, 311, at.step * 0.5, f"Epoch {at.epoch}/10", "update", more, False)
    )
    if at.is_last:
        at.log.err()


@steps("yl4579/StyleTTS2", "train_first.py", "'Epoch [%d/%d], Step [%d/%d], Mel Loss: %.5f",
       size=640, every=10, first=10, total=640 * 200, last=(5, 60), has_loss=False)  # fmt: skip
def styletts(at: At) -> float | None:
    log = at.log
    log.out(
        f"Epoch [{at.epoch}/200], Step [{at.step}/640], Mel Loss: {at.loss:.5f}, Gen Loss: "
        f"{log.near(6.0):.5f}, Disc Loss: {log.near(3.0):.5f}, Mono Loss: 0.03112, S2S Loss: "
        f"2.10012, SLM Loss: 1.92012"
    )
    if not at.is_last:
        return None
    val = log.loss(0.2, 3)
    log.out(f"Epochs: {at.epoch}\nValidation loss: {val:.3f}\n\n\n\n")
    return val


@steps("svc-develop-team/so-vits-svc", "train.py", 'f"Losses: {[x.item() for x in losses]}, step:',
       every=200, first=0)  # fmt: skip
def so_vits(at: At) -> None:
    """The step behind a list of losses, and a share of the epoch."""
    log = at.log
    head = f"{log.stamp()}\t44k\tINFO\t"
    log.err(f"{head}Train Epoch: {1 + at.step // 1000} [{at.step % 1000 / 10:.0f}%]")
    log.err(
        f"{head}Losses: [2.3123, {log.near(2.1)}, {log.near(8.0)}, 20.12, 1.01], step: {at.step}, "
        f"lr: 0.0001, reference_loss: {at.loss}"
    )


@steps("flashlight/wav2letter", "recipes/slimIPL/src/Train.cpp", "nupdates, lr, lrcrit", every=1000,
       first=1000, step_s=0.05)  # fmt: skip
def wav2letter(at: At) -> float:
    """C++: a row of everything."""
    val, log = at.log.loss(at.step / 90000, 5), at.log
    log.err(
        f"I{log.clock('%m%d %H:%M:%S')}.123456 31012 Train.cpp:569] epoch: "
        f"{1 + at.step // 9000:8d} | nupdates: {at.step:12d} | lr: 0.400000 | "
        f"lrcriterion: 0.000000 | runtime: 00:10:12 | bch(ms): {log.near(612.0):.2f} | loss: "
        f"{at.loss:10.5f} | train-TER: {log.near(60.0):.2f} | dev-clean-loss: {val:10.5f} | "
        f"dev-clean-TER: {log.near(50.0):.2f} | avg-isz: 1203 | hrs: {log.near(40.0):.2f}"
    )
    return val


@steps("facebookresearch/audiocraft", "audiocraft/solvers/musicgen.py", "get_formatter", size=2000,
       every=200, first=200, last=(2, 9), step_s=0.2, digits=3)  # fmt: skip
def audiocraft(at: At) -> float | None:
    log = at.log
    head = f"[{log.clock('%m-%d %H:%M:%S')}][flashy.solver][INFO] -"
    log.err(
        f"{head} Train | Epoch {at.epoch} | {at.step}/2000 | 5.01 it/sec | lr 1.00E-04 | ce "
        f"{at.loss:.3f} | ppl {math.exp(at.loss):.3f} | grad_norm 1.201E+00"
    )
    if not at.is_last:
        return None
    for done in (20, 40, 60):
        log.err(f"{head} Valid | Epoch {at.epoch} | {done}/80 | 9.1 it/sec | ce 3.012 | ppl 20.1")
    val = log.loss(0.3, 3)
    log.err(f"{head} Valid Summary | Epoch {at.epoch} | ce={val:.3f} | ppl=20.12")
    return val


# Pictures.


@steps("yunjey/stargan", "solver.py", 'log = "Elapsed [{}], Iteration [{}/{}]"', total=200_000,
       every=10, first=10, has_loss=False)  # fmt: skip
def stargan(at: At) -> None:
    log = at.log
    log.out(
        f"Elapsed [{render_span(log.now_s)}], Iteration [{at.step}/200000], D/loss_real: "
        f"{-log.near(4.0):.4f}, D/loss_fake: {log.near(1.0):.4f}, D/loss_gp: 0.1012, G/loss_fake: "
        f"{log.near(2.0):.4f}, G/loss_rec: 0.4012"
    )


@steps("jwyang/faster-rcnn.pytorch", "trainval_net.py", '"[session %d][epoch %2d][iter %4d/%4d]',
       size=2504, every=100, first=0, total=2504 * 20, last=(4, 24), step_s=0.05)  # fmt: skip
def faster_rcnn(at: At) -> None:
    if at.done == 0:
        at.log.out("Namespace(dataset='pascal_voc', net='vgg16', start_epoch=1, max_epochs=20)")
    at.log.out(
        f"[session 1][epoch {at.epoch:2d}][iter {at.step:4d}/2504] loss: {at.loss:.4f}, lr: "
        f"1.00e-03\n\t\t\tfg/bg=({at.log.pick(10, 99)}/384), time cost: {at.log.near(20.0):f}\n"
        f"\t\t\trpn_cls: {at.log.near(0.1):.4f}, rpn_box: 0.0412, rcnn_cls: 0.3012, rcnn_box 0.1201"
    )


@steps("amdegroot/ssd.pytorch", "train.py", "'iter ' + repr(iteration) + ' || Loss: %.4f ||'",
       every=10, first=0)  # fmt: skip
def ssd(at: At) -> None:
    at.log.out(f"iter {at.step} || Loss: {at.loss:.4f} || timer: {at.log.near(0.4):.4f} sec.")


@steps("deepinsight/insightface", "recognition/arcface_torch/utils/utils_callbacks.py",
       '"Speed %.2f samples/sec   Loss', every=10, first=10)  # fmt: skip
def arcface(at: At) -> None:
    log = at.log
    log.err(
        f"Training: {log.stamp()}-Speed {log.near(3012.0):.2f} samples/sec   Loss {at.loss:.4f}   "
        f"LearningRate 0.100000   Epoch: {at.step // 700}   Global Step: {at.step}   "
        f"Fp16 Grad Scale: 65536   Required: 12 hours"
    )
    if at.step % 300 == 0:
        log.err(f"Training: {log.stamp()}-[lfw][{at.step}]XNorm: {log.near(20.0):f}")
        log.err(f"Training: {log.stamp()}-[lfw][{at.step}]Accuracy-Flip: 0.99123+-0.00412")


@steps("facebookresearch/swav", "main_swav.py", '"Epoch: [{0}][{1}]\\t"', size=391, every=50,
       first=0, epoch=0, last=(2, 7))  # fmt: skip
def swav(at: At) -> None:
    """Steps of an epoch whose length no line tells."""
    log = at.log
    log.err(
        f"INFO - {log.clock('%m/%d/%y %H:%M:%S')} - {render_span(log.now_s)} - Epoch: "
        f"[{at.epoch}][{at.step}]\tTime {log.near(0.4):.3f} (0.412)\tData 0.010 (0.021)\tLoss "
        f"{at.loss:.4f} ({log.near(at.loss):.4f})\tLr: 0.6000"
    )


@steps("facebookresearch/SlowFast", "slowfast/utils/meters.py", '"iter": "{}/{}".format(cur_iter',
       size=940, every=10, first=10, total=940 * 30, last=(4, 80), digits=5)  # fmt: skip
def slowfast(at: At) -> None:
    """JSON with epoch and step as strings of two numbers."""
    log = at.log
    found = {
        "_type": "train_iter_", "dt": 0.31211, "dt_data": 0.0012, "epoch": f"{at.epoch}/30",
        "eta": "1:02:03", "gpu_mem": "9.12G", "iter": f"{at.step}/940", "loss": f"{at.loss:.5f}",
        "lr": 0.1, "top1_err": 71.25,
    }  # fmt: skip
    head = f"[{log.clock('%m/%d %H:%M:%S')}][INFO] logging.py:  99: json_stats: "
    log.err(head + json.dumps(found))
    for done in (10, 20, 30, 40) if at.is_last else ():
        found = {"_type": "val_iter", "epoch": f"{at.epoch}/30", "iter": f"{done}/49"}
        log.err(head + json.dumps(found))


@steps("clovaai/deep-text-recognition-benchmark", "train.py", "loss_log = f'[{iteration+1}/",
       total=300_000, every=500, first=500, step_s=0.02, digits=5)  # fmt: skip
def deep_text(at: At) -> float:
    log = at.log
    val = log.loss(at.step / 90000, 5)
    log.out(
        f"[{at.step}/300000] Train loss: {at.loss:0.5f}, Valid loss: {val:0.5f}, Elapsed_time: "
        f"{log.now_s:0.5f}\nCurrent_accuracy : {log.near(70.0):0.3f}, Current_norm_ED  : 0.81\n"
        f"Best_accuracy    : {log.near(71.0):0.3f}, Best_norm_ED     : 0.82"
    )
    return val


@steps("KaiyangZhou/deep-person-reid", "torchreid/engine/engine.py", "'epoch: [{0}/{1}][{2}/{3}]",
       size=202, every=20, first=20, total=202 * 60, last=(2, 9))  # fmt: skip
def person_reid(at: At) -> None:
    log = at.log
    log.out(
        f"epoch: [{at.epoch}/60][{at.step}/202]\ttime {log.near(0.2):.3f} (0.212)\tdata 0.001 "
        f"(0.012)\teta 0:31:12\tloss {at.loss:.4f} ({log.near(at.loss):.4f})\tacc 12.5000 (8.1012)"
        f"\tlr 0.000300"
    )


@steps("PaddlePaddle/PaddleSeg", "paddleseg/core/train.py", '"[TRAIN] epoch: {}, iter: {}/{},',
       total=40_000, every=10, first=10)  # fmt: skip
def paddle_seg(at: At) -> None:
    log = at.log
    head = f"{log.clock()} [INFO]\t"
    log.out(
        f"{head}[TRAIN] epoch: {1 + at.step // 371}, iter: {at.step}/40000, loss: {at.loss:.4f}, "
        f"lr: 0.009998, batch_cost: {log.near(0.3):.4f}, reader_cost: 0.00112, ips: "
        f"{log.near(13.0):.4f} samples/sec | ETA 02:10:11"
    )
    if at.step % 200 == 0:
        log.out(f"{head}Start evaluating (total_samples: 500, total_iters: 500)...")
        for done in (100, 300, 500):
            log.out(f"{done}/500 [====>....] - ETA: 1s - batch_cost: 0.0512 - reader cost: 0.0012")
            log.wait(2)
        log.out(f"{head}[EVAL] #Images: 500 mIoU: 0.5123 Acc: 0.9012 Kappa: 0.8812 Dice: 0.6512")


@steps("facebookarchive/fb.resnet.torch", "train.lua", "' | Epoch: [%d][%d/%d]    Time %.3f",
       size=391, last=(20, 380), step_s=0.1)  # fmt: skip
def fb_resnet(at: At) -> None:
    """Lua: the loss is called Err; an evaluation in the same layout."""
    if at.step == 1:
        at.log.out(f"=> Training epoch # {at.epoch}")
    at.log.out(
        f" | Epoch: [{at.epoch}][{at.step}/391]    Time {at.log.near(0.1):.3f}  Data 0.001  Err "
        f"{at.loss:1.4f}  top1 {at.log.near(60.0):7.3f}  top5 {at.log.near(20.0):7.3f}"
    )
    if at.is_last:
        for done in range(1, 79):
            at.log.out(
                f" | Test: [{at.epoch}][{done}/78]    Time 0.041  Data 0.001  top1  51.012 "
                f"( 52.123)  top5  12.012 ( 13.123)"
            )
        at.log.out(f" * Finished epoch # {at.epoch}     top1:  52.123  top5:  13.123\n")


@steps("hszhao/semseg", "tool/train.py", "'Epoch: [{}/{}][{}/{}] '", size=185, every=10, first=10,
       total=18500, last=(3, 17))  # fmt: skip
def semseg(at: At) -> None:
    log = at.log
    log.err(
        f"[{log.stamp()} INFO train.py line 320 4012] Epoch: [{at.epoch}/100][{at.step}/185] Data "
        f"0.012 (0.034) Batch {log.near(0.8):.3f} (0.812) Remain 04:12:11 MainLoss "
        f"{log.near(1.2):.4f} AuxLoss 1.3012 Loss {at.loss:.4f} Accuracy 0.5123."
    )


@steps("xingyizhou/CenterNet", "src/lib/trains/base_trainer.py", "Bar.suffix = '{phase}: [{0}][{1}",
       size=202, every=20, first=0, last=(2, 9))  # fmt: skip
def center_net(at: At) -> None:
    log = at.log
    log.out(
        f"ctdet/default| train: [{at.epoch}][{at.step}/202]|Tot: {render_span(log.now_s)} |ETA: "
        f"0:03:01 |loss {at.loss:.4f} |hm_loss {log.near(2.0):.4f} |wh_loss 3.1012 |off_loss 0.2 "
        f"|Data 0.001s(0.002s) |Net 0.312s"
    )


@steps("davidsandberg/facenet", "src/train_softmax.py", "'Epoch: [%d][%d/%d]\\tTime %.3f\\tLoss",
       size=400, last=(20, 390), digits=3)  # fmt: skip
def facenet(at: At) -> float | None:
    log = at.log
    log.out(
        f"Epoch: [{at.epoch}][{at.step}/400]\tTime {log.near(0.4):.3f}\tLoss {at.loss:2.3f}\tXent "
        f"{log.near(at.loss):2.3f}\tRegLoss 0.812\tAccuracy 0.211\tLr 0.05000\tCl 0.312"
    )
    if not at.is_last:
        return None
    log.out("Running forward pass on validation set")
    val = log.loss(0.3, 3)
    log.out(f"Validation Epoch: {at.epoch}\tTime 9.012\tLoss {val:2.3f}\tXent 2.012\tAccuracy 0.31")
    return val


@steps("jcjohnson/neural-style", "neural_style.lua", "string.format('Iteration %d / %d', t",
       total=1000, every=50, first=50, last=(6, 18), digits=6)  # fmt: skip
def neural_style(at: At) -> None:
    """A block an iteration, the loss in its last row."""
    at.log.out(f"Iteration {at.step} / 1000\t")
    for number in (1, 2):
        at.log.out(f"  Style {number} loss: {at.log.near(900.0):f}\t")
    at.log.out(f"  Total loss: {at.loss:f}\t")


@steps("google/mipnerf", "train.py", "f'/{config.max_steps:d}: ' + f'i_loss=", total=1_000_000,
       every=100, first=100, step_s=0.05)  # fmt: skip
def mipnerf(at: At) -> None:
    log = at.log
    log.out(
        f"{at.step:7d}/1000000: i_loss={at.loss:0.4f}, avg_loss={at.loss:0.4f}, weight_l2="
        f"1.31e+03, lr=4.99e-04, {log.near(41000.0):0.0f} rays/sec"
    )
    if at.step % 1000 == 0:
        log.out(f"Eval {at.step}: {log.near(9.0):0.3f}s., 31012 rays/sec")


@steps("bmild/nerf", "run_nerf.py", "print(expname, i, psnr.numpy(), loss", every=100, first=0)
def nerf_tf(at: At) -> None:
    """Numbers without a word: the step, two measures and the step again."""
    psnr = -10 * math.log10(at.loss / 100)
    at.log.out(f"lego_run {at.step} {psnr} {at.loss} {at.step}\niter time 0.41201")


@steps("nerfstudio-project/nerfstudio", "nerfstudio/utils/writer.py", "mssg = f\"{'Step (% Done)'",
       every=10, first=0, has_loss=False)  # fmt: skip
def nerfstudio(at: At) -> None:
    """A table of steps, shares and times."""
    log = at.log
    if at.step == 0:
        log.out(f"{'Step (% Done)':<20}{'Train Iter (time)':<20} {'ETA (time)':<20} "
                f"{'Train Rays / Sec':<20} \n{'-' * 80}")  # fmt: skip
    log.out(
        f"{f'{at.step} ({at.step / 300:.02f}%)':<20}{f'{log.near(31.0):.3f} ms':<20} "
        f"{'12 m, 3 s':<20} {f'{log.near(120.0):.2f} K':<20} "
    )


@steps("yang-song/score_sde", "run_lib.py", 'logging.info("step: %d, training_loss: %.5e"',
       every=50, first=0)  # fmt: skip
def score_sde(at: At) -> float | None:
    head = f"I{at.log.clock('%m%d %H:%M:%S')}.123456 1401 run_lib.py:164] step: {at.step},"
    at.log.err(f"{head} training_loss: {at.loss:.5e}")
    if at.step % 100:
        return None
    val = at.log.loss(0.2)
    at.log.err(f"{head} eval_loss: {val:.5e}")
    return val


@steps("rosinality/stylegan2-pytorch", "train.py", 'f"d: {d_loss_val:.4f}; g: {g_loss_val',
       total=800_000, last=(60, 400), has_loss=False)  # fmt: skip
def rosinality_stylegan(at: At) -> None:
    """A bar whose name is of short words and numbers."""
    name = (
        f"d: {at.loss:.4f}; g: {at.log.near(0.9):.4f}; r1: 0.0412; path: 0.0012; mean path: 0.01; "
        f"augment: 0.0000"
    )
    at.log.bar(render_tqdm(at.step, 800_000, at.step * 0.5, name))


@steps("rosinality/vq-vae-2-pytorch", "train_vqvae.py", 'f"epoch: {epoch + 1}; mse: ', size=235,
       last=(20, 220), digits=5, has_loss=False)  # fmt: skip
def vqvae(at: At) -> None:
    name = f"epoch: {at.epoch}; mse: {at.loss:.5f}; latent: 0.012; avg mse: 0.04112; lr: 0.00030"
    at.log.bar(render_tqdm(at.step, 235, at.step * 0.5, name))
    if at.is_last:
        at.log.err()


# Language.


@steps("bentrevett/pytorch-seq2seq", "1 - Sequence to Sequence Learning with Neural Networks.ipynb",
       "Train Loss: {train_loss:.3f} | Train PPL", last=(4, 9), step_s=30, digits=3)  # fmt: skip
def seq2seq(at: At) -> float:
    val = at.log.loss(at.step / 20, 3)
    at.log.out(
        f"Epoch: {at.step:02} | Time: 0m 30s\n\tTrain Loss: {at.loss:.3f} | Train PPL: "
        f"{math.exp(at.loss):7.3f}\n\t Val. Loss: {val:.3f} |  Val. PPL: {math.exp(val):7.3f}"
    )
    return val


@steps("stanfordnlp/GloVe", "src/glove.c", '"%s, iter: %03d, cost: %lf\\n"', last=(6, 40), digits=6,
       step_s=9)  # fmt: skip
def glove(at: At) -> None:
    at.log.err(f"{at.log.clock('%m/%d/%y - %I:%M.%S%p')}, iter: {at.step:03d}, cost: {at.loss:f}")


@steps("mistralai/mistral-finetune", "finetune/monitoring/metrics_logger.py", '"done (%)"',
       last=(12, 200), digits=3)  # fmt: skip
def mistral(at: At) -> float | None:
    log = at.log
    head = f"{log.clock()} (UTC) - {render_span(log.now_s)} - train - INFO - step: {at.step:06}"
    log.err(
        f"{head} - done (%): {at.step / 3:03.1f} - loss: {at.loss:.3f} - lr: 6.0e-05 - "
        f"peak_alloc_mem (GB): 31.2 - alloc_mem (GB): 18.1 - words_per_second: "
        f"{log.near(9000.0):.1f} - avg_words_per_second: 8712.3 - ETA: >{log.clock()}"
    )
    if at.step % 10:
        return None
    val = log.loss(at.step / 300, 3)
    log.err(
        f"{head} - eval_perplexity: {math.exp(val):.3f} - eval_loss: {val:.3f} - train_loss: "
        f"{at.loss:.3f}"
    )
    return val


@steps("facebookresearch/MUSE", "unsupervised.py", "logger.info(('%06i - ' % n_iter)",
       size=1_000_000, every=16000, first=0, epoch=0, last=(5, 60), step_s=0.0003,
       has_loss=False)  # fmt: skip
def muse(at: At) -> None:
    """Samples of an epoch whose length no line tells."""
    log = at.log
    head = f"INFO - {log.clock('%m/%d/%y %H:%M:%S')} - {render_span(log.now_s)} -"
    if at.step == 0:
        log.err(f"{head} Starting adversarial training epoch {at.epoch}...")
    log.err(f"{head} {at.step:06} - Discriminator loss: {at.loss:.4f} - {log.pick(2000, 2300)} "
            f"samples/s")  # fmt: skip


@steps("stanfordnlp/stanza", "stanza/models/tagger.py", "'Finished STEP {}/{}, loss = {:.6f}",
       total=50_000, every=20, first=20, digits=6)  # fmt: skip
def stanza(at: At) -> None:
    log = at.log
    log.err(
        f"{log.clock()} INFO: Finished STEP {at.step}/50000, loss = {at.loss:.6f} "
        f"({log.near(0.4):.3f} sec/batch), lr: 0.003000"
    )
    if at.step % 100 == 0:
        log.err(f"{log.clock()} INFO: Evaluating on dev set...")
        log.err(f"{log.clock()} INFO: step {at.step}: train_loss = {at.loss:.6f}, dev_score = 0.81")


@steps("facebookresearch/StarSpace", "src/model.cpp", '"  eta: <1min "', last=(2, 8), first=0,
       step_s=4, digits=8)  # fmt: skip
def starspace(at: At) -> None:
    """C++: a share of an epoch that is drawn again and again, and a line an epoch."""
    at.log.out(f"Training epoch {at.step}: 0.01 0.002")
    for share in range(5, 100, 5):
        at.log.bar(
            f"Epoch: {share}.1%  lr: 0.009{share}  loss: 0.03{share}  eta: <1min   tot: "
            f"0h0m{int(at.log.now_s)}s  ({share // 5}.1%)"
        )
        at.log.wait(0.3)
    at.log.out(f"\n ---+++                Epoch {at.step:4d} Train error : {at.loss:3.8f} +++--- ☃")


@steps("spro/practical-pytorch", "char-rnn-classification/train.py", "print('%d %d%% (%s) %.4f",
       every=500, first=500, step_s=0.002)  # fmt: skip
def char_classification(at: At) -> None:
    """A number, its share, a time and the loss, without words."""
    minutes, seconds = divmod(int(at.log.now_s), 60)
    at.log.out(
        f"{at.step} {at.step // 1000}% ({minutes}m {seconds}s) {at.loss:.4f} Rossini / Greek ✗ "
        f"(Italian)"
    )


@steps("meta-llama/llama-cookbook", "src/llama_cookbook/utils/train_utils.py",
       'f"Training Epoch: {epoch+1}/{train_config.num_epochs}, step', size=311, total=933,
       last=(20, 300), digits=6)  # fmt: skip
def llama_cookbook(at: At) -> float | None:
    """A step in the name of a bar, which counts from 1."""
    log = at.log
    name = f"Training Epoch: {at.epoch}/3, step {at.step - 1}/311 completed (loss: {at.loss})"
    log.bar(render_tqdm(at.step, 311, at.step * 0.5, name))
    if not at.is_last:
        return None
    log.err()
    for done in log.steps(20, 1, 1, 0.3):
        log.bar(render_tqdm(done, 20, done * 0.3, "evaluating Epoch"))
    val = log.loss(0.3, 6)
    log.err()
    log.out(f" eval_ppl=tensor(4.1) eval_epoch_loss=tensor({val}, device='cuda:0')")
    log.out(f"Epoch {at.epoch}: train_perplexity=4.2, train_epoch_loss=1.45, epoch time 155.1s")
    return val


@steps("young-geng/EasyLM", "EasyLM/models/llama/llama_train.py", "pprint.pformat(log_metrics)",
       total=90_000, last=(60, 200), digits=6)  # fmt: skip
def easylm(at: At) -> None:
    """A bar, and a dictionary on several lines in between."""
    at.log.bar(render_tqdm(at.step, 90_000, at.step * 0.5))
    found = {"accuracy": at.log.near(0.4), "gradient_norm": 1.2012, "learning_rate": 1.0e-4,
             "loss": at.loss, "param_norm": 1012.31, "step": at.step}  # fmt: skip
    at.log.err("\n" + pformat(found) + "\n")


@steps("google/trax", "trax/supervised/training.py", "self._log_step('Ran %d train steps in",
       every=100, first=100, step_s=0.05, digits=8)  # fmt: skip
def trax(at: At) -> float:
    """Rows that all name the step: one of the training, one of an evaluation."""
    val = at.log.loss(at.step / 9000, 8)
    head = f"Step {at.step: 6d}:"
    at.log.out(
        f"\n{head} Ran 100 train steps in {at.log.near(5.0):0.2f} secs\n{head} train "
        f"CrossEntropyLoss | {at.loss: .8f}\n{head} eval  CrossEntropyLoss | {val: .8f}\n"
        f"{head} eval          Accuracy |  0.61234123"
    )
    return val


@steps("NVIDIA/OpenSeq2Seq", "open_seq2seq/utils/hooks.py", '"Epoch {}, global step {}:"', every=10,
       first=0)  # fmt: skip
def openseq2seq(at: At) -> None:
    at.log.out(
        f"*** Epoch {at.step // 300}, global step {at.step}: ***     Train loss: {at.loss:.4f} \n"
        f"time per step = 0:00:{at.log.near(0.5):.3f}"
    )


# Graphs, tables, sciences.


@steps("tkipf/pygcn", "pygcn/train.py", "print('Epoch: {:04d}'.format(epoch+1)", last=(20, 190))
def pygcn(at: At) -> float:
    val = at.log.loss(at.step / 300)
    at.log.out(
        f"Epoch: {at.step:04d} loss_train: {at.loss:.4f} acc_train: {at.log.near(0.6):.4f} "
        f"loss_val: {val:.4f} acc_val: {at.log.near(0.5):.4f} time: 0.4123s"
    )
    return val


@steps("snap-stanford/ogb", "examples/nodeproppred/arxiv/gnn.py", "print(f'Run: {run + 1:02d}, '",
       size=200, last=(20, 180), also=lambda at: Count((at.step,)))  # fmt: skip
def ogb(at: At) -> None:
    """Epochs, which begin again with each run."""
    at.log.out(
        f"Run: {at.epoch:02d}, Epoch: {at.step:02d}, Loss: {at.loss:.4f}, Train: "
        f"{at.log.near(70.0):.2f}%, Valid: {at.log.near(68.0):.2f}% Test: 67.12%"
    )


@steps("lululxvi/deepxde", "deepxde/display.py", 'print_one("Step", "Train loss"', every=1000,
       first=0, last=(5, 14), step_s=0.003, has_loss=False)  # fmt: skip
def deepxde(at: At) -> None:
    """A table whose cells are lists of losses."""
    if at.step == 0:
        at.log.out("Training model...\n")
        at.log.out("Step      Train loss              Test loss               Test metric   ")
    train, test = (f"[{at.log.near(0.4):.2e}, {at.log.near(0.1):.2e}]" for _ in range(2))
    at.log.out(f"{at.step:<10}{train:<24}{test:<24}[]  ")


@steps("MouseLand/cellpose", "cellpose/train.py", 'f"{iepoch}, train_loss={lavg:.4f}, test_loss=',
       every=10, first=0, total=300, last=(5, 28), step_s=2)  # fmt: skip
def cellpose(at: At) -> float:
    """An epoch without a word, from 0."""
    val = at.log.loss(at.step / 300)
    if at.step == 0:
        at.log.err(f"{at.log.stamp()} [INFO] >>> n_epochs=300, n_train=45, n_test=9")
    at.log.err(
        f"{at.log.stamp()} [INFO] {at.step}, train_loss={at.loss:.4f}, test_loss={val:.4f}, "
        f"LR=0.005000, time {at.log.now_s:.2f}s"
    )
    return val


@steps("gcorso/DiffDock", "train.py", '"Epoch {}: Training loss {:.4f}  tr {:.4f}', first=0,
       last=(4, 30), step_s=30)  # fmt: skip
def diffdock(at: At) -> float:
    val = at.log.loss(at.step / 60)
    rest = "tr 0.3012   rot 0.2012   tor 0.1012   sc 0.0000"
    at.log.out(
        f"Epoch {at.step}: Training loss {at.loss:.4f}  {rest}  lr 0.0010\nEpoch {at.step}: "
        f"Validation loss {val:.4f}  {rest}"
    )
    return val


@steps("pyro-ppl/pyro", "examples/dmm.py", '"[training epoch %04d]  %.4f', first=0, last=(20, 190),
       step_s=2)  # fmt: skip
def pyro_dmm(at: At) -> float | None:
    at.log.err(f"[training epoch {at.step:04d}]  {at.loss:.4f} \t\t\t\t(dt = 2.012 sec)")
    if at.step % 20:
        return None
    val = at.log.loss(0.1)
    at.log.err(f"[val/test epoch {at.step:04d}]  {val:.4f}  {at.log.near(val):.4f}")
    return val


@steps("cornellius-gp/gpytorch", "examples/00_Basic_Usage/Metrics.ipynb", "'Iter %d/%d - Loss",
       total=100, digits=3)  # fmt: skip
def gpytorch(at: At) -> None:
    at.log.out(f"Iter {at.step}/100 - Loss: {at.loss:.3f}   lengthscale: 0.312   noise: 0.041")


@steps("awslabs/gluonts", "src/gluonts/mx/trainer/_base.py", '"avg_epoch_loss": lv', size=50,
       total=250, last=(5, 45))  # fmt: skip
def gluonts(at: At) -> None:
    """A bar an epoch, which it names behind itself."""
    more = f"epoch={at.epoch}/5, avg_epoch_loss={at.loss}"
    at.log.bar(render_tqdm(at.step, 50, at.step * 0.5, more=more))
    if at.is_last:
        at.log.err(f"\nINFO:gluonts.trainer:Epoch[{at.epoch - 1}] Elapsed time 25.012 seconds")
        at.log.err(f"INFO:gluonts.trainer:Epoch[{at.epoch - 1}] Evaluation metric 'epoch_loss'="
                   f"{at.log.near(at.loss):f}")  # fmt: skip


@steps("DeepLabCut/DeepLabCut", "deeplabcut/pose_estimation_tensorflow/core/train.py",
       '"iteration: {} loss: {} lr: {}"', every=500, first=500, step_s=0.02)  # fmt: skip
def deeplabcut(at: At) -> None:
    at.log.err(f"iteration: {at.step} loss: {at.loss:.4f} lr: 0.005")


@steps("chainer/chainer", "chainer/training/extensions/progress_bar.py", "'this epoch [{}{}]",
       every=100, first=100, last=(4, 60), step_s=0.02, has_loss=False,
       also=lambda at: Count((at.step // 600,), (20, None)))  # fmt: skip
def chainer(at: At) -> None:
    """Two bars and a row of both counts."""
    at.log.out(
        f"\033[J     total [{'#' * 5}{'.' * 45}] {at.step / 12000:6.2%}\nthis epoch [{'#' * 25}"
        f"{'.' * 25}] {at.step % 600 / 600:6.2%}\n{at.step:10} iter, {at.step // 600} epoch / 20 "
        f"epochs\n    {at.log.near(48.0):.5g} iters/sec. Estimated time to finish: 0:04:00.23456.\n"
        f"\033[4A"
    )


# Other languages: Julia, Rust, C++.


@steps("LuxDL/Lux.jl", "examples/ConvolutionalVAE/main.jl", '"Epoch %d, Iter %d, Loss: %.7f,',
       size=469, every=25, first=25, last=(3, 18), digits=7)  # fmt: skip
def lux(at: At) -> None:
    at.log.out(
        f"Epoch {at.epoch}, Iter {at.step}, Loss: {at.loss:.7f}, Throughput: "
        f"{at.log.near(900.0):.6f} im/s"
    )
    if at.is_last:
        at.log.out(f"Epoch {at.epoch}, Train Loss: {at.log.near(at.loss):.7f}, Time: 61.2012s, "
                   f"Throughput: 911.101231 im/s")  # fmt: skip


@steps("huggingface/candle", "candle-examples/examples/mnist-training/main.rs", '"{epoch:4} train',
       last=(4, 60), step_s=2, digits=5)  # fmt: skip
def candle(at: At) -> None:
    at.log.out(f"{at.step:4} train loss {at.loss:8.5f} test acc: {at.log.near(91.0):5.2f}%")


@steps("VowpalWabbit/vowpal_wabbit", "vowpalwabbit/core/src/shared_data.cc", "print_update(std::os",
       last=(6, 14), digits=6, also=lambda at: Count((2**at.step,)))  # fmt: skip
def vowpal(at: At) -> None:
    """A table in which each row has twice as many examples as the one before."""
    if at.step == 1:
        at.log.err(
            "average  since         example        example        current        current  current\n"
            "loss     last          counter         weight          label        predict features"
        )
    at.log.err(
        f"{at.loss:.6f} {at.log.near(at.loss):.6f} {2**at.step:12} {2.0**at.step:14} "
        f"{1.0:14.4f} {0.4123:14.4f} {at.log.pick(20, 99):8}"
    )


@steps("LeelaChessZero/lczero-training", "tf/tfprocess.py", 'print("step {}, lr={:g}"', every=100,
       first=100, step_s=0.05)  # fmt: skip
def lczero(at: At) -> None:
    log = at.log
    log.out(
        f"step {at.step}, lr=0.02 P={log.near(2.0):g} V=0.91012 ML=0.31 Reg=1.2012 "
        f"Total={at.loss:g} V MSE=0.21 ({log.near(9000.0):g} pos/s)"
    )
    if at.step % 1000 == 0:
        log.out(f"step {at.step}, P={log.near(2.0):g} V=0.92 ML=0.31 V MSE=0.22 P Acc=41.2%")


# Reinforcement learning and robots.


@steps("facebookresearch/drqv2", "logger.py", "COMMON_TRAIN_FORMAT = [('frame', 'F', 'int')",
       every=500, first=500, step_s=0.02, has_loss=False,
       also=lambda at: Count((at.step * 2, at.step // 500)))  # fmt: skip
def drqv2(at: At) -> None:
    """Letters before frames, steps and episodes; rows of evaluations in green."""
    rest = f"L: 500 | R: {at.log.near(90.0):.4f}"
    at.log.out(
        f"\x1b[33m| train | F: {at.step * 2} | S: {at.step} | E: {at.step // 500} | {rest} | BS: "
        f"{at.step} | FPS: {at.log.near(91.0):.4f} | T: {render_span(at.log.now_s)}\x1b[0m"
    )
    if at.step % 5000 == 0:
        at.log.out(
            f"\x1b[32m| eval  | F: {at.step * 2} | S: {at.step} | E: {at.step // 500} | {rest} | "
            f"T: {render_span(at.log.now_s)}\x1b[0m"
        )


@steps("sfujim/TD3", "main.py", 'f"Total T: {t+1} Episode Num: {episode_num+1}', every=200,
       first=200, has_loss=False, step_s=0.02,
       also=lambda at: Count((at.step // 200,)))  # fmt: skip
def td3(at: At) -> None:
    reward = at.log.near(90.0)
    at.log.out(
        f"Total T: {at.step} Episode Num: {at.step // 200} Episode T: 200 Reward: {reward:.3f}"
    )
    if at.step % 5000 == 0:
        at.log.out(f"{'-' * 39}\nEvaluation over 10 episodes: {reward:.3f}\n{'-' * 39}")


@steps("huggingface/lerobot", "src/lerobot/utils/logging_utils.py", 'f"step:{format_big_number(',
       every=20, first=20, last=(12, 45), digits=3)  # fmt: skip
def lerobot(at: At) -> None:
    """Whole numbers with a suffix of thousands, and words of a few letters."""
    log = at.log
    samples = at.step * 64
    shown = f"{samples / 1000:.0f}K" if samples > 999 else f"{samples}"
    log.err(
        f"INFO {log.clock()} ot_train.py:412 step:{at.step} smpl:{shown} ep:{at.step // 4} "
        f"epch:{at.step / 400:.2f} loss:{at.loss:.3f} grdn:1.201 lr:1.0e-05 updt_s:0.4 data_s:0.01"
    )


@steps("keras-rl/keras-rl", "rl/callbacks.py", "'d}/{nb_steps}: episode: {episode}, duration",
       total=50_000, every=200, first=200, step_s=0.01,
       also=lambda at: Count((at.step // 200,)))  # fmt: skip
def keras_rl(at: At) -> None:
    if at.step == 200:
        at.log.out("Training for 50000 steps ...")
    at.log.out(
        f" {at.step:6d}/50000: episode: {at.step // 200}, duration: 2.012s, episode steps: 200, "
        f"steps per second:  99, episode reward: {at.log.near(20.0):.3f}, mean reward: 1.000 [1.0, "
        f"1.0], loss: {at.loss:f}, mae: 0.312011, mean_q: {at.log.near(3.0):f}"
    )


@steps("suragnair/alpha-zero-general", "othello/pytorch/NNet.py", "desc='Training Net'", size=140,
       last=(10, 130), has_loss=False)  # fmt: skip
def alpha_zero(at: At) -> None:
    """Games that are played, then a bar for each epoch."""
    log = at.log
    if at.done == 1:
        log.err(f"{log.clock()} host Coach[4012] INFO Starting Iter #1 ...")
        for done in log.steps(40, 1, 1, 0.5):
            log.bar(render_tqdm(done, 40, done * 0.5, "Self Play"))
        log.err()
    if at.step == 1:
        log.out(f"EPOCH ::: {at.epoch}")
    more = f"Loss_pi={at.loss:.2e}, Loss_v=3.01e-01"
    log.bar(render_tqdm(at.step, 140, at.step * 0.5, "Training Net", more=more))
    if at.is_last:
        log.err()


@steps("patrick-kidger/equinox", "docs/examples/deep_convolutional_gan.ipynb",
       'f"Step: {step}/{num_steps}, Generator loss', total=1000, every=10, first=0,
       has_loss=False)  # fmt: skip
def equinox_gan(at: At) -> None:
    at.log.out(
        f"Step: {at.step}/1000, Generator loss: {at.loss}, Discriminator loss: {at.log.near(0.6)}"
    )


@steps("facebookresearch/barlowtwins", "main.py", "stats = dict(epoch=epoch, step=step,", every=100,
       first=0)  # fmt: skip
def barlow_twins(at: At) -> None:
    found = {"epoch": at.step // 1200, "step": at.step, "lr_weights": 0.012, "lr_biases": 0.00031,
             "loss": at.loss, "time": int(at.log.now_s)}  # fmt: skip
    at.log.out(json.dumps(found))


@steps("ermongroup/ddim", "runners/diffusion.py", 'f"step: {step}, loss: {loss.item()}, data time',
       last=(30, 400))  # fmt: skip
def ddim(at: At) -> None:
    at.log.err(
        f"INFO - diffusion.py - {at.log.stamp()} - step: {at.step}, loss: {at.loss}, data time: "
        f"{at.log.near(0.02)}"
    )


@steps("google/dopamine", "dopamine/discrete_domains/run_experiment.py", "'Steps executed: {} '",
       size=2000, every=100, first=100, epoch=0, last=(3, 18), step_s=0.05,
       has_loss=False)  # fmt: skip
def dopamine(at: At) -> None:
    """Steps of an iteration, and those of its evaluation in the same words."""
    log = at.log
    log.bar(f"Steps executed: {at.step} Episode length: 100 Return: {log.near(20.0)} ", "out")
    if at.is_last:
        for done in log.steps(500, 100, 100, 0.05):
            log.bar(f"Steps executed: {done} Episode length: 100 Return: {log.near(20.0)} ", "out")
        log.out()
        log.err(f"I{log.clock('%m%d %H:%M:%S')}.123456 1401 run_experiment.py:540] Average "
                f"undiscounted return per training episode: 20.12")  # fmt: skip
