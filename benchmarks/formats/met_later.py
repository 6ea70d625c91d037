"""Programs and logs of no training that the reader met after the others: of many frameworks and
languages, among them tutorials that people copy."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_clock, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, no_training, program


@program("modelscope/ms-swift", "swift/trainers/callback.py", "add_train_message")
def ms_swift(log: Log) -> Truth:
    """A bar, and a dictionary that names step and total in one string."""
    total, last, loss = 873, log.pick(100, 800, 5), 0.0
    for at in log.steps(last, 1, 0, 1.1):
        log.bar(render_tqdm(at, total, log.now_s, "Train"))
        if at and at % 5 == 0:
            loss = log.loss(at / total, 8)
            log.err()
            log.out(
                f"{{'loss': {loss}, 'grad_norm': {log.near(1.2):.8f}, 'learning_rate': 9.6e-05, "
                f"'token_acc': {log.near(0.8):.8f}, 'epoch': {at / 437:.2f}, "
                f"'global_step/max_steps': '{at}/{total}', 'percentage': '3.21%', "
                f"'elapsed_time': '{int(log.now_s)}s', 'remaining_time': '12m 3s'}}"
            )
    return Truth(steps=(last,), totals=(total,), losses=(loss,), epochs=(last // 437,))


@program("leggedrobotics/rsl_rl", "rsl_rl/utils/logger.py", "Learning iteration {it}/{total_it}")
def rsl_rl(log: Log) -> Truth:
    """A block of rows an iteration, with environment steps."""
    total, last = 1500, log.pick(40, 300)
    for at in log.steps(last, 1, 0, 1.3):
        log.out(
            "#" * 80 + "\n\x1b[1m" + f" Learning iteration {at}/{total} ".center(80) + "\x1b[0m \n"
        )
        for name, value in (
            ("Total steps:", f"{(at + 1) * 98304} "),
            ("Steps per second:", f"{log.near(81000.0):.0f} "),
            ("Collection time:", f"{log.near(0.81):.3f}s "),
            ("Learning time:", f"{log.near(0.32):.3f}s "),
            ("Mean value_function loss:", f"{log.near(0.02):.4f}"),
            ("Mean surrogate loss:", f"{log.near(-0.003):.4f}"),
            ("Mean reward:", f"{at / 9:.2f}"),
            ("Mean episode length:", f"{log.near(700.0):.2f}"),
        ):
            log.out(f"{name:>40} {value}")
        log.out("-" * 80)
        log.out(f"{'Iteration time:':>40} {log.near(1.1):.2f}s")
        log.out(f"{'Time elapsed:':>40} {render_span(log.now_s)}")
        log.out(f"{'ETA:':>40} {render_span((total - at) * 1.3)}\n")
    return Truth(
        steps=(last, last + 1), totals=(total,), also=(Count(((last + 1) * 98304,), (None,)),)
    )


@program("Denys88/rl_games", "rl_games/common/a2c_common.py", "fps step: {fps_step:.0f} fps step")
def rl_games(log: Log) -> Truth:
    total, last = 500, log.pick(60, 400)
    log.out("Env info:\n{'action_space': Box(8,), 'observation_space': Box(60,)}")
    for at in log.steps(last, 1, 1, 0.6):
        log.out(
            f"fps step: {log.near(91000.0):.0f} fps step and policy inference: "
            f"{log.near(82000.0):.0f} fps total: {log.near(51000.0):.0f} epoch: {at}/{total} "
            f"frames: {(at - 1) * 65536:.0f}"
        )
        if at % 50 == 0:
            log.out(f"saving next best rewards:  [{at / 3:.2f}]")
            log.out("=> saving checkpoint 'runs/Ant_02-09-00-00/nn/Ant.pth'")
    return Truth(
        steps=(last,), totals=(total, None), epochs=(last,),
        also=(Count(((last - 1) * 65536,), (None,)),),
    )  # fmt: skip


@program(
    "AlexeyAB/darknet", "src/detector.c", "%d: %f, %f avg loss, %f rate, %lf seconds, %d images"
)
def darknet(log: Log) -> Truth:
    """C: a number without a word before the losses, and rows of each layer in between."""
    last, loss, mean = log.pick(60, 400), 0.0, 0.0
    for at in log.steps(last, 1, 1, 3.0):
        for layer in (82, 94):
            log.err(
                f"v3 (mse loss, Normalizer: (iou: 0.75, obj: 1.00, cls: 1.00) Region {layer} Avg "
                f"(IOU: {log.near(0.4):.6f}), count: {log.pick(3, 30)}, class_loss = "
                f"{log.near(9.0):.6f}, iou_loss = {log.near(1.0):.6f}, total_loss = "
                f"{log.near(10.0):.6f} "
            )
        loss, mean = log.loss(at / 2000, 6), log.loss(at / 2000, 6)
        log.out(
            f"\n {at}: {loss:.6f}, {mean:.6f} avg loss, 0.001000 rate, "
            f"{log.near(3.0):.6f} seconds, {at * 64} images, {log.near(20.0):.6f} hours left"
        )
    return Truth(steps=(last,), losses=(loss, mean), also=(Count((last * 64,)),))


@program(
    "Megvii-BaseDetection/YOLOX", "yolox/core/trainer.py", 'progress_str = "epoch: {}/{}, iter'
)
def yolox(log: Log) -> Truth:
    """Loguru; iterations of an epoch whose number of all stands behind it."""
    size, last = 1849, log.pick(100, 1700, 10)
    loss = 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 1840, 10, 10, 0.05):
            loss = round(log.loss((epoch * size + at) / 9000), 1)
            log.err(
                f"{log.clock()} | INFO     | yolox.core.trainer:after_iter - epoch: {epoch}/300, "
                f"iter: {at}/{size}, gpu mem: 7411Mb, iter_time: {log.near(0.4):.3f}s, "
                f"data_time: 0.001s, total_loss: {loss:.1f}, iou_loss: 3.1, l1_loss: 0.0, "
                f"conf_loss: 2.2, cls_loss: 1.3, lr: 1.2e-04, size: 640, ETA: 2 days, 9:31:02"
            )
    return Truth(
        steps=(size + last,), totals=(300 * size, None), epochs=(2,), losses=(loss,),
        also=(Count((last,), (size,)),),
    )  # fmt: skip


@program("open-mmlab/mmcv", "mmcv/runner/hooks/logger/text.py", 'Epoch [{log_dict["epoch"]}][')
def mmcv(log: Log) -> Truth:
    size, last, loss = 7330, log.pick(500, 7000, 50), 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 7300, 50, 50, 0.02):
            loss = log.loss((epoch * size + at) / 20000)
            log.err(
                f"{log.stamp()} - mmdet - INFO - Epoch [{epoch}][{at}/{size}]\tlr: 2.000e-02, "
                f"eta: 9:21:10, time: {log.near(0.4):.3f}, data_time: {log.near(0.01):.3f}, "
                f"memory: 3802, loss_rpn_cls: 0.0412, loss_bbox: 0.2123, acc: 91.2, "
                f"loss: {loss:.4f}"
            )
        if epoch == 1:
            log.out("[>>] 5000/5000, 31.2 task/s, elapsed: 160s, ETA:     0s")
            log.err(f"{log.stamp()} - mmdet - INFO - Epoch(val) [1][5000]\tbbox_mAP: 0.2110")
    return Truth(steps=(size + last,), epochs=(2,), losses=(loss,), also=(Count((last,), (size,)),))


@program(
    "PaddlePaddle/PaddleNLP", "examples/benchmark/glue/run_glue.py", '"global step %d/%d, epoch'
)
def paddle_nlp(log: Log) -> Truth:
    total, last, loss, val = 6315, log.pick(600, 5000, 100), 0.0, 0.0
    for at in log.steps(last, 100, 100, 0.12):
        loss = log.loss(at / total, 6)
        log.out(
            f"global step {at}/{total}, epoch: {at // 2105}, batch: {at % 2105}, rank_id: 0, "
            f"loss: {loss:.6f}, lr: 0.0000191200, speed: {log.near(8.0):.4f} step/s"
        )
        if at % 500 == 0:
            val = round(log.near(loss), 6)
            log.out(f"eval loss: {val:.6f}, acc: {log.near(0.8):.6f}, ")
            log.out("eval done total : 5.2 s")
    return Truth(
        steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,), epochs=(last // 2105,)
    )


@program("PaddlePaddle/PaddleDetection", "ppdet/engine/callbacks.py", "'Epoch: [{}]',")
def paddle_detection(log: Log) -> Truth:
    """Epochs and steps from 0."""
    size, last, loss = 3665, log.pick(400, 3600, 20), 0.0
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else 3660, 20, 0, 0.03):
            loss = log.loss((epoch * size + at) / 9000, 6)
            log.out(
                f"[{log.clock('%m/%d %H:%M:%S')}] ppdet.engine INFO: Epoch: [{epoch}] "
                f"[{at:4d}/{size}] learning_rate: 0.000333 loss_xy: 0.612 loss_wh: 0.711 "
                f"loss: {loss:.6f} eta: 1 day, 2:03:04 batch_cost: {log.near(0.5):.4f} "
                f"data_cost: 0.0004 ips: {log.near(15.0):.4f} images/s"
            )
    return Truth(
        steps=(size + last, size + last + 1), totals=(None,), epochs=(1, 2), losses=(loss,),
        also=(Count((last, last + 1), (size,)),),
    )  # fmt: skip


@program(
    "PaddlePaddle/Paddle", "python/paddle/hapi/progressbar.py", "bar_chars = (self.name + ' %'"
)
def paddle_hapi(log: Log) -> Truth:
    """Lines of verbose 2, and an evaluation in the same words."""
    size, last, loss = 938, log.pick(100, 930, 10), 0.0
    log.out("The loss value printed in the log is the current step, and the metric is the average")
    for epoch in (1, 2):
        log.out(f"Epoch {epoch}/5")
        for at in log.steps(last if epoch == 2 else 930, 10, 10, 0.02):
            loss = log.loss((epoch * size + at) / 4000)
            log.out(f"step {at:3d}/{size} - loss: {loss:.4f} - acc: 0.9312 - 21ms/step")
        if epoch == 1:
            log.out(f"step {size}/{size} - loss: {loss:.4f} - acc: 0.9315 - 21ms/step")
            log.out("save checkpoint at /x/checkpoints/0\nEval begin...")
            for at in range(10, 158, 10):
                log.out(f"step {at:3d}/157 - loss: {log.near(0.1):.4f} - acc: 0.9612 - 9ms/step")
                log.wait(0.1)
            log.out("step 157/157 - loss: 0.0412 - acc: 0.9630 - 9ms/step\nEval samples: 10000")
    return Truth(
        steps=(size + last,), totals=(5 * size, None), epochs=(2,), losses=(loss,),
        also=(Count((last,), (size,)),),
    )  # fmt: skip


@program("karpathy/nanochat", "scripts/chat_rl.py", "Step {step}/{num_steps} | Example step")
def nanochat_rl(log: Log) -> Truth:
    """Each step has lines of its examples and passes."""
    total, last, loss = 467, log.pick(40, 200), 0.0
    for at in log.steps(last, 1, 0, 6.0):
        if at % 60 == 0:
            log.out(f"Step {at} | Pass@1: 0.0312, Pass@2: 0.0512")
        for example in range(2):
            for turn in range(2):
                loss = round(log.near(0.02), 6)
                log.out(
                    f"Step {at}/{total} | Example step {example} | Pass {turn} | loss: {loss:.6f} "
                    f"| Average reward: {log.near(0.2)}"
                )
        log.out(
            f"Step {at}/{total} | Average reward: {log.near(0.2)} | Average sequence length: "
            f"{log.near(180.0):.2f}"
        )
    return Truth(steps=(last, last + 1), totals=(total,), losses=(loss,))


@program("karpathy/llama2.c", "train.py", '"{iter_num} | loss {lossf:.4f} | lr {lr:e} | {dt*1000')
def llama2_c(log: Log) -> Truth:
    """The iteration is a bare number before a bar; nanoGPT's line at each evaluation."""
    last, loss, val = log.pick(300, 900, 10), 0.0, 0.0
    log.out("tokens per iteration will be: 131,072")
    for at in log.steps(last, 10, 0, 0.3):
        if at % 200 == 0:
            val = log.loss(at / 900)
            log.out(f"step {at}: train loss {log.loss(at / 900)}, val loss {val}")
        loss = log.loss(at / 900)
        log.out(f"{at} | loss {loss:.4f} | lr {4e-4:e} | {log.near(310.0):.2f}ms | mfu 41.20%")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,))


