"""Language models: pretraining and fine-tuning."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import Count, Truth, program


@program("karpathy/nanoGPT", "train.py", "iter {iter_num}: loss")
def nanogpt(log: Log) -> Truth:
    """Resumed at an evaluation; an iteration every ten, both losses every hundred."""
    first, total = 2000, 5000
    last = log.pick(2300, 2490, 10)
    log.out("tokens per iteration will be: 491,520")
    log.out("Resuming training from out-owt")
    log.out("number of parameters: 123.59M")
    val = loss = 0.0
    for step in log.steps(last, 10, first):
        loss = log.loss(step / total)
        if step % 100 == 0:
            val = log.loss(step / total)
            log.out(f"step {step}: train loss {log.loss(step / total):.4f}, val loss {val:.4f}")
            log.out("saving checkpoint to out-owt")
        took_ms = log.near(512.0)
        log.out(f"iter {step}: loss {loss:.4f}, time {took_ms:.2f}ms, mfu {log.near(41.0):.2f}%")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,))


@program("karpathy/llm.c", "train_gpt2.cu", 'printf0("step %4d/%d | loss')
def llmc(log: Log) -> Truth:
    """Counted from 1; validation and a benchmark between, drawn over one line."""
    total, last = 4882, log.pick(520, 740)
    log.out("| train_num_batches     | 4882                                               |")
    val = loss = 0.0
    for step in log.steps(last, 1, 1, 0.3):
        if step % 250 == 1:
            val = log.loss(step / total, 6)
            log.out(f"val loss {val:.6f}")
            for done in range(0, 1250, 10):
                log.bar(f"evaluating HellaSwag: {done}/1250", "out")
                log.wait(0.1)
            log.out(f"HellaSwag: 352/1250 = {log.near(0.28):f}")
        loss = log.loss(step / total, 6)
        log.out(
            f"step {step:4d}/{total} | loss {loss:7.6f} ({log.random.gauss(0, 1):+.2f}z)| "
            f"norm {log.near(0.61, 0.4):6.4f} ({log.random.gauss(0, 1):+.2f}z)| "
            f"lr {6e-4 * step / total:.2e} | {log.near(301.0):.2f} ms | "
            f"{log.near(48.0):.1f}% bf16 MFU | {log.near(1.7e6):.0f} tok/s"
        )
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,))


@program("KellerJordan/modded-nanogpt", "train_gpt.py", "step:{step+1}/{train_steps} train_time")
def modded_nanogpt(log: Log) -> Truth:
    """No training loss; the validation stands before the step with the same number is done."""
    total, last = 1490, log.pick(610, 740)
    log.out("Compiling model and warming up kernels (~7 minutes on first execution)")
    log.out("Sampling steps [0, 1, 2, 90, 91, 92, 380, 381, 382] for warmup")
    val, spent_ms = 0.0, 0.0
    for step in log.steps(last, 1, 1, 0.12):
        if (step - 1) % 250 == 0:
            val = log.loss(step / total)
            log.out(
                f"step:{step - 1}/{total} val_loss:{val:.4f} train_time:{spent_ms:.0f}ms "
                f"step_avg:{spent_ms / max(step - 1, 1):.2f}ms"
            )
            log.wait(2.0)
        spent_ms += log.near(118.0)
        log.out(f"step:{step}/{total} train_time:{spent_ms:.0f}ms step_avg:{spent_ms / step:.2f}ms")
    return Truth(steps=(last,), totals=(total,), val_losses=(val,))


@program("Lightning-AI/litgpt", "litgpt/finetune/full.py", "iter {metrics['iter']} step")
def litgpt(log: Log) -> Truth:
    """Four passes a step; the last validation loss is repeated in each line."""
    last_iter = log.pick(300, 420) * 4 + 2
    log.out("Number of trainable parameters: 1,100,048,384")
    log.out("The longest sequence length in the train data is 1024")
    log.out("Verifying settings ...")
    loss, val, said = 0.0, 0.0, "n/a"
    for at in log.steps(last_iter, 1, 1, 0.2):
        step = at // 4
        is_step = at % 4 == 0
        if at % 4 == 0 or at == last_iter or at % 4 == 2:
            loss = log.loss(at / 4000, 3)
            log.out(
                f"Epoch {1 + at // 800} | iter {at} step {step} | loss train: {loss:.3f}, "
                f"val: {said} | iter time: {log.near(200.0):.2f} ms{' (step)' if is_step else ''}"
            )
        if is_step and step % 100 == 0:
            log.out("Validating ...")
            log.out("Recommend a movie for me to watch during the weekend and explain the reason.")
            val = log.loss(at / 4000)
            log.wait(6.0)
            log.out(f"iter {at}: val loss {val:.4f}, val time: {log.near(6100.0):.2f} ms")
            said = f"{val:.3f}"
    return Truth(steps=(last_iter // 4,), losses=(loss,), val_losses=(val, float(said)))


@program("huggingface/nanotron", "src/nanotron/logging/base.py", "iteration: {iteration_step} /")
def nanotron(log: Log) -> Truth:
    """Numbers for people, such as 4.19M and 7.3K; a logger's head with ranks and node."""
    total, first, last = 60000, 12001, log.pick(12080, 12300)
    head = "[INFO|DP=0|PP=1|TP=0|node-3]"
    log.out(f"{log.clock('%m/%d/%Y %H:%M:%S')} {head}: Resuming training from checkpoint 12000")
    loss = 0.0
    for step in log.steps(last, 1, first, 1.9):
        loss = log.loss(step / total, 2)
        parts = [
            f"iteration: {step} / {total}",
            f"consumed_tokens: {step * 2.1e6 / 1e9:.3g}B",
            f"time_per_iteration_ms: {log.near(1.9):.3g}K",
            f"tokens_per_sec: {log.near(1.1):.3g}M",
            f"tokens_per_sec_per_gpu: {log.near(17.2):.3g}K",
            "global_batch_size: 2.1M",
            f"grad_norm: {log.near(0.31):.3g}",
            f"lm_loss: {loss:.3g}",
            f"lr: {log.near(0.00028):.3g}",
            f"model_tflops_per_gpu: {log.near(398):.3g}",
            f"eta: {render_span((total - step) * 1.9)}",
        ]
        log.out(f"{log.clock('%m/%d/%Y %H:%M:%S')} {head}: {' | '.join(parts)}")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("NVIDIA/Megatron-LM", "megatron/training/training.py", "' iteration {:8d}/{:8d} |'")
