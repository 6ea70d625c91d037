"""Lines as trainers print them, and lines that nobody printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.progress import (
    MARKS,
    parse_line,
    parse_progress,
    parse_time,
    split_tag,
)
from varuna_core.records.logs.training_log import PHASE_MARKS, parse_mark

MEGATRON = (
    " iteration       30/      50 | consumed samples:         1920 | elapsed time per iteration "
    "(ms): 1423.8 | learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | "
    "loss scale: 262144.0 | grad norm: 16.666 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 |"
)
TITAN = (
    "[rank0]:[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  "
    "7.2034  \x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[33mmemory:  3.10GiB(3.26%)  \x1b[34mtps: "
    "1,234  \x1b[36mtflops: 12.30  \x1b[35mmfu: 3.9%\x1b[39m"
)
NEMO = (
    "[NeMo I] Training epoch 0, iteration 9/99 | lr: 1e-05 | global_batch_size: 8 | global_step: 9 "
    "| reduced_train_loss: 11.03 | train_step_timing in s: 5.25"
)


@pytest.mark.parametrize(
    ("line", "step", "num_steps", "step_s", "loss"),
    [
        (MEGATRON, 30, 50, 1.4238, 10.17721),
        ("3:" + MEGATRON, 30, 50, 1.4238, 10.17721),
        ("{'loss': 2.3145, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.02}",
         -1, None, None, 2.3145),
        ("{'loss': '2.3145', 'grad_norm': '1.2', 'epoch': '0.02'}", -1, None, None, 2.3145),
        ("{'loss': nan, 'grad_norm': nan, 'epoch': 0.02}", -1, None, None, math.nan),
        (" 10%|█         | 10/100 [00:10<01:30,  2.00it/s]", 10, 100, 0.5, None),
        ("0:   1%|          | 10/1,000 [01:10<1:30:00,  4.20s/it]", 10, 1000, 4.2, None),
        ("  0%|          | 0/100 [00:00<?, ?it/s]", 0, 100, None, None),
        ("Epoch 2:  10%|█ | 10/100 [00:10<01:30, 2.00it/s, v_num=0, train_loss=2.30]",
         210, None, 0.5, 2.3),
        ("steps: 10 loss: 2.3401 iter time (s): 0.512 samples/sec: 31.2", 10, None, 0.512, 2.3401),
        ("[2025-01-01 00:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, "
         "lr=[0.0001], mom=[[0.9, 0.95]]", 10, None, None, None),
        (TITAN, 10, None, None, 7.2034),
        (NEMO, 9, 99, 5.25, 11.03),
        ("iteration: 10 / 100 | consumed_tokens: 1.2M | elapsed_time_per_iteration_ms: 123 | "
         "lm_loss: 10.2 | grad_norm: 1.3", 10, 100, 0.123, 10.2),
        ("step 10/100 loss 2.3", 10, 100, None, 2.3),
        ("step: 1,200/10,000 loss 2.3", 1200, 10_000, None, 2.3),
        ("iteration 12,300, loss 2.3", 12_300, None, None, 2.3),
        ("step=1_200 loss=2.3", 1200, None, None, 2.3),
        ("Step 1.2k/10k | loss 2.3", 1200, 10_000, None, 2.3),
        ("\\x1b[31mstep: 10  \\x1b[32mloss:  7.2034", 10, None, None, 7.2034),
        ("d: 1.95; g: 0.61; r1: 0.01:   1%|  | 100/8000 [00:50<01:06,  2.00it/s]",
         100, 8000, 0.5, None),
        ("Training Epoch: 1/3, step 9/90 completed (loss: 2.5):  11%|█ | 10/90 [00:05<00:40,  "
         "2.00it/s]", 100, None, 0.5, 2.5),
        ("Step 10 of 100: loss=inf", 10, 100, None, math.inf),
        ("[rank3]: step=7 loss=-1.5e-3 step_time: 250ms", 7, None, 0.25, -0.0015),
        ("iter 120: loss 2.1, time 103.4ms, mfu 12.1%", 120, None, 0.1034, 2.1),
        ("step: 12 loss: 3.4", 12, None, None, 3.4),
        ("epoch 2 batch 7/90 loss=1.9", 7, 90, None, 1.9),
        ("iteration 7 | loss: 2.5", 7, None, None, 2.5),
        ('{"step": 10, "loss": 2.3, "total_steps": 90, "step_time_s": 0.5}', 10, 90, 0.5, 2.3),
        ("step 7 {'loss': 2.5, 'lr': 0.1}", 7, None, None, 2.5),
        ("step 7/90 {'loss': 2.5, 'lr': 0.1}", 7, 90, None, 2.5),
        ('iter 7/90: {"loss": 2.5}', 7, 90, None, 2.5),
        ('step 9 {"iteration": 7, "loss": 2.5}', 7, None, None, 2.5),
        ('epoch 1 step 7/90 {"loss": 2.5}', 7, 90, None, 2.5),
        ('{"step": 3, "metrics": {"loss": 2.5, "step_time_s": 0.5}}', 3, None, 0.5, 2.5),
        ("\x1b[1m 6/24\x1b[0m \x1b[32m━━━━━\x1b[0m\x1b[37m━━━━\x1b[0m \x1b[1m0s\x1b[0m 10ms/step - "
         "loss: 1.5788\x08\x08", 6, 24, 0.01, 1.5788),
        ("10/24 [=====>........] - ETA: 1s - loss: 0.5", 10, 24, None, 0.5),
        (" iteration 3/ 9 | elapsed time per iteration (ms): 20.0", 3, 9, 0.02, None),
        ("[checkpoint_trainer.py:12] step 4 loss 2.5", 4, None, None, 2.5),
        ("INFO global_step=40 train_loss=0.5 3.5 it/s", 40, None, 1 / 3.5, 0.5),
    ],
)  # fmt: skip
def test_a_line_of_progress_is_understood(
    line: str, step: int, num_steps: int | None, step_s: float | None, loss: float | None
) -> None:
    told = parse_progress(line)
    assert told is not None
    assert (told.step, told.num_steps) == (step, num_steps)
    assert told.time_ms == (None if step_s is None else pytest.approx(1000 * step_s))
    assert told.loss == (None if loss is None else pytest.approx(loss, nan_ok=True))
    assert any(mark in line.encode() for mark in MARKS)
    assert (told.nan or 0) == int(loss is not None and math.isnan(loss))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 3: install the driver",
        "Loading checkpoint shards:  50%|█████     | 1/2 [00:01<00:01,  1.00s/it]",
        "Map: 100%|██████████| 5000/5000 [00:01<00:00, 4000.00 examples/s]",
        "model-00001.safetensors: 10%|█ | 1.2G/12G [00:10<01:30, 120MB/s]",
        "validation loss at iteration 10 | lm loss value: 2.3E+00 | lm loss PPL: 1.0E+01 |",
        "{'eval_loss': 2.3, 'eval_runtime': 12.0, 'epoch': 1.0}",
        "saving checkpoint at iteration     100 to /ckpt",
        "loss of signal on port 3",
        " 9200/50000: episode: 46, duration: 2.0s, episode steps: 200, loss: 0.5",
        "| Epoch: 1/20 (101/412) | Loss: 2.3000 | 2.1 steps/s | Step: 1k | ",
        "  4%|▍ | 20/500 [00:10<04:00,  2.00it/s, caching latents]",
        "2025-01-01 training with steps=1000 warmup=10",
        " iteration       30/",
    ],
)
def test_other_lines_are_no_progress(line: str) -> None:
    assert parse_progress(line) is None


@pytest.mark.parametrize(
    ("line", "name", "begins"),
    [
        ("saving checkpoint at iteration     100 to /ckpt in torch format", "checkpoint", True),
        ("  successfully saved checkpoint from iteration     100 to /ckpt", "checkpoint", False),
        ("  successfully saved checkpoint from iteration 100 to /c [ t 1/1, p 1/2 ]", "checkpoint",
         False),
        ("7: saving checkpoint at iteration 5", "checkpoint", True),
        ("Saving model checkpoint to out/checkpoint-500", "checkpoint", True),
        ("Model weights saved in out/checkpoint-500/model.safetensors", "checkpoint", False),
        ("[2025-01-01 00:00:00,1] [INFO] [Rank 0] [Torch] Saving ckpt/mp_rank_00.pt...",
         "checkpoint", True),
        ("Saving the checkpoint (or staging if async is enabled).", "checkpoint", True),
        ("Finished saving the checkpoint (or staging if async is enabled) in 2.3 seconds.",
         "checkpoint", False),
        ("Evaluating on 5120 samples", "evaluation", True),
        ("Evaluating iter 1/10", "evaluation", True),
        ("***** Running Evaluation *****", "evaluation", True),
        (" validation loss at iteration 10 | lm loss value: 2.3E+00 |", "evaluation", False),
        ("{'eval_loss': 2.3, 'eval_runtime': 12.0, 'epoch': 1.0}", "evaluation", False),
    ],
)  # fmt: skip
def test_checkpoints_and_evaluations_begin_and_end(line: str, name: str, begins: bool) -> None:
    assert parse_mark(line) == (name, begins)
    assert any(mark in line.encode() for mark in PHASE_MARKS)


def test_ordinary_lines_are_no_marks() -> None:
    for line in ("loading checkpoint from /ckpt", "checkpoint_every: 100", "evaluate_steps: 3"):
        assert parse_mark(line) is None


@pytest.mark.parametrize(
    ("line", "rank", "rest"),
    [
        ("12: text", 12, "text"),
        ("[rank3]: text", 3, "text"),
        ("[default0]:text", 0, "text"),
        ("text", None, "text"),
        ("10:30:00 text", None, "10:30:00 text"),
    ],
)
def test_the_tag_tells_the_rank(line: str, rank: int | None, rest: str) -> None:
    assert split_tag(line) == (rank, rest)


@pytest.mark.parametrize(
    ("line", "evaluations"),
    [
        (
            "step 60: train loss 0.95, val loss 4.29",
            {"train": {"loss": 0.95}, "val": {"loss": 4.29}},
        ),
        ("step 60: val_loss 4.2 val_acc: 0.3", {"val": {"loss": 4.2, "acc": 0.3}}),
        ("Validation loss 500:  3.731311  ", {"val": {"loss": 3.731311}}),
        (
            "Epoch: 1, Steps: 9 | Vali Loss: 2.7 Test Loss: 2.8",
            {"val": {"loss": 2.7}, "test": {"loss": 2.8}},
        ),
        ("Eval loss for global step 100: 2.31", {"eval": {"loss": 2.31}}),
        ("It: 7 loss_train: 1.95 loss_val: 2.05", {"val": {"loss": 2.05}, "train": {"loss": 1.95}}),
        (
            " eval_ppl=tensor(4.1) eval_epoch_loss=tensor(2.5)",
            {"eval": {"ppl": 4.1, "epoch_loss": 2.5}},
        ),
        (
            "[9]\ttrain-logloss:1.5\teval-logloss:1.9",
            {"eval": {"logloss": 1.9}, "train": {"logloss": 1.5}},
        ),
        ("epoch: 9 | dev-clean-loss:   20.1 | hrs: 1", {"dev": {"clean-loss": 20.1}}),
        ("Test set: Average loss: 2.5, Accuracy: 98%", {"test": {"loss": 2.5}}),
        ("Validation Epoch: 1\tTime 9.012\tLoss 2.5", {"val": {"loss": 2.5}}),
        ("iter 8 | validation perplexity 17.5", {"val": {"perplexity": 17.5}}),
        (
            "validation: eval_loss 2.5, test_acc=0.25",
            {"eval": {"loss": 2.5}, "test": {"acc": 0.25}},
        ),
        ("{'eval_loss': '4.472', 'eval_runtime': '0.02', 'epoch': '1'}", {"eval": {"loss": 4.472}}),
        ('{"step": 8, "val_loss": 2.5, "val/acc": 0.5}', {"val": {"loss": 2.5, "acc": 0.5}}),
        (" validation loss at iteration 8 | lm loss value: 2.5E+00 |", {"val": {"lm loss": 2.5}}),
    ],
)
def test_an_evaluation_is_no_step(line: str, evaluations: dict[str, dict[str, float]]) -> None:
    """nanoGPT's went into the curve: `the loss went from 0.95 to 4.29`."""
    found = parse_line(line)
    assert found is not None and found.is_evaluation and found.evaluations == evaluations
    assert parse_progress(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "Finished. best val loss = 1.75, took 3s", "Lowest validation loss 1.75 at step 40",
        "min val loss=1.75", "Best so far val_loss 1.75", "Best epoch: 3, val loss: 1.75",
        "val_best_loss: 1.75", "best loss_val: 1.75", '{"step": 40, "val/best_loss": 1.75}',
        "Finished at step 40, best train loss: 1.75",
    ],
)  # fmt: skip
def test_a_metric_reported_as_best_does_not_count(line: str) -> None:
    """`val loss was 1.75 at first and 1.75 at last`, though it had grown since."""
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "test loss 1.9 (best 1.75)", "new best test loss: 1.9", "best 1.75, test loss 1.9",
        "is_best: False, test_loss: 1.9", "step 40: best val loss 1.75, test loss 1.9",
        "in 2 min test loss 1.9", "epoch 5 (best epoch 3) test loss 1.9",
        "best model: test loss 1.9",
    ],
)  # fmt: skip
def test_a_metric_beside_the_best_one_counts(line: str) -> None:
    found = parse_line(line)
    assert found is not None and found.evaluations == {"test": {"loss": 1.9}}


