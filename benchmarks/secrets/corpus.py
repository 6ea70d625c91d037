"""Shapes of secrets in the places where people leave them. All values are drawn when this runs.

A vendor's token stands in every artefact under a name that says nothing; a secret without a form
of its own stands in the line that gives it away.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

LOWER, UPPER, DIGITS = string.ascii_lowercase, string.ascii_uppercase, string.digits
ALNUM = LOWER + UPPER + DIGITS
HEX = DIGITS + "abcdef"
SAFE = ALNUM + "_-"
CAPITALS = UPPER + DIGITS
PGP, SSH = "PGP PRIVATE KEY BLOCK", "OPENSSH PRIVATE KEY"
WECHAT = "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key="


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One secret in one artefact."""

    name: str
    artefact: str
    text: str
    secret: str


VENDORS: tuple[tuple[str, str, str, int], ...] = (
    ("Hugging Face", "hf_", ALNUM, 34),
    ("GitHub", "ghp_", ALNUM, 36),
    ("GitHub, fine-grained", "github_pat_", ALNUM, 60),
    ("GitHub app", "ghs_", ALNUM, 36),
    ("GitLab", "glpat-", SAFE, 20),
    ("GitLab deploy", "gldt-", SAFE, 20),
    ("OpenAI", "sk-proj-", SAFE, 80),
    ("Anthropic", "sk-ant-api03-", SAFE, 90),
    ("OpenRouter", "sk-or-v1-", HEX, 64),
    ("Langfuse", "sk-lf-", HEX, 32),
    ("Groq", "gsk_", ALNUM, 52),
    ("xAI", "xai-", ALNUM, 80),
    ("Perplexity", "pplx-", ALNUM, 48),
    ("Fireworks", "fw_", ALNUM, 24),
    ("Cerebras", "csk-", LOWER + DIGITS, 48),
    ("Together", "tgp_v1_", SAFE, 43),
    ("Jina", "jina_", ALNUM, 60),
    ("Voyage", "pa-", SAFE, 43),
    ("Pinecone", "pcsk_", ALNUM, 60),
    ("RunPod", "rpa_", CAPITALS, 42),
    ("Anyscale", "esecret_", LOWER + DIGITS, 26),
    ("Tavily", "tvly-", ALNUM, 32),
    ("E2B", "e2b_", HEX, 40),
    ("Firecrawl", "fc-", HEX, 32),
    ("LangSmith", "lsv2_pt_", HEX, 32),
    ("W&B, old", "", HEX, 40),
    ("W&B, new", "wandb_v1_", ALNUM, 70),
    ("Comet", "", ALNUM, 25),
    ("Mistral", "", ALNUM, 32),
    ("Cohere", "", ALNUM, 40),
    ("Lambda", "secret_", LOWER + DIGITS, 40),
    ("Vast", "", HEX, 64),
    ("NVIDIA", "nvapi-", SAFE, 64),
    ("Replicate", "r8_", ALNUM, 37),
    ("Modal", "as-", ALNUM, 22),
    ("Grafana service", "glsa_", ALNUM, 32),
    ("Grafana cloud", "glc_", ALNUM, 60),
    ("Shopify", "shpat_", HEX, 32),
    ("Atlassian", "ATATT3", SAFE, 60),
    ("Sentry org", "sntrys_", ALNUM, 60),
    ("Tailscale", "tskey-auth-", ALNUM, 30),
    ("Vault service", "hvs.", SAFE, 90),
    ("Vault batch", "hvb.", SAFE, 138),
    ("Doppler", "dp.pt.", ALNUM, 43),
    ("Fly", "fm2_", ALNUM + "+/", 80),
    ("1Password", "ops_", ALNUM, 80),
    ("Pulumi", "pul-", HEX, 40),
    ("Figma", "figd_", SAFE, 40),
    ("Linear", "lin_api_", ALNUM, 40),
    ("Notion", "ntn_", ALNUM, 46),
    ("Postman", "PMAK-", HEX, 58),
    ("Supabase", "sbp_", HEX, 40),
    ("PlanetScale", "pscale_tkn_", SAFE, 43),
    ("PostHog", "phx_", ALNUM, 43),
    ("Dynatrace", "dt0c01.", CAPITALS, 64),
    ("New Relic", "NRAK-", CAPITALS, 27),
    ("Resend", "re_", ALNUM, 32),
    ("Mailgun", "key-", HEX, 32),
    ("SendGrid", "SG." + "q7" * 11 + ".", SAFE, 43),
    ("Slack bot", "xoxb-", DIGITS + LOWER, 50),
    ("Slack app", "xapp-1-", CAPITALS, 60),
    ("Telegram", "7182934650:AA", SAFE, 33),
    ("Discord", "MTE", ALNUM, 69),
    ("AWS id", "AKIA", CAPITALS, 16),
    ("AWS secret", "", ALNUM + "/+", 40),
    ("Google API", "AIza", SAFE, 35),
    ("Google OAuth", "GOCSPX-", SAFE, 28),
    ("Google access", "ya29.", SAFE, 100),
    ("Azure AD", "abc8Q~", ALNUM, 34),
    ("Azure storage", "", ALNUM + "+/", 86),
    ("Azure DevOps", "", LOWER + DIGITS, 52),
    ("Alibaba", "LTAI", ALNUM, 20),
    ("Tencent", "AKID", ALNUM, 32),
    ("Scaleway", "SCW", CAPITALS, 17),
    ("DigitalOcean", "dop_v1_", HEX, 64),
    ("Databricks", "dapi", HEX, 32),
    ("npm", "npm_", ALNUM, 36),
    ("PyPI", "pypi-", SAFE, 150),
    ("RubyGems", "rubygems_", HEX, 48),
    ("Docker Hub", "dckr_pat_", SAFE, 27),
    ("Stripe", "sk_live_", ALNUM, 24),
    ("Artifactory", "AKCp", ALNUM, 69),
    ("Terraform", "Qz7XmQz7XmQz7X.atlasv1.", ALNUM, 67),
    ("Cloudflare", "", SAFE, 40),
    ("Datadog", "", HEX, 32),
    ("age", "AGE-SECRET-KEY-1", CAPITALS, 58),
)