def megatron_lm(log: Log) -> Truth:
    """Energy, MoE and multi-token prediction; two losses, and an evaluation between."""
    total, first, last = 500000, 142010, log.pick(142300, 142900, 10)
    log.out("setting number of microbatches to constant 16", 7)
    loss = val = 0.0
    for step in log.steps(last, 10, first, 2.4):
        loss = log.loss(step / total, 6)
        took_ms = log.near(2400.0)
        log.out(
            f" [{log.clock('%Y-%m-%d %H:%M:%S.%f')}] iteration {step:8d}/{total:8d} |"
            f" consumed samples: {step * 1024:12d} | elapsed time per iteration (ms): "
            f"{took_ms:.1f} | throughput per GPU (TFLOP/s/GPU): {log.near(410):.1f} |"
            f" energy per GPU (J/iter/GPU): {log.near(1480):.1f} |"
            f" power per GPU (W/GPU): {log.near(612):.1f} | learning rate: {2.1e-4:.6E} |"
            f" global batch size: {1024:5d} | lm loss: {loss:.6E} |"
            f" mtp_1 loss: {loss * 1.1:.6E} | load_balancing_loss: {log.near(1.02):.6E} |"
            f" loss scale: 1.0 | grad norm: {log.near(0.21):.3f} |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |",
            7,
        )
        if step % 200 == 0:
            log.out("Evaluating on 32768 samples", 7)
            for batch in range(1, 33, 8):
                log.out(f"Evaluating iter {batch}/32", 7)
            val = log.loss(step / total, 6)
            text = f" validation loss at iteration {step} | lm loss value: {val:.6E} | "
            text += f"lm loss PPL: {val * 7:.6E} | "
            log.out("(min, max) time across ranks (ms):", 7)
            log.out("    evaluate .......................................: (21403.1, 21410.6)", 7)
            log.out("-" * len(text), 7)
            log.out(text, 7)
            log.out("-" * len(text), 7)
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,) if val else ())


@program("deepspeedai/Megatron-DeepSpeed", "megatron/training.py", "actual seqlen: {:5d} |")
def megatron_deepspeed(log: Log) -> Truth:
    """Two reports of a step, DeepSpeed's and Megatron's, by two ranks."""
    total, last = 20000, log.pick(900, 1700, 10)
    loss = 0.0
    for step in log.steps(last, 10, 10, 0.9):
        loss = log.loss(step / total, 6)
        log.out(
            f"steps: {step} loss: {loss:0.4f} iter time (s): {log.near(0.9):0.3f} "
            f"samples/sec: {log.near(284):0.3f}",
            0,
        )
        log.out(
            f" iteration {step:8d}/{total:8d} | consumed samples: {step * 256:12d} |"
            f" consumed tokens: {step * 256 * 2048:12d} |"
            f" elapsed time per iteration (ms): {log.near(900):.1f} | learning rate: 1.200E-04 |"
            f" global batch size: {256:5d} | lm loss: {loss:.6E} | loss scale: 65536.0 |"
            f" grad norm: {log.near(1.2):.3f} | actual seqlen: {2048:5d} |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
            f" samples per second: {log.near(284):.3f} |"
            f" tokens per gpu per second (tgs): {log.near(18000):.3f} | TFLOPs: 121.30 |",
            3,
        )
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program("deepspeedai/DeepSpeedExamples",
         "applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py",
         "Rank: {torch.distributed.get_rank()}, loss =")  # fmt: skip
