"""The main job on real data: two requests through the local stack, their reports and what rank 0 wrote.

`make demo` runs it. It leaves `var/demo/report.json` (a list of the two reports) and `var/demo/artifacts/`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx

import taas.run
from taas.client import Client, ClientConfig
from taas.errors import TaasError
from taas.project_files import put_folder
from taas.report_text import report_text
from taas_tasks.stack import Stack

ROOT = Path(__file__).parent.parent
OUT = ROOT / "var" / "demo"
STDLIB = Path(sysconfig.get_path("stdlib"))
MIN_BYTES = 2_000
NUM_SOURCES = 640
SOURCE_PREFIX = "demo-data/stdlib/"


def say(text: str = "") -> None:
    """Print a line at once."""
    print(text, flush=True)


def source_files() -> list[Path]:
    """Return files of the standard library's own source: every machine has them."""
    found = sorted(path for path in STDLIB.rglob("*.py") if "site-packages" not in path.parts)
    return [path for path in found if path.stat().st_size >= MIN_BYTES][:NUM_SOURCES]


def put_sources(stack: Stack) -> None:
    """Put the standard library's source into the bucket, one object per file."""
    config = stack.store_config()
    client = boto3.client(
        "s3",
        endpoint_url=config.endpoint_url,
        aws_access_key_id=config.access_key,
        aws_secret_access_key=config.secret_key,
        region_name=config.region,
    )
    for path in source_files():
        client.put_object(
            Bucket=config.bucket, Key=f"{SOURCE_PREFIX}{path.relative_to(STDLIB)}", Body=path.read_bytes()
        )


@contextlib.contextmanager
def slow_bucket(stack: Stack, *, latency_ms: float) -> Iterator[str]:
    """Serve the bucket slowly; yields its URL with the key that reads it."""
    config = stack.store_config()
    assert config.endpoint_url is not None
    upstream = config.endpoint_url.removeprefix("http://")
    command = [sys.executable, "-m", "examples.slow_bucket", "--upstream", upstream, "--latency-ms", str(latency_ms)]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert proxy.stdout is not None
        port = int(proxy.stdout.readline())
        yield f"http://{config.access_key}:{config.secret_key}@127.0.0.1:{port}/{config.bucket}/{SOURCE_PREFIX}"
    finally:
        proxy.terminate()
        proxy.wait()


def set_variable(config: ClientConfig, key: str, value: str) -> None:
    """Create or replace an Airflow variable (kept encrypted), as a user with rights would in the UI."""
    with httpx.Client(base_url=config.url, timeout=30) as http:
        login = http.post("/auth/token", json={"username": config.username, "password": config.password})
        headers = {"Authorization": f"Bearer {login.raise_for_status().json()['access_token']}"}
        body = {"key": key, "value": value}
        reply = http.post("/api/v2/variables", json=body, headers=headers)
        if reply.status_code == httpx.codes.CONFLICT:
            quoted = key.replace("/", "%2F")
            reply = http.patch(f"/api/v2/variables/{quoted}", json=body, headers=headers)
        reply.raise_for_status()


def losses_of(report: dict[str, Any]) -> list[float]:
    """Return the losses that rank 0 logged, in order."""
    return [entry["loss"] for entry in report["metrics"] if "loss" in entry]


def sparkline(values: list[float], *, width: int = 60) -> str:
    """Return a curve of one line."""
    marks = "▁▂▃▄▅▆▇█"
    step = max(1, len(values) // width)
    means = [sum(values[at : at + step]) / len(values[at : at + step]) for at in range(0, len(values), step)]
    low, high = min(means), max(means)
    return "".join(marks[round((value - low) / ((high - low) or 1) * (len(marks) - 1))] for value in means)


def run_request(name: str, *, client: Client) -> dict[str, Any]:
    """Put an example project, submit its request, follow it to its end and return its report."""
    folder = ROOT / "examples" / name
    request = json.loads((folder / "request.json").read_text())
    say(f"\n== {name}: gpus {request['gpus']}, cpus {request['cpus']}, units {request['units']}")
    put_folder(client, request["project"], folder)
    started = time.monotonic()
    run = taas.run.submit(request, client=client)
    say(f"   {run.url}")
    state = run.wait(on_line=lambda line: say(f"   {time.monotonic() - started:6.1f} s  {line}"), poll_s=1.0)
    report = run.report()
    say()
    say(report_text(report))
    if state == "success":
        run.download_artifacts(OUT / "artifacts" / name)
        losses = losses_of(report)
        say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}  {sparkline(losses)}")
    return report


def main() -> int:
    """Run the demo; 0 when both requests succeeded and the loss of each went down."""
    OUT.mkdir(parents=True, exist_ok=True)
    stack = Stack(ROOT / "var" / "stack")
    say("starting the local stack: S3 (SeaweedFS), PostgreSQL, Airflow ...")
    stack.up()
    username, password = stack.login
    config = ClientConfig(url=stack.url, username=username, password=password)
    put_sources(stack)
    with Client(config) as client, slow_bucket(stack, latency_ms=20) as url:
        set_variable(config, "taas/bytes-lm/source_secret", url)
        reports = [run_request(name, client=client) for name in ("bytes_lm", "digits")]
    (OUT / "report.json").write_text(json.dumps(reports, indent=2))
    say(f"\nreports: {OUT / 'report.json'}\nartifacts: {OUT / 'artifacts'}")
    say(f"UI: {config.url}  login {config.username} / {config.password}   (make down stops everything)")
    good = all(one["state"] == "success" and losses_of(one)[-1] < losses_of(one)[0] for one in reports)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TaasError as error:
        sys.exit(f"demo: {error}")
