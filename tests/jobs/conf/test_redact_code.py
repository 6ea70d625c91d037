from __future__ import annotations

import pytest

from vjob.jobs.conf.redact import redact_code


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