def deepspeed_chat(log: Log) -> Truth:
    """Micro-batches of an epoch from 0, by all four ranks; evaluations in capitals between."""
    num_epochs, batches = 3, 160
    stop = batches + log.pick(40, 120)
    log.out("***** Running training *****")
    log.out(f"***** Evaluating perplexity, Epoch 0/{num_epochs} *****")
    val = log.loss(0.0, 6)
    log.out(f"ppl: {val * 30:.6f}, loss: {val:.6f}")
    done, losses = -1, [0.0] * 4
    for step in log.steps(stop, 1, 0, 0.7):
        epoch, batch = divmod(step, batches)
        if batch == 0:
            if epoch:
                log.out(f"***** Evaluating perplexity, Epoch {epoch}/{num_epochs} *****")
                log.wait(9.0)
                val = log.loss(step / 480, 6)
                log.out(f"ppl: {val * 30:.6f}, loss: {val:.6f}")
            log.out(f"Beginning of Epoch {epoch + 1}/{num_epochs}, Total Micro Batches {batches}")
        for rank in range(4):
            losses[rank] = log.loss(step / 480, 6)
            log.out(f"Epoch: {epoch}, Step: {batch}, Rank: {rank}, loss = {losses[rank]}", rank)
        log.out(
            f"Model Parameters: 1.316 B, Latency: {log.near(0.7):.2f}s, "
            f"TFLOPs: {log.near(88):.2f}, Samples/sec: {log.near(22):.2f}, Time/seq 0.04s, "
            "Batch Size: 16, Sequence Length: 512"
        )
        done = step
    return Truth(
        steps=(done, done + 1),
        totals=(num_epochs * batches,),
        losses=tuple(losses),
        val_losses=(val,),
        num_epochs=num_epochs,
    )


@program("karpathy/minGPT", "projects/chargpt/chargpt.py", "iter {trainer.iter_num}: train loss")
def mingpt(log: Log) -> Truth:
    """The time of the iteration stands before its number; samples of text between."""
    last = log.pick(900, 1900, 10)
    log.out("number of parameters: 0.09M")
    log.out("running on device cuda")
    loss = 0.0
    for step in log.steps(last, 10, 0, 0.05):
        loss = log.loss(step / 5000, 5)
        log.out(f"iter_dt {log.near(48.1):.2f}ms; iter {step}: train loss {loss:.5f}")
        if step % 500 == 0:
            log.out(
                "O God, O God! the king 4 of 3 loses his 12 men,\nAnd step 7 paces: loss 3 more."
            )
            log.out("saving model")
    return Truth(steps=(last, last + 1), losses=(loss,))


@program("karpathy/makemore", "makemore.py", "step {step} | loss {loss.item():.4f}")
def makemore(log: Log) -> Truth:
    """A step every ten; losses of an evaluation every 500, and words that were made up."""
    last = log.pick(2100, 2900, 10)
    log.out("number of examples in the dataset: 32033")
    log.out("split up the dataset into 31033 training examples and 1000 test examples")
    log.out("model #params: 204544")
    loss = val = best = 0.0
    for step in log.steps(last, 10, 0, 0.02):
        loss = log.loss(step / 9000)
        log.out(f"step {step} | loss {loss:.4f} | step time {log.near(21.0):.2f}ms")
        if step and step % 500 == 0:
            val = log.loss(step / 9000, 6)
            log.out(f"step {step} train loss: {log.loss(step / 9000, 6)} test loss: {val}")
            if not best or val < best:
                best = val
                log.out(f"test loss {val} is the best so far, saving model to out/model.pt")
        if step and step % 200 == 0:
            log.out("-" * 80 + "\n3 samples that are in train:\nanna\nkolya\nmira\n" + "-" * 80)
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,))


@program("ml-explore/mlx-examples", "lora/lora.py", "Iter {it + 1}: Train loss")
def mlx_lm(log: Log) -> Truth:
    """Both losses are told with `Iter`; the first line is a validation."""
    last = log.pick(230, 490, 10)
    log.out("Total parameters 7243.436M\nTrainable parameters 1.704M")
    log.out("Loading datasets\nTraining")
    loss = val = 0.0
    for step in log.steps(last, 1, 1, 0.8):
        if step == 1 or step % 100 == 0:
            val = log.loss(step / 1000, 3)
            log.out(f"Iter {step}: Val loss {val:.3f}, Val took {log.near(9.0):.3f}s")
            log.wait(9.0)
        if step % 10 == 0:
            loss = log.loss(step / 1000, 3)
            log.out(
                f"Iter {step}: Train loss {loss:.3f}, It/sec {log.near(1.25):.3f}, "
                f"Tokens/sec {log.near(420):.3f}"
            )
        if step % 100 == 0:
            log.out(f"Iter {step}: Saved adapter weights to adapters.npz.")
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("allenai/OLMo-core", "src/olmo_core/train/callbacks/console_logger.py",
         "[step={step}/{self.trainer.max_steps or '???'},epoch=")  # fmt: skip
def olmo_core(log: Log) -> Truth:
    """The step stands in a line of its own, the figures below it, over several lines."""
    total, last = 21000, log.pick(1450, 1900, 10)

    def head(line: int) -> str:
        return f"{log.stamp()}\tnode-0:0\tolmo_core.train.callbacks.console_logger:{line}\tINFO\t"

    loss = 0.0
    log.out(
        f"{log.stamp()}\tnode-0:0\tolmo_core.train.trainer:712\tINFO\tTraining for 21,000 steps"
    )
    for step in log.steps(last, 1, 1301, 1.2):
        if step % 10:
            log.out(f"{head(61)}[step={step}/{total},epoch=1]")
            continue
        loss = log.loss(step / total, 3)
        log.out(
            f"{head(69)}[step={step}/{total},epoch=1,eta=0:06:11]\n"
            f"    optim/total grad norm={log.near(0.4):.4f}\n"
            f"    train/CE loss={loss:.3f}\n"
            f"    train/PPL={loss * 9:,.2f}\n"
            "    throughput/total tokens=2,793,406,464\n"
            f"    throughput/device/TPS={log.near(17100):,.1f}"
        )
    return Truth(steps=(last,), totals=(total,), losses=(loss,), num_epochs=None)


