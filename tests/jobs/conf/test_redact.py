"""Secrets in code, in lines of shell and in URLs, known by name or by shape."""

from __future__ import annotations

import shlex

import pytest

from tests.patterns import is_slow
from varuna_core.records.secrets import (
    REDACTED,
    find_secrets,
    is_secret,
    redact_code,
    redact_string,
)


@pytest.mark.parametrize(
    "line",
    [
        '+os.environ["HF_TOKEN"] = "mine"',
        '+os.environ.setdefault("WANDB_API_KEY", "mine")',
        "+d = {'api_key': 'mine', 'lr': 1}",
        '+login(token="mine")',
        "+export HF_TOKEN=mine",
        "+password: mine",
        "+curl https://me:mine@host/x",
        "+x = 'hf_mineminemineminemine'",
        "+-----BEGIN RSA PRIVATE KEY-----\n+mine\n+-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_in_code_is_hidden(line: str) -> None:
    assert "mine" not in redact_code(f" before\n{line}\n+after\n")
    assert redact_code(f" before\n{line}\n+after\n").endswith("+after\n")


def test_other_code_stays() -> None:
    text = '+lr = 3e-4\n+name = "gpt"\n+tokenizer = "bpe"\n-print(model, "loss", loss)\n'
    assert redact_code(text) == text


X = "Q7z" * 30
HEX = "9f" * 40
SHAPES = [
    f"hf_{X}",
    f"ghp_{X}",
    f"gho_{X}",
    f"github_pat_{X}",
    f"glpat-{X}",
    f"sk-ant-{X}",
    f"sk_live_{X}",
    f"xoxb-{X}",
    "AKIA" + "QZ7X" * 4,
    "ASIA" + "QZ7X" * 4,
    "AIza" + X[:35],
    f"ya29.{X}",
    f"npm_{X}",
    f"pypi-{X}",
    f"dckr_pat_{X}",
    f"dop_v1_{HEX}",
    f"dapi{HEX[:32]}",
    f"nvapi-{X}",
    f"hvs.{X}",
    f"SG.{X}.{X}",
    f"r8_{X}",
    f"123456789:AA{X}",
    f"eyJ{X}.eyJ{X}.{X}",
    f"https://hooks.slack.com/services/{X}",
    f"https://discord.com/api/webhooks/1/{X}",
    f"https://firm.webhook.office.com/webhookb2/{X}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={X}==",
    f"https://a.blob.core.windows.net/c?sv=2024&sig={X}%3D&se=2026",
    f"https://b.s3.amazonaws.com/o?X-Amz-Date=1&X-Amz-Signature={X}",
    f"postgresql://user:{X}@db/train",
    f"curl -H 'Authorization: Bearer {X}' https://e.org",
    f"curl -u me:{X} https://e.org",
    f"curl -u ':{X}' https://e.org",
    f'curl --user "{X}:" https://e.org',
    f"echo {X} | docker login -u me --password-stdin",
    f"docker login -u me -p {X} registry",
    f"sshpass -p {X} ssh host",
    f"wandb login {HEX}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{X}\n-----END OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("text", SHAPES)
def test_a_secret_is_known_by_its_shape(text: str) -> None:
    quoted = shlex.quote(text)
    for line in (text, f"run {text}", f"# see {text} here", f"URL='{text}'", f": {quoted}"):
        shown = redact_string(line)
        assert REDACTED in shown and X not in shown and HEX[:32] not in shown, shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("export HF_TOKEN=q7z", "export HF_TOKEN=<redacted>"),
        ("run --api-key=q7z -x 1", "run --api-key=<redacted> -x 1"),
        ("run --api-key q7z -x 1", "run --api-key <redacted> -x 1"),
        ("X-Api-Key: q7z", "X-Api-Key: <redacted>"),
        ("password = hunter2", "password = <redacted>"),
        ("smtp_passwd = correcthorse", "smtp_passwd = <redacted>"),
        ("password = 12345678901234  # of the lab", "password = <redacted>  # of the lab"),
        ("sshpass -p q7z ssh host", "sshpass -p <redacted> ssh host"),
        ("postgresql://user:q7z@db/train", "postgresql://<redacted>@db/train"),
    ],
)  # fmt: skip
def test_what_stands_around_a_secret_stays(text: str, shown: str) -> None:
    assert redact_string(text) == shown


HARMLESS = [
    "echo ready | tee log",
    "torchrun --nproc-per-node 8 train.py --lr 1e-4",
    "https://huggingface.co/gpt2/resolve/main/model.safetensors",
    "sbatch -p gpu job.sh",
    "task-force-of-the-nations sk-learn risk-averse-optimizer",
    "docker://nvcr.io/nvidia/pytorch:25.01-py3",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_string(text) == text


PIECES = [
    "a", "-", "a-", "a=", "a:", "://", "=", '"', "'", "a ", "- ", "--a ", "echo ", "echo a|",
    "login -p", "login ", "-u ", "sig=", "hf_", "eyJ", "sk-", "-----BEGIN ", "a.webhook.", "1", " ",
    "wandb login ", "token", "a,", "#", "\n", "-u a:",
]  # fmt: skip


def test_pieces_that_are_repeated_take_linear_time() -> None:
    def repeat(piece: str, length: int) -> str:
        return piece * (length // len(piece)) + "!"

    pairs = {piece: (repeat(piece, 16_000), repeat(piece, 4_000)) for piece in PIECES}
    assert not [piece for piece, texts in pairs.items() if is_slow(redact_code, *texts, 0.005)]


@pytest.mark.parametrize(
    "line", ['"key": "9f27ab4417c0d1e2"', "tokens: 4096", "token=<redacted>", "password: $PASSWORD"]
)
def test_what_a_program_prints_beside_a_common_name_is_no_secret(line: str) -> None:
    assert list(find_secrets(line, in_output=True)) == []


def test_a_drawn_value_beside_a_secrets_name_is_one() -> None:
    assert "9f27ab4417c0d1e2" in find_secrets("HF_TOKEN=9f27ab4417c0d1e2", in_output=True)


@pytest.mark.parametrize("key", ["API_KEYS", "api_keys", "S3_ACCESS_KEYS", "ssh.private_keys"])
def test_several_secrets_are_as_secret_as_one(key: str) -> None:
    assert is_secret(key)
    assert not is_secret("sort_keys")
