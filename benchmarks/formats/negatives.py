"""Logs of programs that train nothing: numbers grow in them, and none is a step of a training."""

from __future__ import annotations

from benchmarks.formats.log import Log, render_span, render_tqdm
from benchmarks.formats.model import no_training


@no_training
def apt_install(log: Log) -> None:
    """Packages that are fetched and unpacked, with a percentage in between."""
    for at in range(1, 41):
        log.out(
            f"Get:{at} mirror bookworm/main amd64 libfoo{at} amd64 1.{at}-2 [{log.pick(9, 900)} kB]"
        )
        log.wait(0.2)
    log.out("Fetched 41.2 MB in 8s (5,150 kB/s)")
    for at in range(1, 41):
        log.out(f"Preparing to unpack .../{at:02d}-libfoo{at}_1.{at}-2_amd64.deb ...")
        log.out(f"Progress: [{at * 100 // 40:3d}%]")
        log.wait(0.3)


@no_training
def benchmark_table(log: Log) -> None:
    """Throughput of matrix products by size, with iterations and times."""
    log.out("size    iters   warmup   time_ms   tflops   loss_of_peak")
    for size in range(256, 8193, 256):
        log.out(
            f"{size:<8d}{100:<8d}{10:<9d}{log.near(size / 300):<10.3f}{log.near(410):<9.1f}0.41"
        )
        log.wait(1.0)


@no_training
def checkpoint_shards(log: Log) -> None:
    """Shards of a model that are loaded, a bar each for two models."""
    for count in (30, 4):
        for done in range(count + 1):
            log.bar(render_tqdm(done, count, done * 2.0, "Loading checkpoint shards"))
            log.wait(2.0)
        log.err()
    log.out("All model checkpoint weights were used when initializing LlamaForCausalLM.")


@no_training
def cmake_make(log: Log) -> None:
    """Percentages in brackets before files."""
    for at in range(0, 101):
        log.out(f"[{at:3d}%] Building CXX object src/CMakeFiles/core.dir/batch_{at}.cpp.o")
        log.wait(0.8)
    log.out("[100%] Linking CXX shared library libcore.so\n[100%] Built target core")


@no_training
def conda_install(log: Log) -> None:
    """Several downloads at once, each with its own share."""
    log.out("Collecting package metadata (current_repodata.json): done\nSolving environment: done")
    for at in range(1, 30):
        log.out(
            f"pytorch-2.{at}      | {at * 40.1:7.1f} MB | {'#' * at:<30} | {at * 100 // 30:3d}%"
        )
        log.wait(0.5)
    log.out("Preparing transaction: done\nVerifying transaction: done\nExecuting transaction: done")


@no_training
def curl_download(log: Log) -> None:
    """curl's meter: a table that is drawn over one line."""
    log.err("  % Total    % Received % Xferd  Average Speed   Time    Time     Time  Current")
    log.err("                                 Dload  Upload   Total   Spent    Left  Speed")
    for at in range(0, 101):
        log.bar(
            f"{at:3d} 8123M  {at:3d} {at * 81}M    0     0  81.2M      0 "
            f" 0:01:40  0:01:{at % 60:02d}"
        )
        log.wait(1.0)


@no_training
def dataset_map(log: Log) -> None:
    """Bars of examples, on eight processes, twice: tokenizing and grouping."""
    for name in ("Running tokenizer on dataset (num_proc=8)", "Grouping texts in chunks of 1024"):
        total = log.pick(90000, 240000, 1000)
        for done in range(0, total + 1, 1000):
            log.bar(render_tqdm(done, total, done / 3100, name, " examples"))
            log.wait(0.32)
        log.err()


@no_training
def diffusers_inference(log: Log) -> None:
    """A bar without a name for each picture that is made."""
    for picture in range(8):
        for done in range(51):
            log.bar(render_tqdm(done, 50, done * 0.21))
            log.wait(0.21)
        log.err()
        log.out(f"saved out/{picture:03d}.png")