@program("pytorch/torchtune", "recipes/lora_finetune_single_device.py",
         "{curr_epoch + 1}|{self.global_step}|Loss: {loss_to_log}")  # fmt: skip
def torchtune(log: Log) -> Truth:
    """A bar an epoch, whose name has epoch, step and the whole float of the loss."""
    batches = log.pick(120, 200)
    last = batches + log.pick(30, 90)
    log.err("INFO:torchtune.utils._logging:Running LoRAFinetuneRecipeSingleDevice with resolved")
    log.err("INFO:torchtune.utils._logging: Learning rate scheduler is initialized.")
    loss = 0.0
    for step in log.steps(last, 1, 1, 1.3):
        epoch, done = divmod(step - 1, batches)
        loss = log.loss(step / 600, 16)
        name = f"{epoch + 1}|{step}|Loss: {loss}"
        log.bar(render_tqdm(done + 1, batches, (done + 1) * 1.3, name))
        if done + 1 == batches:
            log.err()
            log.err("INFO:torchtune.utils._logging:Starting checkpoint save...")
            log.wait(7.0)
            log.err("INFO:torchtune.utils._logging:Checkpoint saved in 6.91 seconds.")
    return Truth(steps=(last,), totals=(None,), losses=(loss,))


@program("kimiyoung/transformer-xl", "pytorch/train.py", "'| epoch {:3d} step {:>8d} |")
def transformer_xl(log: Log) -> Truth:
    """Step and batch of the epoch side by side; an evaluation by its own count at the same step."""
    last = log.pick(5200, 7800, 200)
    log.out("=" * 100 + "\n#params = 151107538\n#non emb params = 41066400\n" + "=" * 100)
    loss = val = 0.0
    for step in log.steps(last, 200, 200, 0.08):
        loss = log.loss(step / 20000, 2)
        log.out(
            f"| epoch {1 + step // 4000:3d} step {step:>8d} | {step % 4000:>6d} batches | "
            f"lr 0.00025 | ms/batch {log.near(81.2):5.2f} | loss {loss:5.2f} | "
            f"ppl {loss * 40:9.3f}"
        )
        if step % 4000 == 0:
            val = log.loss(step / 20000, 2)
            log.out("-" * 100)
            log.out(
                f"| Eval {step // 4000:3d} at step {step:>8d} | time: {log.near(340):5.2f}s | "
                f"valid loss {val:5.2f} | valid ppl {val * 40:9.3f}"
            )
            log.out("-" * 100)
    return Truth(steps=(last,), losses=(loss,), val_losses=(val,))


@program("google-research/bert", "run_pretraining.py", "tf.estimator: loss = %s, step = %s")
def bert_tensorflow(log: Log) -> Truth:
    """TensorFlow's estimator: two lines for a step, a checkpoint and an evaluation between."""
    last = log.pick(5100, 5900, 100)

    def say(text: str) -> None:
        log.err(f"I0302 {log.clock('%H:%M:%S.%f')} 140215 {text}")

    say("run_pretraining.py:459] ***** Running training *****")
    say("run_pretraining.py:460]   Batch size = 32")
    loss = 0.0
    for step in log.steps(last, 100, 4000, 0.25):
        loss = log.loss(step / 20000, 6)
        if step == 4000:
            say(f"basic_session_run_hooks.py:262] loss = {loss}, step = {step}")
        else:
            say(f"basic_session_run_hooks.py:692] global_step/sec: {log.near(4.0):.5f}")
            say(
                f"basic_session_run_hooks.py:260] loss = {loss}, step = {step} "
                f"({log.near(25.0):.3f} sec)"
            )
        if step % 1000 == 0:
            say(f"basic_session_run_hooks.py:606] Saving checkpoints for {step} into model.ckpt.")
    return Truth(steps=(last,), losses=(loss,))


@program("huggingface/peft", "examples/beft_finetuning/beft_finetuning.py",
         "{epoch=}: {train_ppl=} {train_epoch_loss=}")  # fmt: skip
def peft_example(log: Log) -> Truth:
    """Bars without a name for training and evaluation in turn; losses once an epoch, as tensors."""
    num_epochs, batches, evals = 5, 210, 40
    stop = 2 * batches + log.pick(60, 150)
    loss = val = 0.0
    for step in log.steps(stop, 1, 1, 0.6):
        epoch, done = divmod(step - 1, batches)
        done += 1
        log.bar(render_tqdm(done, batches, done * 0.6))
        if done < batches:
            continue
        log.err()
        for at in range(1, evals + 1):
            log.bar(render_tqdm(at, evals, at * 0.3))
            log.wait(0.3)
        log.err()
        loss, val = log.loss(step / 1000), log.loss(step / 1000)
        log.out(
            f"epoch={epoch}: train_ppl=tensor({loss * 3:.4f}, device='cuda:0') "
            f"train_epoch_loss=tensor({loss:.4f}, device='cuda:0') "
            f"eval_ppl=tensor({val * 3:.4f}, device='cuda:0') "
            f"eval_epoch_loss=tensor({val:.4f}, device='cuda:0')"
        )
    return Truth(
        steps=(stop,), totals=(None, num_epochs * batches), losses=(loss,), val_losses=(val,)
    )


