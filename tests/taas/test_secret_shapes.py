import secrets
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.secret_shapes import known_secret, secret_reason

AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (AWS_KEY, "AWS"),
        ("ghp_" + "a1B2" * 9, "GitHub"),
        ("glpat-" + "a1B2" * 5, "GitLab"),
        ("hf_" + "aB1c" * 8, "Hugging Face"),
        ("xoxb-1234567890-abc", "Slack"),
        ("AIza" + "a" * 35, "Google"),
        ("sk-" + "a1B2" * 8, "API key"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "JSON web token"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc", "private key"),
        ("postgres://user:hunter2@db/x", "URL with a password"),
    ],
)
def test_well_known_shapes_are_recognised_under_any_name(value: str, kind: str) -> None:
    reason = secret_reason("PLAIN", value)
    assert reason is not None
    assert kind in reason
    assert known_secret(f"--x={value}") is not None


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "DB_PASSWORD", "password", "MY_PASSWORD_OLD", "API_KEY", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET"],
)
def test_names_of_secrets_count_with_any_value(name: str) -> None:
    assert secret_reason(name, "hunter2") == "its name says that it is a secret"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "4096"),
        ("USE_AUTH_TOKEN", "true"),
        ("HF_TOKEN", ""),
        ("PASSWORD_FILE", "/run/secrets/db"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/gcp.json"),
        ("TLS_KEY", "/etc/tls.key"),
        ("MONKEY", "banana"),
        ("PATH", "/usr/local/bin:/usr/bin"),
        ("DATA", "s3://bucket/Some/Long/Path/Of/2024/Data"),
        ("EXPERIMENT", "MyVeryLongExperimentNameWithResNet50AndAdamW"),
        ("GIT_COMMIT", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"),
        ("CHECKPOINT", "checkpoints/2024-05-01/Epoch-0012-Step-000340000.pt"),
        ("URL", "https://user@host/path"),
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"),
    ],
)
def test_harmless_variables_pass(name: str, value: str) -> None:
    assert secret_reason(name, value) is None


def test_random_tokens_are_recognised_nearly_always() -> None:
    alphabet = string.ascii_letters + string.digits
    tokens = ["".join(secrets.choice(alphabet) for _ in range(48)) for _ in range(300)]
    assert sum(secret_reason("X", token) is not None for token in tokens) >= 285


@given(st.text(max_size=200), st.text(max_size=40))
def test_any_text_is_judged_without_an_error(value: str, name: str) -> None:
    assert secret_reason(name, value) is None or isinstance(secret_reason(name, value), str)
