from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.config import Config

from taas_tasks.store.credentials import Keys
from taas_tasks.store.signing import object_url, sign_url

ENDPOINT = "http://127.0.0.1:8333"
NAME = "a/b c/d+e=é~(1)*!'.bin"


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("token", [None, "a+token/="])
def test_a_url_is_the_one_that_a_client_of_boto3_signs(method: str, token: str | None) -> None:
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=ENDPOINT,
        region_name="eu-west-3",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        aws_session_token=token,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )
    call = {"GET": "get_object", "PUT": "put_object"}[method]
    url, keys = object_url(ENDPOINT, "bucket", NAME), Keys("key", "secret", token)
    for _ in range(5):  # both have the second in them
        theirs = client.generate_presigned_url(call, Params={"Bucket": "bucket", "Key": NAME}, ExpiresIn=3600)
        ours = sign_url(url, keys, method=method, region="eu-west-3", expires_s=3600)
        if date_of(ours) == date_of(theirs):
            break
    assert urlsplit(ours).path == urlsplit(theirs).path
    assert parse_qs(urlsplit(ours).query) == parse_qs(urlsplit(theirs).query)


def date_of(url: str) -> str:
    return parse_qs(urlsplit(url).query)["X-Amz-Date"][0]