def _say_absl(log: Log, where: str, text: str) -> None:
    log.err(f"I0302 {log.clock('%H:%M:%S.%f')} 140215817963328 {where}] {text}")


@program("google-research/t5x", "t5x/train.py", "'Epoch %d of %d'")
def t5x(log: Log) -> Truth:
    """Metrics of a step in brackets, of training and of evaluation; epochs that are no epochs."""
    first, total, every = 2000, 20000, 1000
    last = every * log.pick(9, 14)
    _say_absl(log, "train.py:607", f"Starting main loop over steps {first}-{total}")
    _say_absl(log, "train.py:614", f'Training with artificial "epochs" of {every} steps.')
    loss = val = 0.0
    for step in log.steps(last, every, first + every, 0.05):
        epoch = step // every - 1
        _say_absl(log, "train.py:668", f"Epoch {epoch} of {total // every}")
        _say_absl(log, "train.py:674", "BEGIN Train loop.")
        _say_absl(log, "train.py:679", f"Training for {every} steps.")
        loss, val = log.loss(step / total, 5), log.loss(step / total, 5)
        _say_absl(
            log,
            "logging_writer.py:48",
            f"[{step}] collection=train accuracy=0.{log.pick(300, 700)}, cross_ent_loss={loss}, "
            f"learning_rate=0.01, loss={loss}, timing/steps_per_second={log.near(3.1):.5g}, "
            "z_loss=0.00121",
        )
        _say_absl(log, "train.py:747", "END Train loop.")
        _say_absl(log, "train.py:508", "Computing training evaluation metrics.")
        _say_absl(log, "trainer.py:612", "Evaluating: c4_validation.")
        _say_absl(
            log,
            "logging_writer.py:48",
            f"[{step}] collection=training_eval/c4 accuracy=0.{log.pick(300, 700)}, "
            f"cross_ent_loss={val}, loss={val}",
        )
    return Truth(steps=(last,), totals=(total, None), losses=(loss,), val_losses=(val,))


@program("google/flax", "examples/lm1b/train.py", "report_progress, writer.write_scalars")
def flax_lm1b(log: Log) -> Truth:
    """The step in brackets with sorted figures; beside it a note of per cent and steps."""
    total, last = 30000, log.pick(4000, 9000, 500)
    _say_absl(log, "train.py:524", "Starting training loop.")
    loss = val = 0.0
    for step in log.steps(last, 500, 500, 0.1):
        loss = log.loss(step / total, 5)
        pace = log.near(9.7)
        _say_absl(
            log,
            "local.py:50",
            f"Setting work unit notes: {pace:.1f} steps/s, {100 * step / total:.1f}% "
            f"({step}/{total}), ETA: {int((total - step) / pace / 60)}m",
        )
        _say_absl(log, "logging_writer.py:48", f"[{step}] steps_per_sec={pace:.6g}")
        _say_absl(log, "train.py:556", "Gathering training metrics.")
        _say_absl(
            log,
            "logging_writer.py:48",
            f"[{step}] train_accuracy=0.{log.pick(200, 400)}, train_learning_rate=0.00112, "
            f"train_loss={loss}, train_perplexity={loss * 12:.6g}",
        )
        if step % 1000 == 0:
            val = log.loss(step / total, 5)
            _say_absl(log, "train.py:291", "Gathering evaluation metrics.")
            _say_absl(
                log,
                "logging_writer.py:48",
                f"[{step}] eval_accuracy=0.{log.pick(200, 400)}, eval_loss={val}, "
                f"eval_perplexity={val * 12:.6g}",
            )
            _say_absl(log, "train.py:322", "Generating text.")
            _say_absl(log, "train.py:606", f"Saving checkpoint step {step}.")
    return Truth(steps=(last,), totals=(total, None), losses=(loss,), val_losses=(val,))


@program("karpathy/nanochat", "scripts/base_train.py", "step {step:05d}/{num_iterations:05d}")
def nanochat(log: Log) -> Truth:
    """Steps with leading zeros from 0; bits per byte of a validation at the same step."""
    total, last = 21400, log.pick(520, 990)
    loss = 0.0
    for step in log.steps(last, 1, 250, 0.4):
        if step % 250 == 0:
            log.out(f"Step {step:05d} | Validation bpb: {log.near(1.1):.6f}")
            log.wait(9.0)
        loss = log.loss(step / total, 6)
        left = f" | eta: {(total - step) * 0.4 / 60:.1f}m"
        log.out(
            f"step {step:05d}/{total:05d} ({100 * step / total:.2f}%) | loss: {loss:.6f} | "
            f"lrm: 1.00 | dt: {log.near(402):.2f}ms | tok/sec: {log.pick(1200000, 1310000):,} | "
            f"bf16_mfu: {log.near(48):.2f} | epoch: 1 pq: 4 rg: {step % 50} | "
            f"total time: {step * 0.4 / 60:.2f}m{left}"
        )
    return Truth(steps=(last, last + 1), totals=(total,), losses=(loss,))