@no_training
def docker_pull(log: Log) -> None:
    """Layers and their bytes."""
    log.out("24.05-py3: Pulling from nvidia/pytorch")
    for at in range(1, 61):
        log.out(f"a{at % 7}c41b0f{at % 7}: Downloading [{'=' * (at // 2)}>] {at * 7}MB/420MB")
        log.wait(0.7)
    log.out("Digest: sha256:0a1b2c\nStatus: Downloaded newer image for pytorch:24.05-py3")


@no_training
def fairseq_generate(log: Log) -> None:
    """Hypotheses with their scores, and sentences counted at the end."""
    for at in range(1, 160):
        log.out(f"S-{at}\tthe quick brown fox\nT-{at}\tder schnelle braune Fuchs")
        log.out(f"H-{at}\t{-log.near(0.4):.6f}\tder schnelle braune Fuchs")
        log.wait(0.1)
    log.err(
        "2026-03-02 09:00:16 | INFO | fairseq_cli.generate | "
        "Translated 159 sentences (4,120 tokens)"
    )


@no_training
def ffmpeg_decode(log: Log) -> None:
    """Frames, one line drawn again and again."""
    for frame in range(0, 9000, 60):
        log.bar(
            f"frame={frame:5d} fps= {log.pick(55, 62)} q=28.0 size={frame * 8:8d}kB "
            f"time=00:0{frame // 1500}:{frame // 25 % 60:02d}.04 "
            f"bitrate={log.near(1040):.1f}kbits/s speed=2.4x"
        )
        log.wait(1.0)


@no_training
def fio_disk(log: Log) -> None:
    """Jobs with a share done and rates."""
    log.out("fio-3.33\nStarting 4 processes")
    for at in range(1, 61):
        log.bar(
            f"Jobs: 4 (f=4): [w(4)][{at * 100 / 60:.1f}%][w={log.pick(900, 990)}MiB/s]"
            f"[w={log.pick(900, 990)} IOPS][eta 00m:{60 - at:02d}s]",
            "out",
        )
        log.wait(1.0)


@no_training
def git_clone(log: Log) -> None:
    """Shares of objects, with counts in parentheses."""
    log.err("Cloning into 'megatron'...")
    for name, total in (("Receiving objects", 48121), ("Resolving deltas", 31234)):
        for share in range(0, 101, 2):
            log.bar(f"{name}: {share:3d}% ({total * share // 100}/{total}), 21.3 MiB | 4.1 MiB/s")
            log.wait(0.4)
        log.err()


@no_training
def hf_download(log: Log) -> None:
    """Bars of bytes below a bar of files."""
    for file in range(1, 16):
        name = f"model-{file:05d}-of-00015.safetensors"
        for share in range(0, 101, 5):
            bar = f"{'█' * (share // 10):<10}| {share * 0.0498:.2f}G/4.98G"
            log.bar(f"{name}: {share:3d}%|{bar} [00:{share // 2:02d}<00:20, 98.1MB/s]")
            log.wait(0.5)
        log.err()
        log.bar(render_tqdm(file, 15, file * 10.5, "Fetching 15 files"))
    log.err()


@no_training
def hyperparameters(log: Log) -> None:
    """Settings of a training that has not begun, with steps, epochs and losses among them."""
    log.out("------------------------ arguments ------------------------")
    for key, value in {
        "train_iters": 500000, "lr_warmup_steps": 2000, "eval_interval": 1000, "eval_iters": 10,
        "log_interval": 100, "max_steps": 500000, "num_train_epochs": 3, "epoch": 0, "step": 0,
        "loss_scale": 65536, "initial_loss": 0.0, "global_batch_size": 1024, "save_steps": 500,
    }.items():  # fmt: skip
        log.out(f"  {key} {'.' * (45 - len(key))} {value}")
    log.out("-------------------- end of arguments ---------------------")
    log.out("setting number of micro-batches to constant 16\nresume_step: 4000\nlast_epoch: 2")
    log.out("TrainingArguments(learning_rate=5e-05, max_steps=1000, logging_steps=10, seed=42)")


@no_training
def iperf_network(log: Log) -> None:
    """Intervals of seconds with rates."""
    log.out("[ ID] Interval           Transfer     Bitrate         Retr  Cwnd")
    for at in range(60):
        log.out(
            f"[  5]  {at:2d}.00-{at + 1:2d}.00  sec  1.{log.pick(10, 16)} GBytes  "
            "9.4 Gbits/sec    0   3.1 MBytes"
        )
        log.wait(1.0)