@program("ggerganov/llama.cpp", "common/train.cpp", "train_opt_callback")
def llama_cpp(log: Log) -> Truth:
    """C++, on standard error; samples stand beside the iteration."""
    last, loss = log.pick(40, 200), 0.0
    log.err("main: begin training\nmain: work_size = 768376 bytes (0.7 MB)")
    for at in log.steps(last, 1, 0, 20.0):
        loss = log.loss(at / 200, 6)
        log.err(
            f"train_opt_callback: iter={at:6d} sample={at * 4 + 1}/27520 sched=0.010000 "
            f"loss={loss:.6f} dt=00:00:{log.pick(15, 25)} eta=02:{log.pick(10, 50)}:07 |"
            + "-" * log.pick(0, 8)
            + ">"
        )
    return Truth(
        steps=(last, last + 1), losses=(loss,), also=(Count((last * 4 + 1,), (27520, None)),)
    )


@program("davisking/dlib", "dlib/dnn/trainer.h", '"step#: " << rpad')
def dlib(log: Log) -> Truth:
    """Steps by the clock, so that they grow unevenly; another count of steps stands behind."""
    at, loss = 0, 0.0
    for _ in range(log.pick(12, 40)):
        log.out(
            f"step#: {at:<5d}  learning rate: 0.1   average loss: {loss:<12.6g}  "
            f"steps without apparent progress: {log.pick(0, 300)}"
        )
        log.wait(40.0)
        at, loss = at + log.pick(70, 95), log.loss(at / 4000)
    log.out(
        f"step#: {at:<5d}  learning rate: 0.1   average loss: {loss:<12.6g}  "
        f"steps without apparent progress: {log.pick(0, 300)}"
    )
    return Truth(steps=(at,), losses=(float(f"{loss:.6g}"),))


