"""Time one short text over HTTP, idle, beside the model's own time for it.

    python benchmarks/measure_served_text.py all-MiniLM-L6-v2-int8 [--device cuda] [--requests 200]

The model in the folder is loaded twice: by ``bminf-lite serve`` in a process of its own, and here. Requests of one text
go in turn to ``/v1/embeddings``, over one socket that stays open and with as little work as possible, and to
:meth:`bminf_lite.Model.embed` of the same text in tokens; between two of them is a pause, so that nothing is warm that
would not be for a single client. Prints a line of JSON: for each side the quartiles of the times in ms, and
``added_ms``, the difference of the medians.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from server_process import NAME, ServerProcess

import bminf_lite

LENGTH = re.compile(rb"(?is)^HTTP.*?\r\ncontent-length: *(\d+)\r\n.*?\r\n\r\n")
TEXT = "What is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two requests")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--base64", action="store_true", help="ask for base64, as the openai client does")
    arguments = parser.parse_args()
    server = ServerProcess(arguments.folder, "--device", arguments.device, "--embeddings")
    try:
        with bminf_lite.load(arguments.folder, device=arguments.device, embeddings=True) as model:
            print(json.dumps(measure(server, model, arguments)))
    finally:
        server.stop()


def measure(server: ServerProcess, model: bminf_lite.Model, arguments: argparse.Namespace) -> dict[str, Any]:
    """The times of both sides."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = {"model": NAME, "input": arguments.text} | ({"encoding_format": "base64"} if arguments.base64 else {})
    encoded = json.dumps(body).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(encoded)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + encoded
    assert model.pooler is not None
    [text] = model.pooler.texts.encode([arguments.text])
    ids = list(map(int, text.token_ids))

    def over_http() -> None:
        connection.sendall(request)
        answer, end = b"", -1
        while end < 0 or len(answer) < end:
            answer += connection.recv(1 << 20)
            if end < 0 and (found := LENGTH.search(answer)):
                end = found.end() + int(found[1])
        if b" 200 " not in answer[:20]:
            raise RuntimeError(answer.decode())

    sides: dict[str, Callable[[], Any]] = {"model": lambda: model.embed(ids), "http": over_http}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(-20, arguments.requests):
        for side, work in sides.items():
            time.sleep(arguments.pause)
            start = time.perf_counter()
            work()
            if number >= 0:
                times[side].append(1e3 * (time.perf_counter() - start))
    found: dict[str, Any] = {"tokens": len(ids), "device": model.describe()}
    for side in sides:
        found[f"{side}_ms"] = [round(value, 3) for value in statistics.quantiles(times[side])]
    found["added_ms"] = round(statistics.median(times["http"]) - statistics.median(times["model"]), 3)
    return found


if __name__ == "__main__":
    main()