LINES: tuple[tuple[str, str, str], ...] = (
    ("env MY_CREDS", "conf", "env: {{MY_CREDS: {word}}}"),
    ("env LDAP_BIND_PW", "conf", "env: {{LDAP_BIND_PW: {word}}}"),
    ("env PW", "conf", "env: {{PW: {word}}}"),
    ("env ACCESSKEY", "conf", "env: {{ACCESSKEY: {word}}}"),
    ("env dbPass", "conf", "env: {{dbPass: {word}}}"),
    ("env PGPASSWORD", "conf", "env: {{PGPASSWORD: {word}}}"),
    ("env SMTP_PASSWD", "conf", "env: {{SMTP_PASSWD: {word}}}"),
    ("env CONNECTION_STRING", "conf", "env: {{DB_CONNECTION_STRING: {word}}}"),
    ("env SENTRY", "conf", 'env: {{SENTRY: "https://{word}@o1.sentry.io/1"}}'),
    ("a shared access key", "conf", 'env: {{A: "Endpoint=sb://x/;SharedAccessKey={word}="}}'),
    ("an account key", "conf", 'env: {{A: "AccountName=a;AccountKey={word}=="}}'),
    ("args --pw", "args", "--pw\x1f{word}"),
    ("args --accesskey", "args", "--accesskey\x1f{word}"),
    ("args --ldap-creds=", "args", "--ldap-creds={word}"),
    ("args -u user:", "args", "curl\x1f-u\x1fme:{word}"),
    ("args a header in three", "args", "-H\x1fAuthorization:\x1fToken\x1f{word}"),
    ("args password word", "args", "set\x1fpassword\x1f{word}"),
    ("args login -p", "args", "docker\x1flogin\x1f-u\x1fme\x1f-p\x1f{word}"),
    ("args odd URL", "args", "--db=postgres://u:p@{word}@db/x"),
    ("args URL with a slash", "args", "--db=postgres://u:p/{word}@db/x"),
    ("args URL in two", "args", "--db\x1fredis://:{word}@cache:6379/0"),
    ("kinit", "setup", "echo {word} | kinit me"),
    ("a here-string", "setup", "docker login --password-stdin <<< {word}"),
    ("a quoted here-string", "setup", "kinit me <<< '{word}'"),
    ("a heredoc", "setup", "docker login --password-stdin <<EOF\n{word}\nEOF"),
    ("printf to sudo", "setup", "printf '%s\\n' {word} | sudo -S ls"),
    ("sshpass", "setup", "sshpass -p {word} ssh host"),
    ("mysql -p", "setup", "mysql -u me -p{word} db"),
    ("ldapsearch -w", "setup", "ldapsearch -D cn=me -w {word} -b dc=x"),
    ("export", "setup", "export LDAP_PW={word}"),
    ("curl -u", "setup", "curl -u me:{word} host"),
    ("curl without a user", "setup", "curl -u ':{word}' host"),
    ("curl with a key as user", "setup", 'curl -u "{word}:" host'),
    ("proxy", "setup", "curl --proxy-user me:{word} host"),
    ("wandb login", "setup", "wandb login {hex}"),
    ("smbclient", "setup", "smbclient -U me%{word} //host/x"),
    ("psql", "setup", "psql -c \"ALTER USER me WITH PASSWORD '{word}'\""),
    ("gpg", "setup", "echo {word} | gpg --batch --passphrase-fd 0 x"),
    ("a Slack hook", "notify", "webhook: https://hooks.slack.com/services/T1/B1/{word}"),
    ("a Discord hook", "notify", "webhook: https://discord.com/api/webhooks/1/{word}"),
    ("a Feishu hook", "notify", "command: curl https://open.feishu.cn/open-apis/bot/v2/hook/{word}"),
    ("an ntfy topic", "notify", "command: curl -d x https://ntfy.sh/{word}"),
    ("a Zapier hook", "notify", "command: curl https://hooks.zapier.com/hooks/catch/1/{word}"),
    ("a WeChat hook", "notify", f"command: curl {WECHAT}{{word}}"),
    ("a comment", "comment", "# the password: {word}"),
    ("a password of an ini file", "code", "+password = {word}"),
    ("aws ini", "code", "+aws_secret_access_key = {mixed}"),
    ("os.environ", "code", '+os.environ["LDAP_PW"] = "{word}"'),
    ("a mapping", "code", '+x = {{"accessKey": "{word}"}}'),
    ("a default", "code", '+def f(password="{word}"):'),
    ("setdefault", "code", '+os.environ.setdefault("DB_PASS", "{word}")'),
    ("argparse", "code", '+p.add_argument("--api-key", default="{mixed}")'),
    ("yaml", "code", "+api-key: {word}"),
    ("dotenv", "code", "+SESSION_SECRET={word}"),
    ("toml", "code", '+secret_key = "{word}"'),
    ("a netrc", "code", "+machine api.wandb.ai login user password {word}"),
    ("a netrc of lines", "code", "+machine api.wandb.ai\n login user\n password {word}"),
    ("a pgpass", "code", "+db.host:5432:train:me:{word}"),
    ("a PGP block", "code", f"+-----BEGIN {PGP}-----\n+{{mixed}}\n+-----END {PGP}-----"),
    ("an ssh key", "code", f"+-----BEGIN {SSH}-----\n+{{mixed}}\n+-----END {SSH}-----"),
    ("CloudFront", "code", "+https://d.cloudfront.net/x?Signature={mixed}"),
    ("an S3 signature", "code", "+https://b.s3.amazonaws.com/o?X-Amz-Signature={hex}"),
    ("an Azure signature", "code", "+https://a.blob.core.windows.net/c?sv=2024&sig={mixed}%3D"),
    ("base64 of a password", "code", "+echo {coded} | base64 -d"),
    ("base64 of a header", "code", '+h = "Basic {coded}"'),
    ("Bearer", "code", '+h = {{"Authorization": "Bearer {mixed}"}}'),
    ("X-Api-Key", "code", "+curl -H 'X-Api-Key: {word}' host"),
    ("a JSON web token", "code", "+x = 'eyJhbGciOiJIUzI1NiJ9.eyJ{mixed}.{mixed}'"),
    ("Neptune", "code", "+n = 'eyJhcGlfYWRkcmVzcyI6{mixed}'"),
    ("an index with a login", "packages", "--extra-index-url https://me:{word}@pypi.firm.org/simple"),
    ("a git package", "packages", "x @ git+https://{mixed}@git.firm.org/x.git"),
    ("a git remote", "packages", "-e git+https://oauth2:{word}@git.firm.org/x.git#egg=x"),
    ("a DRF header", "output", "Authorization: Token {mixed}"),
    ("a key that is said", "output", "wandb: using key {hex}"),
    ("a printed mapping", "output", '{{"accessKey": "{mixed}"}}'),
    ("a printed netrc", "output", "machine api.wandb.ai login user password {word}"),
    ("a printed URL", "output", "postgres://u:p@{word}@db/x"),
    ("printed ini", "output", "aws_secret_access_key = {mixed}"),
)  # fmt: skip
ANYWHERE = (
    ("conf", "env: {{X_VALUE: '{0}'}}"),
    ("args", "--with\x1f{0}"),
    ("args", "--with={0}"),
    ("setup", "run-it {0}"),
    ("comment", "# it was {0}"),
    ("code", '+value = "{0}"'),
    ("packages", "x @ https://host/{0}/x.whl"),
)


def draw_shapes(seed: int) -> Iterator[Shape]:
    """All of them, with values of this seed."""
    rng = random.Random(seed)

    def word(alphabet: str, length: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(length))

    for name, start, alphabet, length in VENDORS:
        secret = word(alphabet, length)
        for artefact, line in ANYWHERE:
            yield Shape(
                name=name, artefact=artefact, text=line.format(start + secret), secret=secret
            )
    for name, artefact, line in LINES:
        values = {
            "word": rng.choice(("Wombat", "Kettle", "Saddle")) + word(LOWER, 5) + word(DIGITS, 2),
            "mixed": word(ALNUM, 40),
            "hex": word(HEX, 40),
        }
        values["coded"] = base64.b64encode(f"password={values['word']}".encode()).decode()
        secret = next(value for key, value in values.items() if f"{{{key}}}" in line)
        yield Shape(name=name, artefact=artefact, text=line.format(**values), secret=secret)