@program("BVLC/caffe", "src/caffe/solver.cpp", '"Iteration " << iter_')
def caffe(log: Log) -> Truth:
    """glog; a test net, outputs and the rate of learning in lines of their own."""
    last, loss = log.pick(1200, 4000, 100), 0.0
    head = "12345 solver.cpp"
    for at in log.steps(last, 100, 0, 0.03):
        stamp = log.clock("I%m%d %H:%M:%S") + ".123456"
        if at % 500 == 0:
            log.err(f"{stamp} {head}:330] Iteration {at}, Testing net (#0)")
            log.err(f"{stamp} {head}:397]     Test net output #0: accuracy = 0.9731")
            log.err(
                f"{stamp} {head}:397]     Test net output #1: loss = 0.0812 (* 1 = 0.0812 loss)"
            )
        loss = round(log.loss(at / 4000), 6)
        log.err(
            f"{stamp} {head}:218] Iteration {at} ({log.near(190.0):.4g} iter/s, 0.51s/100 iters), "
            f"loss = {loss}"
        )
        log.err(f"{stamp} {head}:237]     Train net output #0: loss = {loss} (* 1 = {loss} loss)")
        log.err(f"{stamp} 12345 sgd_solver.cpp:105] Iteration {at}, lr = 0.01")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(0.0812,))