def test_metrics_of_an_evaluation_stand_beside_the_loss() -> None:
    said = [
        "step 60 loss 2.5 val_loss 4.29 (train acc 0.5)",
        '{"step": 60, "loss": 2.5, "val/loss": 4.29}',
    ]
    for found in map(parse_line, said):
        assert found is not None and found.losses == {"loss": 2.5}
        assert found.evaluations == {"val": {"loss": 4.29}} and not found.is_evaluation


def test_a_bar_tells_its_epoch_and_how_many_there_are_where_it_says_so() -> None:
    bar = "  10%|█ | 10/100 [00:10<01:30, 2.00it/s, train_loss=2.30]"
    told = [parse_line(f"{name}:{bar}") for name in ("Epoch 2/5", "Epoch 2", "Training")]
    assert [(one.epoch, one.num_epochs) for one in told if one] == [(2, 5), (2, None), (None, None)]


def test_a_line_that_begins_with_a_time_tells_it() -> None:
    base = parse_time("2025-03-01 10:00:00,123 - root", 2000)
    assert base is not None
    assert parse_time("3: [2025-03-01 10:00:01] hello", 2000) == base + 1
    assert parse_time("[rank1]:[E0301 10:00:02.123 ProcessGroupNCCL.cpp:1] x", 2025) == base + 2
    assert parse_time("03/01/2025 10:00:03 - INFO", 2000) == base + 3
    assert parse_time("2025-03-01T10:00:00Z x", 2000) == 1740823200.0
    assert parse_time("2025-13-41 10:00:00", 2000) is None
    assert parse_time("at 2025-03-01 10:00:00", 2000) is None


WORDS = st.sampled_from(
    ["step", " iteration ", "loss", ": ", "=", "/", "|", "%|", "[", "]", "10", "1e999", "nan",
     "it/s", "{'loss': ", "9" * 30, "\x1b[31m", "(ms)", "elapsed time per iteration", ",", "é"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=30).map("".join)))
def test_no_line_makes_it_raise(line: str) -> None:
    parse_progress(line)
    parse_mark(line)
    parse_time(line, 2025)
    split_tag(line)
