"""Secrets do not reach the copy of a conf."""

from __future__ import annotations

import yaml

from jobs.redact import redact_text

TEXT = """\
# my conf
name: x
env:
  HF_TOKEN: hf_abc     # a secret
  NOTE: "plain"
  WANDB_API_KEY: 'k1'
notify: {webhook: "https://h/abc"}
"""


def test_secret_values_go_and_all_else_stays() -> None:
    hidden = redact_text(TEXT)
    assert not any(word in hidden for word in ("hf_abc", "k1", "https://h/abc"))
    assert "# a secret" in hidden and 'NOTE: "plain"' in hidden
    assert yaml.safe_load(hidden)["env"]["HF_TOKEN"] == "<redacted>"


def test_a_secret_behind_an_alias_goes_too() -> None:
    assert "s3" not in redact_text("a: &x s3cret\nenv: {MY_TOKEN: *x}\n")
