"""Words that others may not see, by name, shape or entropy; and words that they may."""

from __future__ import annotations

import html
import random
import string

import pytest

from varuna_core.records.secrets import (
    find_drawn,
    find_secrets,
    is_secret,
    redact_code,
    withhold,
)


@pytest.mark.parametrize(
    "text",
    [
        "commit 0a1b2c3d4e5f60718293a4b5c6d7e8f9012a3b4c",
        "index 3f2a9c1..9b8d7e6 100644",
        "image: nvcr.io/nvidia/pytorch@sha256:" + "0a9b" * 16,
        "x @ git+https://github.com/firm/x@0a1b2c3d4e5f60718293a4b5c6d7e8f9012a3b4c",
        "GPU-8f14e45f-ceea-467f-a8b2-3d1f0c9b7e65",
        "models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976918f6564b8830bc894c89659/x.json",
        "/scratch/project_465000123/checkpoints/gpt2-xl-20261128-184500/iter_0000500/rank0.pt",
        "TMPDIR=/tmp/vjob-q7zm4tk9 /scratch/me/tmpq7zm4tk9/x /var/tmp/tmp.q7Zm4Tk9Xw",
        "/nix/store/0c4k9xw2lr8bn5v1q7zm4tk9xw2lr8bn-python3/bin",
        "/sw/linux-rhel9-zen3/gcc-12.2.0/python-3.11.7-q7zm4tk2xw2lr6bn5vq7zm4tk2xw2lr6/lib",
        "NVIDIA-A100-SXM4-80GB CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF expandable_segments",
        "BertForSequenceClassification Qwen2.5-Coder-7B-Instruct llama3_8b_fp8_e4m3 MLP_FC2_BIAS",
        "torch==2.9.0+cu128 nvidia-cublas-cu12==12.8.4.1 transformers==4.57.1",
        "def __init__(self, token: str, key: Optional[int] = None): self.token = token",
        "model(input_ids, pad_token_id=tokenizer.pad_token_id, max_new_tokens=64)",
        "for key, value in state_dict.items(): print(f'{key}={value}')",
    ],
)
def test_words_of_programs_are_seen(text: str) -> None:
    assert withhold(text) == text


def test_a_word_in_no_list_is_held_for_its_entropy() -> None:
    word = "q7Zm" + "4Tk9" + "Xw2Lr8" + "Bn5V"
    assert list(find_drawn(f"resume {word} now")) == [word]
    assert word not in withhold(f"resume {word} now")


def test_a_folder_of_the_runs_own_path_may_be_seen_there_and_nowhere_else() -> None:
    name = "q7Zm" + "4Tk9" + "Xw2Lr8" + "Bn5V"
    assert withhold(f"/data/{name}/log", [name]) == f"/data/{name}/log"
    for text in (f"/data/{name}/log {name}", f"/data/{name}.d/log", f"/data/{name[1:]}/log"):
        assert name[1:] not in withhold(text, [name])


def test_what_stands_below_a_temporary_folder_or_in_an_address_is_held() -> None:
    name = "q7Zm" + "4Tk9" + "Xw2Lr8" + "Bn5V"
    for text in (f"/tmp/x/{name}/y z", f"https://host/tmp/{name}", f"/tmp{name}/log z"):
        assert name not in withhold(text)


@pytest.mark.parametrize(
    "name", ["PW", "MY_CREDS", "LDAP_BIND_PW", "accessKey", "dbPass", "S3_SECRETKEY", "NETRC"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "pad_token", "num_tokens_per_rank", "sort_key", "forward_pass", "bypass"]
)
def test_names_of_text_and_mappings(name: str) -> None:
    assert not is_secret(name)


def test_code_that_hands_a_secret_on_stays() -> None:
    text = "+login(token=self.token, password=args.password)\n+token = get_token()\n"
    text += "+password = entered\n+pw = sys.argv[1]\n+db_password = read(p1)\n+passwd = p2\n"
    assert redact_code(text) == text
    assert redact_code("+password = hunter2\n") == "+password = <redacted>\n"


def test_a_short_shape_within_data_in_base64_is_chance() -> None:
    """A report's page has a megabyte of it, and nothing of it could be shared."""
    drawn = random.Random(1)
    letters = "".join(drawn.choices(string.ascii_letters + string.digits + "+/", k=400_000))
    data = f"{letters}/1//0{letters[:40]}/hf_{letters[:40]}"
    assert not list(find_secrets(f'<script src="data:text/javascript;base64,{data}">'))
    token = "hf_" + "".join(drawn.choices(string.ascii_letters, k=34))
    assert list(find_secrets(f"{data} {token}")) == [token]


def test_what_a_page_shows_in_place_of_a_secret_is_none() -> None:
    """A page of a report is not shared if a secret is found in it, and it escapes quotation
    marks."""
    for text in (
        "curl -u ':Q7zQ7zQ7zQk' x",
        'curl --user "Q7zQ7zQ7zQk:" x',
        "curl -u 'me:Q7zQ7z' x",
    ):
        assert list(find_secrets(text)) and not list(find_secrets(html.escape(withhold(text))))