@no_training
def lm_eval(log: Log) -> None:
    """Requests in bars, then a table of tasks with their losses and accuracies."""
    total = log.pick(4000, 9000)
    for name in ("Building contexts for hellaswag on rank 0", "Running loglikelihood requests"):
        for done in range(0, total, 23):
            log.bar(render_tqdm(done, total, done * 0.03, name if "Run" in name else ""))
            log.wait(0.69)
        log.err()
    log.out("|  Tasks  |Version|Filter|n-shot| Metric |   |Value |   |Stderr|")
    log.out("|---------|------:|------|-----:|--------|---|-----:|---|-----:|")
    for task in ("hellaswag", "piqa", "arc_easy", "wikitext"):
        log.out(f"|{task:9s}|      1|none  |     0|acc     |↑  |{log.near(0.5):.4f}|±  |0.0050|")
    log.out("|wikitext |      2|none  |     0|loss    |↓  |2.1312|±  |   N/A|")


@no_training
def ls_listing(log: Log) -> None:
    """Files of checkpoints whose names have steps and losses."""
    log.out("total 81920")
    for step in range(1000, 31000, 1000):
        name = f"step_{step}_loss_{log.loss(step / 30000):.2f}.pt"
        log.out(f"-rw-r--r-- 1 user ml 4.9G Mar  2 08:{step // 1000:02d} {name}")
    for step in range(1000, 6000, 1000):
        log.out(
            f"checkpoint-{step}  epoch={step // 1000}-step={step}-val_loss={log.loss(0.5):.2f}.ckpt"
        )


@no_training
def megatron_preprocess(log: Log) -> None:
    """Documents that were tokenized, with rates."""
    log.out("Opening corpus.jsonl\nTime to startup: 1.2410")
    for done in range(1000, 90000, 1000):
        log.err(
            f"Processed {done} documents ({log.near(2104):.4f} docs/s, {log.near(11.2):.4f} MB/s)."
        )
        log.wait(0.5)


@no_training
def model_summary(log: Log) -> None:
    """Layers with their shapes and parameters."""
    log.out("   | Name            | Type      | Params | Mode \n" + "-" * 55)
    for at in range(48):
        log.out(f"{at:<3d}| blocks.{at:<9d} | Block     | {log.pick(70, 80)}.1 M | train")
    log.out(
        "-" * 55
        + "\n1.3 B     Trainable params\n0         Non-trainable params\n5,212.110 Total size (MB)"
    )
    log.out("0         Modules in eval mode")


@no_training
def nccl_tests(log: Log) -> None:
    """Bandwidth by message size; a column of iterations would be no step either."""
    log.out(
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592 step: 2(factor) "
        "warmup iters: 5 iters: 20"
    )
    log.out("#       size         count      type   redop    root     time   algbw   busbw #wrong")
    for power in range(3, 34):
        log.out(
            f"{2**power:12d}{2 ** (power - 2) if power > 2 else 1:14d}     float     sum      -1"
            f"{log.near(2**power / 9e4 + 30):9.1f}{log.near(200):8.2f}{log.near(360):8.2f}      0"
        )
        log.wait(1.5)


@no_training
def ninja_build(log: Log) -> None:
    """Steps done and steps there are, in brackets: of a build."""
    total = log.pick(700, 1400)
    for done in range(1, total + 1):
        log.out(
            f"[{done}/{total}] /usr/local/cuda/bin/nvcc -c csrc/flash_{done}.cu -o flash_{done}.o"
        )
        log.wait(0.4)


@no_training
def nvidia_smi(log: Log) -> None:
    """A monitor's lines, one each second."""
    log.out(
        "# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk\n"
        "# Idx     W     C     C     %     %"
    )
    for _ in range(80):
        for gpu in range(2):
            power, heat, load = log.pick(60, 690), log.pick(30, 70), log.pick(0, 99)
            log.out(f"{gpu:5d}{power:6d}{heat:6d}     -{load:6d}     0     0")
        log.wait(1.0)