@program("apache/mxnet", "python/mxnet/callback.py", "Speedometer")
def mxnet(log: Log) -> Truth:
    """Batches of an epoch of unknown length, and rows at its end."""
    size, last = 938, log.pick(100, 900, 20)
    for epoch in (0, 1):
        for at in log.steps(last if epoch == 1 else 920, 20, 20, 0.02):
            log.err(
                f"INFO:root:Epoch[{epoch}] Batch [{at - 20}-{at}]\tSpeed: {log.near(41000.0):.2f} "
                f"samples/sec\taccuracy={log.near(0.9):f}"
            )
        if epoch == 0:
            log.err(f"INFO:root:Epoch[{epoch}] Train-accuracy=0.912340")
            log.err(f"INFO:root:Epoch[{epoch}] Time cost=21.412")
            log.err(f"INFO:root:Epoch[{epoch}] Validation-accuracy=0.934500")
    return Truth(
        steps=(size + last, 920 + last), epochs=(1, 2), also=(Count((last,)), Count((last - 20,)))
    )


@program("microsoft/CNTK", "bindings/python/cntk/logging/progress_print.py", "Finished Epoch[")
def cntk(log: Log) -> Truth:
    total, last, loss = 40, log.pick(8, 35), 0.0
    log.out(
        "Training 98778 parameters in 10 parameter tensors.\nLearning rate per 1 samples: 0.001"
    )
    for at in log.steps(last, 1, 1, 4.0):
        loss = log.loss(at / total, 6)
        log.out(
            f"Finished Epoch[{at} of {total}]: [Training] loss = {loss:.6f} * 60000, metric = "
            f"{log.near(3.0):.2f}% * 60000 {log.near(3.6):.3f}s (16012.3 samples/s);"
        )
    return Truth(steps=(last,), totals=(total, None), losses=(loss,), epochs=(last,))


@program(
    "pytorch/examples", "distributed/ddp-tutorial-series/multigpu.py", "[GPU{self.gpu_id}] Epoch"
)
def ddp_tutorial(log: Log) -> Truth:
    """Two ranks; the steps of an epoch are all that stands beside its number."""
    last = log.pick(6, 40)
    for at in log.steps(last, 1, 0, 2.0):
        for rank in (0, 1):
            log.out(f"[GPU{rank}] Epoch {at} | Batchsize: 32 | Steps: 32", rank)
        if at % 2 == 0:
            log.out(f"Epoch {at} | Training checkpoint saved at checkpoint.pt")
    return Truth(
        steps=(last, last + 1), totals=(None,), epochs=(last, last + 1),
        also=(Count(tuple(range(32 * last, 32 * last + 33))),),
    )  # fmt: skip


@program(
    "pytorch/tutorials", "beginner_source/basics/optimization_tutorial.py", "loss: {loss:>7f}  ["
)
def quickstart(log: Log) -> Truth:
    """Samples in brackets behind the loss, an epoch in a line of its own."""
    size, epochs, loss = 60000, 3, 0.0
    last = log.pick(3, 9) * 6400 + 64
    for epoch in range(1, epochs + 1):
        log.out(f"Epoch {epoch}\n-------------------------------")
        for at in log.steps(last if epoch == epochs else 57664, 6400, 64, 0.0005):
            loss = log.loss((epoch * size + at) / 200000, 6)
            log.out(f"loss: {loss:>7f}  [{at:>5d}/{size:>5d}]")
        if epoch < epochs:
            log.out(f"Test Error: \n Accuracy: 41.2%, Avg loss: {log.near(loss):>8f} \n")
    batches = 938 * 2 + last // 64
    return Truth(
        steps=(batches, batches + 1), epochs=(3,), losses=(loss,),
        also=(Count((last,), (size, None)), Count((2 * size + last,), (None,))),
    )  # fmt: skip


