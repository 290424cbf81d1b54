"""Makes a bucket slow: a TCP proxy that holds every request back for a while, so that the client sees real latency.

python -m examples.slow_bucket --upstream 127.0.0.1:8333 --latency-ms 20 prints its own port and serves until it is
stopped, or until the process that started it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, latency_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            if latency_s:
                await asyncio.sleep(latency_s)
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        writer.close()


async def serve(*, upstream_host: str, upstream_port: int, latency_s: float) -> asyncio.Server:
    """Listen on a free loopback port; what clients send is held back by ``latency_s`` seconds, answers are not."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(upstream_host, upstream_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pipe(reader, up_writer, latency_s=latency_s), _pipe(up_reader, writer, latency_s=0.0))

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        await asyncio.sleep(1.0)


async def _main(args: argparse.Namespace) -> None:
    host, port = args.upstream.rsplit(":", 1)
    parent = os.getppid()
    server = await serve(upstream_host=host, upstream_port=int(port), latency_s=args.latency_ms / 1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await _until_orphaned(parent)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
    sys.exit(0)