@program("pytorch/torchtitan", "torchtitan/components/metrics.py", "step: {step:2}")
def torchtitan(log: Log) -> Truth:
    """Colours within the line, a validation that has a step and a loss, the total at the start."""
    total, last = 10000, log.pick(1210, 1990, 10)
    red, green, rest = "\x1b[31m", "\x1b[32m", "\x1b[39m"
    loss = val = 0.0

    def say(text: str) -> None:
        log.err(f"[titan] {log.stamp()} - root - INFO - {text}")

    say(
        "Trainer is initialized with local batch size 8, global batch size 64, gradient "
        f"accumulation steps 1, sequence length 8192, total steps {total} (warmup 200)"
    )
    say("Training starts at step 1001")
    for step in log.steps(last, 10, 1010, 1.1):
        loss = log.loss(step / total, 5)
        say(
            f"{red}step: {step:2}  {green}loss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm: "
            f"{log.near(0.9):7.4f}  \x1b[38;2;54;234;195mmemory: 61.22GiB(77.31%)  "
            f"\x1b[34mtps: {log.pick(7000, 7400):,}  \x1b[36mtflops: {log.near(401):,.2f}  "
            f"\x1b[35mmfu: {log.near(40.0):.2f}%{rest}"
        )
        if step % 200 == 0:
            val = log.loss(step / total)
            say(
                f"\x1b[33mvalidate step: {step:2}  {green}loss: {val:7.4f}  "
                f"\x1b[38;2;54;234;195mmemory: 61.22GiB(77.31%)  \x1b[34mtps: 8,412{rest}"
            )
    return Truth(
        steps=(last,),
        totals=(total, None),
        losses=(loss,),
        val_losses=(val,) if val else (),
    )


@program("NVIDIA/NeMo", "nemo/lightning/pytorch/callbacks/progress_printer.py",
         "iteration {n-1}/{self.total-1}")  # fmt: skip
def nemo(log: Log) -> Truth:
    """Iterations from 0 to the last one's number, a global step beside; validation counts too."""
    total, last = 30000, log.pick(1300, 1990, 10) - 1
    loss = 0.0
    for step in log.steps(last, 10, 1009, 1.3):
        loss = log.loss(step / total, 3)
        log.out(
            f"Training epoch 0, iteration {step}/{total - 1} | lr: 0.0002891 | "
            f"global_batch_size: 512 | global_step: {step} | max_memory_reserved: 71231143936 | "
            f"max_memory_allocated: 65120448512 | reduced_train_loss: {loss:.4} | "
            f"train_step_timing in s: {log.near(1.3):.4} | consumed_samples: {(step + 1) * 512}"
        )
        if step % 500 == 499:
            for at in range(1, 33):
                log.out(f"Validation: iteration {at}/32")
                log.wait(0.5)
    return Truth(steps=(last, last + 1), totals=(total, total - 1), losses=(loss,))


@program(
    "allenai/OLMo", "olmo/train.py", "[step={self.global_step}/{self.max_steps},epoch={epoch}]"
)
def olmo(log: Log) -> Truth:
    """The step in brackets above its figures; evaluations have steps of their own."""
    total, last = 739328, log.pick(1310, 2200, 10)
    loss = val = 0.0

    def head(line: int) -> str:
        return f"{log.clock('%Y-%m-%d %H:%M:%S.%f')[:-3]}\tnode-1:0\tolmo.train:{line}\tINFO\t"

    for step in log.steps(last, 10, 1010, 1.4):
        loss = log.loss(step / 9000, 3)
        log.out(
            f"{head(976)}[step={step}/{total},epoch=0]\n"
            f"    optim/total_grad_norm={log.near(0.5):.4f}\n"
            f"    train/CrossEntropyLoss={loss:.3f}\n"
            f"    train/Perplexity={loss * 90:.1f}\n"
            "    throughput/total_tokens=5,368,709,120\n"
            f"    throughput/device/tokens_per_second={log.pick(9000, 9900):,d}\n"
            f"    throughput/device/batches_per_second={log.near(0.7):.4f}"
        )
        if step % 500 == 0:
            log.out(f"{head(1030)}Running evaluation for 'c4_en-validation'...")
            for at in range(10, 81, 10):
                log.out(f"{head(1042)}[eval_step={at}/80]")
                log.wait(1.0)
            val = log.loss(step / 9000, 3)
            log.out(
                f"{head(976)}c4_en-validation\n    eval/c4_en-validation/CrossEntropyLoss={val:.3f}"
            )
    return Truth(steps=(last,), totals=(total,), losses=(loss,), val_losses=(val,) if val else ())


@program("stanford-crfm/levanter", "src/levanter/callbacks/_metrics.py", "pbar_logger")
def levanter(log: Log) -> Truth:
    """tqdm's figures in a logger's line, thousands with a letter; `eval` in the same layout."""
    total, last = 20000, log.pick(2100, 4900)
    loss, said = 0.0, 0

    def say(name: str, done: str, all_: str, more: str) -> None:
        log.err(
            f"{log.clock('%Y-%m-%dT%H:%M:%S')} - 0 - tqdm_loggable.tqdm_logging - "
            f"tqdm_logging.py:145 - INFO :: Progress on:{name} {done}it/{all_}it rate:"
            f"{log.near(3.1):.1f}it/s remaining:1:11:25 elapsed:08:22 postfix:loss={more}"
        )

    for step in log.steps(last, log.pick(60, 90), 1000, 0.33):
        loss, said = log.loss(step / total, 2), step
        say("train", f"{step / 1000:.2f}k", "20.0k", f"{loss:.3g}")
        if step % 7 == 0:
            say("eval", f"{step % 90:.1f}", "100", f"{log.loss(step / total, 2):.3g}")
    return Truth(
        steps=(said, round(said / 10) * 10, int(f"{said / 1000:.2f}".replace(".", "")) * 10),
        totals=(total,),
        losses=(loss, float(f"{loss:.3g}")),
    )