@program(
    "pytorch/tutorials", "beginner_source/blitz/cifar10_tutorial.py", "[{epoch + 1}, {i + 1:5d}]"
)
def blitz(log: Log) -> Truth:
    """Epoch and batch in one bracket."""
    size, last, loss = 12500, log.pick(2000, 12000, 2000), 0.0
    for epoch in (1, 2):
        for at in log.steps(last if epoch == 2 else 12000, 2000, 2000, 0.003):
            loss = log.loss((epoch * size + at) / 40000, 3)
            log.out(f"[{epoch}, {at:5d}] loss: {loss:.3f}")
    return Truth(steps=(size + last,), epochs=(1, 2), losses=(loss,), also=(Count((last,)),))


@program("OpenNMT/OpenNMT-tf", "opennmt/training.py", '"Step = %d ; steps/s = %0.2f, %s ; Learning')
def opennmt_tf(log: Log) -> Truth:
    last, loss = log.pick(800, 5000, 100), 0.0
    vals: tuple[float, ...] = ()
    for at in log.steps(last, 100, 100, 0.3):
        loss = log.loss(at / 5000, 6)
        log.err(
            f"{log.clock()}.123: I training.py:176] Step = {at} ; steps/s = {log.near(3.1):0.2f}, "
            f"source words/s = {log.pick(9000, 9900)}, target words/s = {log.pick(8000, 8900)} ; "
            f"Learning rate = 0.000123 ; Loss = {loss:f}"
        )
        if at % 500 == 0:
            vals = (round(log.near(loss), 6),)
            log.err(f"{log.clock()}.124000: I runner.py:310] Running evaluation for step {at}")
            log.err(
                f"{log.clock()}.9: I evaluation.py:189] Evaluation result for step {at}: "
                f"loss: {vals[0]:f} ; perplexity: {log.near(9.0):f}"
            )
    return Truth(steps=(last,), losses=(loss,), val_losses=vals)


@program("tensorflow/models", "orbit/controller.py", "train | step: {step: 6d} | steps/sec: {steps")
def orbit(log: Log) -> Truth:
    """The values in rows of a dictionary below the step."""
    total, last, loss = 10000, log.pick(1000, 9000, 500), 0.0
    vals: tuple[float, ...] = ()
    for at in log.steps(last, 500, 500, 0.05):
        loss = log.loss(at / total, 6)
        log.out(
            f"train | step: {at:6d} | steps/sec: {log.near(19.0):6.1f} | output: \n"
            f"    {{'learning_rate': 0.0012,\n     'training_loss': {loss}}}"
        )
        if at % 2000 == 0:
            vals = (round(log.near(loss), 6),)
            log.out(
                f" eval | step: {at:6d} | running complete evaluation...\n eval | step: {at:6d} | "
                f"eval time:   12.1 sec | output: \n    {{'validation_loss': {vals[0]:.6f}}}"
            )
    return Truth(steps=(last,), totals=(None, total), losses=(loss,), val_losses=vals)


@program(
    "InternLM/InternEvo", "internlm/train/pipeline.py", "record_current_batch_training_metrics"
)
def intern_evo(log: Log) -> Truth:
    """Fields behind signs of equality, of which several grow."""
    last, loss = log.pick(40, 300), 0.0
    for at in log.steps(last, 1, 0, 4.0):
        loss = log.loss(at / 900, 12)
        log.err(
            f"{log.stamp()}\tINFO train.py:323 in record_current_batch_training_metrics -- "
            f"tflops={log.near(63.0)},step={at},loss={loss},tgs (tokens/gpu/second)="
            f"{log.near(1424.0):.2f},lr={4e-07 * (at + 1)},loss_scale=65536.0,grad_norm="
            f"{log.near(9.0)},micro_num=4,num_consumed_tokens={131072 * (at + 1)},"
            f"inf_nan_skip_batches=0,num_samples_in_batch={log.pick(12, 20)},largest_length=2048,"
            f"adam_beta2=0.95,fwd_bwd_time={log.near(3.67):.2f}"
        )
    return Truth(steps=(last, last + 1), losses=(loss,), also=(Count((131072 * (last + 1),)),))


