"""A fast S3 on loopback that answers like a network: 20 ms for each request, 50 MB/s for each connection.

  python bench/s3_server.py FOLDER PORT

GET and HEAD of ``/bucket/KEY``, with ranges, serve the files of FOLDER; ``/statistics`` returns requests and
bytes since the last call as JSON. moto's server answers 50 requests/s, which is too slow to measure against.
"""

import asyncio
import json
import os
import re
import sys

LATENCY_S = 0.020
BYTES_PER_S = 50e6
PIECE = 256 << 10

counts = {"requests": 0, "bytes": 0}


def client_environment(port: int) -> dict[str, str]:
    """Returns the variables with which clients use the server at this port."""
    return {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


async def answer(folder: str, head: str, writer: asyncio.StreamWriter) -> None:
    method, path = head.split(" ", 2)[:2]
    name = path.partition("?")[0].removeprefix("/bucket/")
    if name == "/statistics":
        body = json.dumps(counts).encode()
        counts.update(requests=0, bytes=0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return
    counts["requests"] += 1
    began = asyncio.get_running_loop().time()
    try:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
    except OSError:
        await asyncio.sleep(LATENCY_S)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    try:
        size = os.fstat(file).st_size
        wanted = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", head)
        first, last = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
        lines = [
            "HTTP/1.1 206 Partial Content" if wanted else "HTTP/1.1 200 OK",
            f"Content-Length: {last - first + 1}",
            f"Content-Range: bytes {first}-{last}/{size}",
            'ETag: "0"',
            "Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT",
        ]
        await asyncio.sleep(LATENCY_S)
        writer.write("\r\n".join([*lines, "", ""]).encode())
        sent = 0
        while method == "GET" and first + sent <= last:
            piece = os.pread(file, min(PIECE, last - first + 1 - sent), first + sent)
            sent += len(piece)
            late = began + LATENCY_S + sent / BYTES_PER_S - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0, late))
            writer.write(piece)
            await writer.drain()
        counts["bytes"] += sent
    finally:
        os.close(file)


async def serve(folder: str, port: int) -> None:
    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await answer(folder, head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