@program(
    "AI-Hypercomputer/maxtext", "src/maxtext/common/metric_logger.py", "completed step: {step}"
)
def maxtext(log: Log) -> Truth:
    """Steps from 0 with their seconds; an evaluation tells average losses."""
    last = log.pick(300, 790)
    loss = val = 0.0

    def say(text: str) -> None:
        log.err(f"I0302 {log.clock('%H:%M:%S.%f')} 140110937163584 metric_logger.py:214] {text}")

    for step in log.steps(last, 1, 0, 0.6):
        loss = log.loss(step / 1000, 3)
        say(
            f"completed step: {step}, seconds: {log.near(0.6):.3f}, "
            f"TFLOP/s/device: {log.near(171):.3f}, Tokens/s/device: {log.near(7100):.3f}, "
            f"total_weights: 65536, loss: {loss:.3f}, lm_loss: {loss:.3f}, "
            f"perplexity: {loss * 11:.3f}"
        )
        if step % 100 == 99:
            val = log.loss(step / 1000, 3)
            say(f"eval metrics after step: {step}, loss={val:.3f}, total_weights=524288")
    return Truth(steps=(last, last + 1), losses=(loss,), val_losses=(val,))


@program("facebookresearch/lingua", "apps/main/train.py", 'f"step: {train_state.step}"')
def lingua(log: Log) -> Truth:
    """A rank before a level and two times; ` - ` between, and `iter` is a time."""
    last = log.pick(1010, 2900, 10)
    loss = 0.0
    for step in log.steps(last, 10, 10, 0.4):
        loss = log.loss(step / 9000)
        head = f"0: INFO    {log.clock('%y-%m-%d %H:%M:%S.%f')} - {render_span(log.now_s)} - "
        log.err(
            f"{head}step: {step}  acc: 0  loss: {loss:>7}  grad: {log.near(0.4):.2e}  "
            f"flops: {log.near(4.1e14):.2e}  wps: {log.near(51000):.2e}  "
            f"iter: {log.near(0.4):>7.4f}  data: 0.001  lr: 3.00e-04  mem: 61%  pow: 612.103 W"
        )
        if step % 500 == 0:
            log.err(f"{head}Saving to: dump/checkpoints/{step:010d}")
            log.err(f"{head}garbage collection")
    return Truth(steps=(last,), losses=(loss,))


@program("BlinkDL/RWKV-LM", "RWKV-v5/src/trainer.py", 'self.log("Kt/s", kt_s, prog_bar=True')
def rwkv_lm(log: Log) -> Truth:
    """Lightning's older bar, resumed in a later `mini-epoch`, with a rate that says it/s too."""
    first, batches = 14, log.pick(300, 500)
    stop = first * batches + log.pick(40, 250)
    loss = 0.0
    log.out(f"########## Loading out/rwkv-{first - 1}.pth... ##########")
    for step in log.steps(stop, 1, first * batches + 1, 0.8):
        done = step - first * batches
        loss = log.loss(step / 20000, 3)
        more = f"loss={loss:.3f}, lr=0.0006, REAL it/s={log.near(1.2):.3f}, Kt/s=61.200"
        log.bar(render_tqdm(done, batches, done * 0.8, f"Epoch {first}", more=more, inverts=False))
    return Truth(steps=(stop,), losses=(loss,))


@program("karpathy/micrograd", "demo.ipynb", "step {k} loss {total_loss.data}, accuracy")
def micrograd(log: Log) -> Truth:
    """Steps from 0 with a whole float."""
    last = log.pick(30, 99)
    loss = 0.0
    for step in log.steps(last, 1, 0, 1.5):
        loss = log.loss(step / 100, 15)
        log.out(f"step {step} loss {loss}, accuracy {log.near(80):.1f}%")
    return Truth(steps=(last, last + 1), losses=(loss,))


def _write_batches(log: Log, more: str) -> Truth:
    """Lines of pytorch's language models: batches of an epoch between bars."""
    batches = log.pick(1100, 1500)
    stop = 2 * batches + 200 * log.pick(1, 4)
    loss = val = 0.0
    done = 0
    for step in log.steps(stop, 1, 0, 0.05):
        epoch, at = step // batches + 1, step % batches
        if at % 200 == 0 and at:
            done, loss = step, log.loss(step / 9000, 2)
            log.out(
                f"| epoch {epoch:3d} | {at:5d}/{batches:5d} batches | lr 20.00 | ms/batch "
                f"{log.near(51):5.2f} | loss {loss:5.2f} | ppl {loss * 40:8.2f}{more}"
            )
        if at == batches - 1:
            val = log.loss(step / 9000, 2)
            log.out("-" * 89)
            log.out(
                f"| end of epoch {epoch:3d} | time: {batches * 0.05:5.2f}s | valid loss {val:5.2f}"
                f" | valid ppl {val * 40:8.2f}"
            )
            log.out("-" * 89)
    return Truth(steps=(done, done + 1), losses=(loss,), val_losses=(val,))