@program("scikit-learn/scikit-learn", "sklearn/ensemble/_gb.py", "VerboseReporter")
def gradient_boosting(log: Log) -> Truth:
    """A table whose rows come every tenth later."""
    last, loss = log.pick(2, 9) * 10, 0.0
    log.out("      Iter       Train Loss   Remaining Time ")
    for at in [*range(1, 11), *range(20, last + 1, 10)]:
        loss = log.loss(at / 100)
        log.out(f"{at:10d} {loss:16.4f} {log.near(9.0):15.2f}s")
        log.wait(0.4)
    return Truth(steps=(max(last, 10),), losses=(loss,))


@program("microsoft/LightGBM", "src/boosting/gbdt.cpp", '"Iteration:%d, %s %s : %g"')
def lightgbm_cli(log: Log) -> Truth:
    last, loss = log.pick(20, 90), 0.0
    val = 0.0
    log.out("[LightGBM] [Info] Finished loading parameters\n[LightGBM] [Info] Started training...")
    for at in log.steps(last, 1, 1, 0.3):
        loss, val = log.near(0.5), log.near(0.6)
        log.out(f"[LightGBM] [Info] Iteration:{at}, training binary_logloss : {loss:g}")
        log.out(f"[LightGBM] [Info] Iteration:{at}, valid_1 binary_logloss : {val:g}")
        log.out(f"[LightGBM] [Info] {log.now_s:f} seconds elapsed, finished iteration {at}")
    return Truth(steps=(last,), losses=(float(f"{loss:g}"),), val_losses=(float(f"{val:g}"),))


@program("facebookresearch/ParlAI", "parlai/scripts/train_model.py", "f'time:{time}s total_exs:")
def parlai(log: Log) -> Truth:
    """A line of counts, then a table whose columns are named above."""
    last = log.pick(20, 80) * 25
    for at in log.steps(last, 25, 25, 0.4):
        stamp = log.clock("%H:%M:%S")
        log.out(
            f"{stamp} | time:{int(log.now_s)}s total_exs:{at * 16} total_steps:{at} epochs:0.{at}"
        )
        log.out("    clip  ctpb  ctps  exps  exs  gnorm  gpu_mem  loss    lr  ltpb   ppl  tps  ups")
        log.out(
            f"       1  1300  3100    41  400  {log.near(2.0):.3f}    .4120 "
            f"{log.loss(at / 3000):.3f} 1e-05   380 {log.near(20.0):.2f} 3900 2.41"
        )
    return Truth(steps=(last,), also=(Count((last * 16,)),))


@program(
    "Project-MONAI/tutorials", "2d_classification/mednist_tutorial.ipynb", "train_loss: {loss.i"
)
def monai(log: Log) -> Truth:
    """A step of the epoch, whose number stands in a line between rules."""
    size, last, loss = 157, log.pick(20, 150), 0.0
    for epoch in (1, 2):
        log.out("-" * 10 + f"\nepoch {epoch}/4")
        for at in log.steps(last if epoch == 2 else size, 1, 1, 0.2):
            loss = log.loss((epoch * size + at) / 700)
            log.out(f"{at}/{size - 1}, train_loss: {loss:.4f}")
        if epoch == 1:
            log.out(f"epoch {epoch} average loss: {log.near(loss):.4f}")
            log.out("saved new best metric model\ncurrent epoch: 1 current AUC: 0.9912")
    return Truth(
        steps=(size + last, size + last - 1), totals=(4 * size, 4 * size - 4, None), epochs=(2,),
        losses=(loss,), also=(Count((last,), (size, size - 1)),),
    )  # fmt: skip


@program("MIC-DKFZ/nnUNet", "nnunetv2/training/nnUNetTrainer/nnUNetTrainer.py", "on_epoch_end")
def nnunet(log: Log) -> Truth:
    """A block of lines an epoch; the loss is negative."""
    last, loss, val = log.pick(8, 60), 0.0, 0.0
    for at in log.steps(last, 1, 0, 30.0):
        stamp = log.clock("%Y-%m-%d %H:%M:%S") + ".123456: "
        log.out(
            f"{stamp}\n{stamp}Epoch {at} \n{stamp}Current learning rate: {0.01 - at / 1e5:.5f} "
        )
        if at == last:
            break
        loss, val = round(-log.near(0.6), 4), round(-log.near(0.5), 4)
        log.out(f"{stamp}train_loss {loss} \n{stamp}val_loss {val:.4f} ")
        log.out(f"{stamp}Pseudo dice [0.8012, 0.7211] \n{stamp}Epoch time: {log.near(30.0):.2f} s ")
    return Truth(
        steps=(last, last + 1),
        epochs=(last, last + 1),
        losses=(loss,),
        val_losses=(val,),
    )