@no_training
def pip_install(log: Log) -> None:
    """Downloads with bars of their own kind."""
    for at in range(1, 20):
        log.out(f"Collecting package-{at}>=1.{at}")
        log.out(f"  Downloading package_{at}-1.{at}.0-py3-none-any.whl (4{at}.1 MB)")
        for share in range(0, 11):
            log.bar(
                f"     {'━' * share * 4:<40} {share * 4.1:.1f}/41.0 MB 51.2 MB/s "
                f"eta 0:00:0{share % 3}",
                "out",
            )
            log.wait(0.2)
        log.out()
    log.out("Successfully installed package-1-1.1.0 torch-2.11.0 training-step-3.0")


@no_training
def pytest_run(log: Log) -> None:
    """Percentages of tests, whose names are of training."""
    log.out("collected 412 items\n")
    for share in range(2, 101, 2):
        log.out(f"tests/test_train.py::test_loss_at_step_{share} PASSED{'':20}[{share:3d}%]")
        log.wait(0.6)
    log.out("============ 412 passed in 31.20s ============")


@no_training
def rsync_copy(log: Log) -> None:
    """Bytes, a share and the number of files."""
    for at in range(1, 90):
        log.bar(
            f"{at * 41_231_000:15,d} {at:3d}%  {log.near(98):.2f}MB/s    0:00:{at % 60:02d} "
            f"(xfr#{at}, to-chk={900 - at}/1000)",
            "out",
        )
        log.wait(1.0)


@no_training
def slurm_prolog(log: Log) -> None:
    """A batch script's words about its job, nodes and time."""
    log.out("==== prolog: job 48123 step 0 on node-1 ====")
    for at in range(1, 17):
        log.out(
            f"node-{at}: health check {at}/16 ok, 8 GPUs, ECC 0, temperature {log.pick(28, 40)} C"
        )
        log.out(f"slurmstepd: task {at}: oom_kill_step 0")
        log.wait(0.3)
    log.out(
        "srun: Job step 48123.0 created\n"
        "srun: launching StepId=48123.0 on host node-1, 8 tasks: [0-7]"
    )


@no_training
def tar_archive(log: Log) -> None:
    """Records at checkpoints of its own."""
    for record in range(1000, 40001, 1000):
        log.err(f"tar: Read checkpoint {record}")
        log.wait(1.0)


@no_training
def timm_validate(log: Log) -> None:
    """An evaluation of a whole data set, with losses; nothing is trained."""
    log.err(
        "Validating in float16. AMP not enabled.\nModel vit_base created, param count: 86567656"
    )
    for at in range(0, 391, 10):
        loss = log.loss(0.8)
        log.err(
            f"Test: [{at:4d}/391]  Time: {log.near(0.2):.3f}s ({log.near(0.2):.3f}s,  612.11/s)  "
            f"Loss: {loss:>7.4f} ({loss:>6.4f})  Acc@1: {log.near(79):>7.3f} ( 79.102)  "
            f"Acc@5: {log.near(94):>7.3f} ( 94.410)"
        )
        log.wait(2.0)
    log.err(" * Acc@1 79.122 (20.878) Acc@5 94.401 (5.599)")


@no_training
def vllm_server(log: Log) -> None:
    """Requests, rates and a cache; graphs that are captured in a bar."""
    for done in range(36):
        log.bar(render_tqdm(done, 35, done * 0.4, "Capturing CUDA graph shapes"))
        log.wait(0.4)
    log.err()
    for at in range(120):
        head = f"INFO {log.clock('%m-%d %H:%M:%S')} [loggers.py:118]"
        log.err(
            f"{head} Engine 000: Avg prompt throughput: {log.near(900):.1f} tokens/s, "
            f"Avg generation throughput: {log.near(2100):.1f} tokens/s, "
            f"Running: {log.pick(2, 9)} reqs, Waiting: 0 reqs, "
            f"GPU KV cache usage: {log.near(12):.1f}%, Prefix cache hit rate: 41.0%"
        )
        log.out(f'INFO:     10.0.0.{at % 9}:4{at:03d} - "POST /v1/completions HTTP/1.1" 200 OK')
        log.wait(10.0)
    log.err(f"INFO up for {render_span(log.now_s)}")