@program("salesforce/awd-lstm-lm", "main.py", "'| epoch {:3d} | {:5d}/{:5d} batches | lr")
def awd_lstm(log: Log) -> Truth:
    """Bits per character at the end of each line."""
    return _write_batches(log, " | bpc    7.387")


@program("pytorch/examples", "word_language_model/main.py", "'| epoch {:3d} | {:5d}/{:5d} batches")
def word_language_model(log: Log) -> Truth:
    """Batches of an epoch; the end of an epoch has a loss of validation."""
    return _write_batches(log, "")


@program("huggingface/trl", "trl/trainer/grpo_trainer.py", "GRPOTrainer.log")
def trl_grpo(log: Log) -> Truth:
    """Hugging Face's bar and dictionary with rewards and many more; samples in tables between."""
    total, last = 1200, log.pick(210, 590, 10)
    loss = 0.0
    for step in log.steps(last, 1, 1, 6.0):
        log.bar(render_tqdm(step, total, step * 6.0))
        if step % 10 == 0:
            loss = round(log.loss(step / total) / 90, 4)
            figures = {
                "loss": f"{loss:.4g}",
                "grad_norm": f"{log.near(0.2):.4g}",
                "learning_rate": "9.5e-07",
                "num_tokens": f"{step * 40000}",
                "completions/mean_length": f"{log.near(210):.4g}",
                "completions/clipped_ratio": "0.0312",
                "rewards/accuracy_reward/mean": f"{log.near(0.4):.4g}",
                "reward": f"{log.near(0.6):.4g}",
                "kl": "0.0012",
                "step_time": f"{log.near(6.0):.4g}",
                "epoch": f"{step / 600:.4g}",
            }
            log.bar(" " * 60)
            log.out(str(figures))
            log.out(
                "╭──────────── Step "
                + str(step)
                + " ────────────╮\n│ Prompt   Completion   Reward │"
            )
    return Truth(steps=(last,), totals=(total,), losses=(loss,))


@program(
    "OpenRLHF/OpenRLHF", "openrlhf/trainer/sft_trainer.py", 'desc="Train step of epoch %d" % epoch'
)
def openrlhf(log: Log) -> Truth:
    """A bar of epochs above a bar of steps that has the epoch in its name; one of evaluation."""
    num_epochs, batches = 4, log.pick(150, 240)
    stop = 2 * batches + log.pick(30, 120)
    loss = val = 0.0
    log.bar(render_tqdm(0, num_epochs, 0.0, "Train epoch"))
    for step in log.steps(stop, 1, 1, 1.1):
        epoch, done = (step - 1) // batches, (step - 1) % batches + 1
        loss = log.loss(step / 900, 4)
        more = f"gpt_loss={loss:.4f}, lr=9e-6, grad_norm={log.near(1.1):.4f}"
        log.lower_bar(
            render_tqdm(done, batches, done * 1.1, f"Train step of epoch {epoch}", more=more)
        )
        if done == batches:
            for at in range(1, 21):
                val = log.loss(step / 900, 4)
                more = f"eval gpt_loss={val:.4f}"
                log.lower_bar(
                    render_tqdm(at, 20, at * 0.5, f"Eval stage of steps {step}", more=more)
                )
                log.wait(0.5)
            log.err()
            took_s = step * 1.1
            log.bar(render_tqdm(epoch + 1, num_epochs, took_s, "Train epoch"))
    return Truth(
        steps=(stop,),
        totals=(num_epochs * batches, None),
        also=(Count((2, 3), (num_epochs,)),),
        losses=(loss,),
        val_losses=(val,),
    )


@program("volcengine/verl", "verl/utils/logger/aggregate_logger.py", "concat_dict_to_str")
def verl(log: Log) -> Truth:
    """Ray's coloured head, figures between dashes, and a bar of the whole training."""
    total, last = 435, log.pick(60, 190)
    loss = 0.0
    head = "\x1b[36m(TaskRunner pid=4112)\x1b[0m "
    log.err(f"{head}Size of train dataloader: 145, Size of val dataloader: 1")
    log.err(f"{head}Total training steps: {total}")
    for step in log.steps(last, 1, 1, 30.0):
        loss = round(log.loss(step / total) / 90, 6)
        log.out(
            f"{head}step:{step} - global_seqlen/min:21034 - global_seqlen/mean:22011.5 - "
            f"actor/entropy:{log.near(0.4):.12f} - actor/pg_loss:{loss} - "
            f"actor/grad_norm:{log.near(0.2):.9f} - actor/lr:1e-06 - training/global_step:{step} - "
            f"training/epoch:{step // 145} - critic/score/mean:{log.near(0.6):.10f} - "
            f"response_length/mean:{log.near(210):.6f} - timing_s/step:{log.near(30.0):.9f} - "
            f"perf/throughput:{log.near(2100):.9f}"
        )
        log.err(f"{head}{render_tqdm(step, total, step * 30.0, 'Training Progress')}")
    return Truth(steps=(last,), totals=(total,), losses=(loss,))