@program("thu-ml/tianshou", "tianshou/trainer/base.py", "Epoch #{self.epoch}")
def tianshou(log: Log) -> Truth:
    """A bar an epoch, of environment steps, with gradient steps behind it."""
    size, per, epochs, loss = 10000, 8, log.pick(3, 9), 0.0
    for epoch in range(1, epochs + 1):
        begun = log.now_s
        for at in range(0, size + 1, 500):
            done, loss = (epoch - 1) * size + at, log.loss(epoch / 9, 3)
            more = (
                f"env_episode=20, env_step={done}, gradient_step={done // per}, len=100, "
                f"loss={loss}, rew=90"
            )
            log.bar(
                render_tqdm(min(at, size), size, log.now_s - begun, f"Epoch #{epoch}", more=more)
            )
            log.wait(2.0)
        log.err()
        log.out(f"Epoch #{epoch}: test_reward: 101.2 ± 9.1, best_reward: 102.3 in #{epoch}")
    done = epochs * size
    return Truth(
        steps=(done,), totals=(None,), epochs=(epochs,), losses=(loss,),
        also=(Count((done // per,)), Count((size,), (size,))),
    )  # fmt: skip


@program("kaldi-asr/kaldi", "egs/wsj/s5/steps/train_mono.sh", 'echo "$0: Pass $x"')
def kaldi_gmm(log: Log) -> Truth:
    """Passes of a script: a line each, and programs whose lines have a place in the source."""
    last = log.pick(8, 38)
    log.out("steps/train_mono.sh --nj 4 --cmd run.pl data/train data/lang exp/mono")
    for at in log.steps(last, 1, 0, 20.0):
        log.out(f"steps/train_mono.sh: Pass {at}")
        if at % 4 == 1:
            log.out("steps/train_mono.sh: Aligning data")
    return Truth(steps=(last, last + 1, last - 1))


@program("tinygrad/tinygrad", "examples/hlb_cifar10.py", "{i:3d} {(cl-st)*1000.0:7.2f} ms run")
def tinygrad(log: Log) -> Truth:
    last, loss = log.pick(100, 900), 0.0
    for at in log.steps(last, 1, 0, 0.2):
        loss = log.loss(at / 1000, 2)
        log.out(
            f"{at:3d} {log.near(310.0):7.2f} ms run, {log.near(11.0):7.2f} ms python, "
            f"{log.near(299.0):7.2f} ms CUDA, {loss:7.2f} loss, {0.01:.6f} LR, 2.31 GB used, "
            f"{log.near(9100.0):9.2f} GFLOPS, {log.near(3000.0):9.2f} GOPS"
        )
    return Truth(steps=(last, last + 1), losses=(loss,))


# No training.


@no_training
def uv_sync(log: Log) -> None:
    """A resolver and downloads in several bars."""
    log.err("Using CPython 3.12.4\nResolved 141 packages in 212ms")
    for at in range(1, 142):
        log.bar(f"Preparing packages... ({at}/141)")
        log.wait(0.2)
    log.err("\nPrepared 141 packages in 28.12s\nInstalled 141 packages in 1.21s\n + torch==2.6.0")


@no_training
def apt_update(log: Log) -> None:
    for at in range(1, 30):
        log.out(f"Hit:{at} mirror bookworm InRelease")
        log.out(f"{at * 3}% [{at} Packages store 0 B] [Waiting for headers]")
        log.wait(0.4)
    log.out("Reading package lists... Done\nBuilding dependency tree... Done")


@no_training
def torch_build(log: Log) -> None:
    """An extension is compiled, with the word train in its files."""
    log.out("running build_ext\nbuilding 'fused_train_step' extension")
    for at in range(1, 61):
        log.out(f"[{at}/60] nvcc -c csrc/train/optimizer_step_{at}.cu -o build/step_{at}.o -O3")
        log.wait(1.0)
    log.err("ptxas info    : Used 40 registers, 384 bytes cmem[0]")


@no_training
def inductor_autotune(log: Log) -> None:
    """Choices of a kernel with times; a share of the best."""
    for shape in (1024, 2048, 4096):
        log.err(f"AUTOTUNE mm({shape}x{shape}, {shape}x{shape})")
        for at in range(1, 20):
            log.err(f"  triton_mm_{at} {log.near(0.02):.4f} ms {log.near(90.0):.1f}% BLOCK_K=32")
        log.err(
            "SingleProcess AUTOTUNE benchmarking takes 2.1 seconds and 1.2 seconds precompiling"
        )
        log.wait(3.0)


@no_training
def tokenizer_training(log: Log) -> None:
    """A tokenizer is trained: merges are no steps of a training of weights."""
    for name, total in (("Pre-processing files", 512), ("Tokenize words", 40123),
                        ("Count pairs", 40123), ("Compute merges", 31744)):  # fmt: skip
        for done in range(0, total + 1, max(1, total // 20)):
            log.bar(
                f"[{render_clock(log.now_s)}] {name:<30} {'█' * 20} {done:<8} /    {total:>8}",
                "out",
            )
            log.wait(0.5)
        log.out()


@no_training
def sentencepiece(log: Log) -> None:
    """EM of a unigram model, with the size and an objective."""
    log.err("trainer_interface.cc(428) LOG(INFO) Normalizing sentences...")
    for at in range(0, 12):
        log.err(
            f"unigram_model_trainer.cc(505) LOG(INFO) EM sub_iter={at % 2} "
            f"size={90000 - at * 9000} obj={log.near(10.0):.4f} num_tokens=312345"
        )
        log.wait(3.0)
    log.err("trainer_interface.cc(687) LOG(INFO) Saving model: m.model")


@no_training
def helm_eval(log: Log) -> None:
    """An evaluation harness: requests of tasks."""
    for task in ("mmlu", "gsm8k"):
        for at in range(0, 1320, 20):
            log.bar(render_tqdm(at, 1319, log.now_s, f"Running generate_until requests {task}"))
            log.wait(1.0)
        log.err()
    log.out("|Tasks|Version|Filter|n-shot|Metric|Value|\n|gsm8k|3|strict|5|exact_match|0.41|")


@no_training
def test_loop(log: Log) -> None:
    """A model is tested batch by batch, and a loss is printed."""
    for at in range(0, 200, 10):
        log.out(
            f"Test: [{at:3d}/196]\tTime {log.near(0.2):6.3f} ( 0.210)\tLoss {log.near(1.0):.4e} "
            f"(1.0021e+00)\tAcc@1  71.00 ( 71.21)"
        )
        log.wait(2.0)
    log.out(" *   Acc@1 71.212 Acc@5 90.123")


@no_training
def tgi_server(log: Log) -> None:
    """An inference server: counts of requests and tokens."""
    for at in range(1, 90):
        log.out(
            f'{{"timestamp":"{log.clock("%Y-%m-%dT%H:%M:%S")}.1Z","level":"INFO","message":"Success",'
            f'"total_time":"{log.near(1.2):.6f}s","inference_time":"1.1s","tokens":{at * 40},'
            f'"span":{{"name":"generate","request":{at}}}}}'
        )
        log.wait(0.8)


@no_training
def triton_perf(log: Log) -> None:
    """Concurrency by concurrency."""
    for at in range(1, 17):
        log.out(f"Request concurrency: {at}\n  Client: \n    Request count: {at * 1200}")
        log.out(
            f"    Throughput: {log.near(410.0):.3f} infer/sec\n    Avg latency: {at * 900} usec"
        )
        log.wait(5.0)


@no_training
def ray_data(log: Log) -> None:
    """Blocks of a data set, in bars of rich."""
    for at in range(0, 401, 5):
        log.bar(
            f"Running Dataset: dataset_7. Active & requested resources: 8/8 CPU, 2.1GiB/9GiB "
            f"object store: {at / 4:.0f}%|████      | {at}/400 [00:{at % 60:02d}<01:10, 5.1 row/s]"
        )
        log.wait(0.5)
    log.err()


@no_training
def spark_stages(log: Log) -> None:
    for stage in range(0, 6):
        for at in range(0, 201, 10):
            log.bar(f"[Stage {stage}:{'=' * (at // 5)}>{' ' * (40 - at // 5)}({at} + 8) / 200]")
            log.wait(0.3)
    log.err()


@no_training
def faiss_index(log: Log) -> None:
    """k-means of an index: it prints an objective, and trains no network."""
    log.out("Training level-1 quantizer\nClustering 100000 points in 128D to 1024 clusters")
    for at in range(0, 25):
        log.bar(
            f"  Iteration {at} ({at * 0.4:.2f} s, search {at * 0.3:.2f} s): objective="
            f"{9e6 - at * 1e4:g} imbalance={log.near(1.2):.3f} nsplit=0       ",
            "out",
        )
        log.wait(0.4)
    log.out("\nAdding 1000000 vectors")


@no_training
def slurm_array_wait(log: Log) -> None:
    """A script that waits for others, and counts."""
    for at in range(1, 120):
        log.out(f"[{log.clock()}] waiting for node 3 of 4 (attempt {at}/600)")
        log.wait(2.0)


@no_training
def open_foam(log: Log) -> None:
    """A solver: time steps, residuals and iterations, and no training."""
    for at in range(1, 90):
        log.out(f"Time = {at}\n")
        for name in ("Ux", "Uy", "p"):
            log.out(
                f"smoothSolver:  Solving for {name}, Initial residual = {log.near(0.1):.6f}, Final "
                f"residual = {log.near(0.001):.6f}, No Iterations {log.pick(2, 9)}"
            )
        log.out(f"ExecutionTime = {at * 1.1:.2f} s  ClockTime = {at} s\n")
        log.wait(1.1)
