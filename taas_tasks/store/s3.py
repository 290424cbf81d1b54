"""The object store on S3, or on any server that speaks it, through boto3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import boto3
import botocore.exceptions as boto_errors
import botocore.loaders
import botocore.session
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.credentials import CredentialProvider, Credentials, ReadOnlyCredentials
from botocore.handlers import add_expect_header

from taas.errors import ObjectMissing, StoreError, StoreRefused, StoreUnavailable
from taas_tasks.store.answers import EXPIRED_CODES, Retries, error_for
from taas_tasks.store.base import Content, ObjectInfo, UsePiece
from taas_tasks.store.credentials import CredentialsFile, Keys, KeySource
from taas_tasks.store.files import write_then_move
from taas_tasks.store.http_reader import HttpReader
from taas_tasks.store.http_writer import HttpWriter, md5_header
from taas_tasks.store.keys import check_key
from taas_tasks.store.signing import object_url, sign_url
from taas_tasks.values import StoreConfig

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef

T = TypeVar("T")

_MIB = 1 << 20
_PART_BYTES = 16 * _MIB
_MAX_PARTS = 10_000  # S3's limit
_OWN_URL_S = 3600
_NO_CREDENTIALS = (
    boto_errors.NoCredentialsError,
    boto_errors.PartialCredentialsError,
    boto_errors.CredentialRetrievalError,
)


class S3Store:
    """Objects of one bucket below one prefix. Safe to use from several threads; open one per process."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        retries: Retries | None = None,
        num_connections: int = 32,
        credentials: KeySource | None = None,
    ) -> None:
        """Prepare; nothing connects before the first use.

        Args:
            config: where the store is. Without keys boto3's own chain finds (and refreshes) the credentials.
            retries: how often a request that met a 503, SlowDown or a cut connection is tried.
            num_connections: connections kept open; as many as threads that write.
            credentials: renewed keys that win over those of ``config``.
        """
        self._config = config
        self._bucket = config.bucket
        self._prefix = config.prefix.strip("/") + "/" if config.prefix.strip("/") else ""
        self._retries = retries or Retries()
        self._num_connections = num_connections
        path = config.credentials_path
        self._renewed = credentials or (CredentialsFile(Path(path)) if path else None)

    @cached_property
    def _client(self) -> S3Client:
        return self._new_client(self._config.endpoint_url)

    @cached_property
    def _public_client(self) -> S3Client:
        """Signs only: the host name is part of the signature, so presigned URLs need the name that their user sees."""
        return self._new_client(self._config.public_endpoint_url or self._config.endpoint_url)

    @cached_property
    def _reader(self) -> HttpReader:
        return HttpReader(self._signer("GET"), retries=self._retries)

    @cached_property
    def _writer(self) -> HttpWriter:
        return HttpWriter(self._signer("PUT"), retries=self._retries)

    def _signer(self, method: Literal["GET", "PUT"]) -> Callable[[str], str]:
        """Return what signs URLs of our own. It does not hold the store: no cycle keeps sockets open."""
        config, bucket, prefix = self._config, self._bucket, self._prefix
        current_keys = self._key_getter()
        if config.endpoint_url is not None and current_keys is not None:
            endpoint, get = config.endpoint_url, current_keys
            sign = partial(sign_url, method=method, region=config.region, expires_s=_OWN_URL_S)
            return lambda key: sign(object_url(endpoint, bucket, prefix + key), get())
        client, call = self._client, {"GET": "get_object", "PUT": "put_object"}[method]
        return lambda key: client.generate_presigned_url(
            call, Params={"Bucket": bucket, "Key": prefix + key}, ExpiresIn=_OWN_URL_S
        )

    def _key_getter(self) -> Callable[[], Keys] | None:
        """Return what gives the keys that we were told; None when boto3's chain is to find them."""
        config = self._config
        if self._renewed is not None:
            return self._renewed.keys
        if not (config.access_key and config.secret_key):
            return None
        keys = Keys(config.access_key, config.secret_key, config.session_token)
        return lambda: keys

    def _new_client(self, endpoint_url: str | None) -> S3Client:
        # A session of our own: boto3's default one is not safe to use from several threads.
        core = botocore.session.Session()
        core.register_component("data_loader", _api_descriptions())
        session = boto3.session.Session(botocore_session=core, region_name=self._config.region, **self._given_keys())
        if self._renewed is not None:
            core.get_component("credential_provider").insert_before("env", _RenewedProvider(self._renewed))
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint_url else "auto"},
            retries={"mode": "standard", "total_max_attempts": self._retries.max_attempts},
            max_pool_connections=self._num_connections,
            connect_timeout=5,
            read_timeout=60,
            tcp_keepalive=True,
            response_checksum_validation="when_required",
            request_checksum_calculation="when_required",
        )
        client = session.client("s3", endpoint_url=endpoint_url, config=config)
        # With "Expect: 100-continue" botocore waits up to a second for a server that answers only the whole request,
        # as SeaweedFS does while several writers want one key: several seconds for 16 racers instead of 0.05-1 s.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        return client

    def _given_keys(self) -> dict[str, str | None]:
        if self._renewed is not None:
            return {}
        config = self._config
        return {
            "aws_access_key_id": config.access_key,
            "aws_secret_access_key": config.secret_key,
            "aws_session_token": config.session_token,
        }

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _call(self, key: str, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; do it again when the credentials expired meanwhile and were renewed."""
        if self._renewed is None:
            return self._told(key, call)
        while True:
            used = self._renewed.keys()
            try:
                return self._told(key, call)
            except StoreRefused as error:
                if error.fields.get("code") not in EXPIRED_CODES or not self._renewed.await_others(used):
                    raise

    def _told(self, key: str, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; turn botocore's errors into ours."""
        try:
            return call()
        except boto_errors.ClientError as error:
            raise _error_of(key, error) from error
        except _NO_CREDENTIALS as error:
            raise StoreRefused(
                f"no credentials for the store: {error}; set the connection's login and password"
            ) from error
        except S3UploadFailedError as error:
            cause = error.__context__
            raise (
                _error_of(key, cause) if isinstance(cause, boto_errors.ClientError) else _unavailable(error)
            ) from error
        except (boto_errors.HTTPClientError, boto_errors.ConnectionError) as error:
            raise _unavailable(error) from error
        except (boto_errors.BotoCoreError, ValueError) as error:
            raise StoreError(f"the store cannot do this with {key!r}: {error}", key=key) from error

    def put(self, key: str, data: Content) -> None:
        """Write an object whole, from one piece or from its parts in order; an existing one is replaced."""
        check_key(key)
        parts = [data] if isinstance(data, bytes | memoryview) else data
        self._call(key, lambda: self._writer.put(key, parts))

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, in parts when it has more than 16 MiB."""
        part_bytes = max(_PART_BYTES, -(-path.stat().st_size // (_MAX_PARTS * _MIB)) * _MIB)
        transfer = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes, max_concurrency=4)
        name = self._key(key)
        self._call(key, lambda: self._client.upload_file(str(path), self._bucket, name, Config=transfer))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless the key is taken (``If-None-Match: *``); True when this call wrote it.

        A reply that was lost is asked for again, and the answer is then False for this call's own write: whoever must
        know puts something of his own into ``data`` and compares.
        """
        for attempt in range(1, self._retries.max_attempts + 1):
            answer = self._call(key, lambda: self._try_put_if_absent(key, data))
            if answer is not None:
                return answer
            self._retries.wait(attempt)
        raise StoreUnavailable(f"{key!r} was written by others at the same time, {attempt} tries long", key=key)

    def _try_put_if_absent(self, key: str, data: bytes) -> bool | None:
        try:
            # SeaweedFS takes a body that never came (the writer was killed behind its headers) for an empty object, and
            # a record under a key that is written once would be empty for ever: it refuses that where it has a checksum
            md5 = md5_header(data)
            self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data, IfNoneMatch="*", ContentMD5=md5)
        except boto_errors.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 412:
                return False
            if status == 409:  # ConditionalRequestConflict: another write of this key is under way, and may yet fail
                return None
            raise
        return True

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        check_key(key)
        return self._call(key, lambda: self._reader.read_whole(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop); nothing is asked of the store for an empty range."""
        check_key(key)
        return self._call(key, lambda: self._reader.read_range(key, start, stop))

    def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
        """Fill the buffer with the bytes from ``start`` on, and call ``use(offset, piece)`` as they arrive."""
        check_key(key)
        self._call(key, lambda: self._reader.read_into(key, start, buffer, use))

    def get_file(self, key: str, path: Path) -> None:
        """Write the object to a file: a temporary beside it, then moved."""
        check_key(key)
        with write_then_move(path) as file:
            self._call(key, lambda: self._copy_to(key, file))

    def _copy_to(self, key: str, file: BinaryIO) -> None:
        file.seek(0)
        file.truncate()  # a first try may have got half way
        self._reader.copy_to(key, file)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of the object, or None."""
        try:
            answer = self._call(key, lambda: self._head(key))
        except ObjectMissing:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def _head(self, key: str) -> HeadObjectOutputTypeDef:
        name = self._key(key)
        try:
            return self._client.head_object(Bucket=self._bucket, Key=name)
        except boto_errors.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403):
                # The answer to a HEAD has no body, so it does not say why: this one does.
                self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=1)
            raise

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below ``prefix`` in the order of their keys, from behind ``start_after``.

        All keys are gathered first: some servers list folder by folder, which is another order when a name has a
        character below "/" (as "a-b/x" and "a/x").
        """
        found = self._call(prefix, lambda: self._listed(prefix, start_after))
        yield from sorted(
            (info for info in found if info.key.encode() > start_after.encode()), key=lambda info: info.key.encode()
        )

    def _listed(self, prefix: str, start_after: str) -> tuple[ObjectInfo, ...]:
        paginator = self._client.get_paginator("list_objects_v2")
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if server_start := _safe_start(start_after, prefix):
            asked["StartAfter"] = self._prefix + server_start
        return tuple(
            ObjectInfo(item["Key"][len(self._prefix) :], item["Size"], item["LastModified"].timestamp())
            for page in paginator.paginate(**asked)
            for item in page.get("Contents", [])
        )

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is fine."""
        self._call(key, lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def presign_get(self, key: str, *, expires_s: int) -> str:
        """Return a URL of the public endpoint that reads this one key."""
        return self._call(key, lambda: self._sign(self._public_client, "get_object", key, expires_s))

    def presign_put(self, key: str, *, expires_s: int) -> str:
        """Return a URL of the public endpoint that writes this one key."""
        return self._call(key, lambda: self._sign(self._public_client, "put_object", key, expires_s))

    def close(self) -> None:
        """Close idle connections; the store can still be used, and opens new ones."""
        self._reader.close()
        self._writer.close()
        self._client.close()

    def _sign(self, client: S3Client, method: str, key: str, expires_s: int) -> str:
        asked = {"Bucket": self._bucket, "Key": self._key(key)}
        return client.generate_presigned_url(method, Params=asked, ExpiresIn=expires_s)


class _RenewedCredentials(Credentials):
    """botocore's view of keys that are renewed: asked at each signature."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        keys = source.keys()
        super().__init__(keys.access_key, keys.secret_key, keys.session_token)

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        keys = self._source.keys()
        return ReadOnlyCredentials(keys.access_key, keys.secret_key, keys.session_token)


class _RenewedProvider(CredentialProvider):
    METHOD = CANONICAL_NAME = "taas-renewed"

    def __init__(self, source: KeySource) -> None:
        super().__init__()
        self._source = source

    def load(self) -> Credentials:
        return _RenewedCredentials(self._source)


@cache
def _api_descriptions() -> botocore.loaders.Loader:
    """Reading S3's description takes 0.1 s: once per process, not once per store."""
    return botocore.loaders.create_loader()


def _safe_start(start_after: str, prefix: str) -> str:
    """Return a name before ``start_after`` from which no server, in whatever order it lists, skips a key behind it.

    The orders by bytes and by folder differ only at characters below "/": the name is cut before the first of those.
    SeaweedFS also skips the folder that has the given name itself: one more character is cut, inside of a part.
    """
    shared = len(prefix) if start_after.startswith(prefix) else 0
    cut = next((n for n, char in enumerate(start_after) if n >= shared and char < "/"), len(start_after))
    for stop in range(cut - 1, shared, -1):
        if start_after[stop] != "/" and start_after[stop - 1] != "/":
            return start_after[:stop]
    return ""


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store does not answer: {error}")


def _error_of(key: str, error: boto_errors.ClientError) -> StoreError:
    answer = error.response["ResponseMetadata"]
    about = error.response.get("Error", {})
    return error_for(
        key,
        status=int(answer["HTTPStatusCode"]),
        code=about.get("Code", ""),
        message=about.get("Message", ""),
        date=answer.get("HTTPHeaders", {}).get("date"),
    )
