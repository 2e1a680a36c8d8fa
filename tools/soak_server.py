"""Mixed traffic for a server, with clients that leave, and a check that nothing is lost and nothing is kept.

It starts ``bminf-lite serve`` on the CPU with the demo model, or another folder. Some clients at a time send requests
of all kinds, valid and not: whole and streamed, greedy and random, with grammars and calls, with long common prefixes;
some are read slowly, some are left before or while the answer comes. At the end:

- every request that was not left has had its answer, and the answer was what its kind promises;
- a greedy answer was the same each time, whatever ran beside it;
- no request runs or waits, and none holds a block of the cache;
- memory, files and processes are those of the middle of the time;
- the server ends by SIGTERM with the exit code 0, and its log has no traceback.

Run ``python tools/soak_server.py --seconds 3600 --clients 16``. It prints a report as JSON; the exit code is 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from server_process import NAME, ServerProcess, demo_folder

TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}<assistant>"""
WORDS = [
    "the",
    "terminal",
    "file",
    "system",
    "shell",
    "window",
    "cat",
    "program",
    "user",
    "command",
    "text",
    "line",
    "memory",
    "device",
    "page",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
GREEDY_PROMPTS = 6
SERVER_OPTIONS = ("--max-batch", "8")
"""A cache so small that it is soon full, and that sequences have to wait for blocks."""
WARM_UP = 0.25
"""The part of the time after which all processes that the server needs have started."""
MORE_FILES = 16
"""Files more than after the warm-up that may be open: of a worker process, or of connections that are being closed."""
MEBIBYTE = 1 << 20


class Soak:
    """The traffic against one server, and what came of it."""

    def __init__(self, url: str, seed: int):
        self.sent: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.refused = 0
        self.problems: list[str] = []
        self._greedy: dict[int, str] = {}
        self._deck: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[bool]]] = []
        self._url = url
        self._seed = seed
        self._kinds: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[bool]]] = [
            self.greedy,
            self.whole_chat,
            self.streamed_chat,
            self.several,
            self.echo,
            self.long_prefix,
            self.structured,
            self.called,
            self.wrong,
            self.tokens,
            self.slow_reader,
            self.left_while_streaming,
            self.left_early,
            self.left_with_several,
        ]

    async def start_processes(self) -> None:
        """Send more conversations at once than the server has processes for them, so that it starts all of these."""
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            await asyncio.gather(*(post(http, "/v1/chat/completions", body) for _ in range(16)))

    async def run(self, clients: int, seconds: float) -> None:
        """Send requests from some clients at a time for some time, each kind once at least, and wait for the last."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, end) for number in range(clients)))

    async def _client(self, number: int, end: float) -> None:
        chance = random.Random(self._seed * 1000 + number)
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
            while time.monotonic() < end or len(self.sent) < len(self._kinds):
                kind = self._next_kind(chance)
                self.sent[kind.__name__] += 1
                try:
                    stayed = await kind(http, chance)
                    (self.answered if stayed else self.left)[kind.__name__] += 1
                except httpx.HTTPStatusError as error:
                    if error.response.status_code == 429:
                        self.refused += 1
                        await asyncio.sleep(float(error.response.headers["Retry-After"]))
                    else:
                        self.problems.append(f"{kind.__name__}: {error} {error.response.text[:300]}")
                except Exception as error:
                    self.problems.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:500])

    def _next_kind(self, chance: random.Random) -> Callable[[httpx.AsyncClient, random.Random], Awaitable[bool]]:
        """The kinds come in random orders, each once before any comes again."""
        self._deck = self._deck or chance.sample(self._kinds, len(self._kinds))
        return self._deck.pop()

    # Each kind sends one request and checks the answer; false if it left before the end.

    async def greedy(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        number = chance.randrange(GREEDY_PROMPTS)
        body = {"prompt": " ".join(WORDS[number : number + 3]), "temperature": 0, "max_tokens": 16}
        text = (await post(http, "/v1/completions", body))["choices"][0]["text"]
        expect(text == self._greedy.setdefault(number, text), f"{text!r}, before it was {self._greedy[number]!r}")
        return True

    async def whole_chat(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        count = chance.randint(1, 40)
        answer = await post(http, "/v1/chat/completions", {"messages": message(chance), "max_tokens": count})
        reason, generated = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        expect(reason == "stop" or (reason == "length" and generated == count), f"{reason} after {generated} tokens")
        return True

    async def streamed_chat(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        body = {"messages": message(chance), "max_tokens": chance.randint(1, 60), "stop": ["the", "\n\n"]}
        chunks = [chunk async for chunk in stream(http, "/v1/chat/completions", body)]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        expect(chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length"), "no finish reason")
        expect("the" not in text and "\n\n" not in text, "a stop text in the answer")
        return True

    async def several(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        body = {"prompt": [prompt(chance), prompt(chance)], "n": 3, "max_tokens": 8, "logprobs": 2}
        choices = (await post(http, "/v1/completions", body))["choices"]
        expect([choice["index"] for choice in choices] == list(range(6)), "choices are missing")
        expect(all(len(choice["logprobs"]["tokens"]) <= 8 for choice in choices), "too many tokens")
        return True

    async def echo(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        text = prompt(chance)
        body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
        (choice,) = (await post(http, "/v1/completions", body))["choices"]
        scores = choice["logprobs"]["token_logprobs"]
        expect(choice["text"] == text and scores[0] is None and all(s <= 0 for s in scores[1:]), "another text")
        return True

    async def long_prefix(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        text = " ".join(WORDS * chance.choice([8, 16, 24])) + prompt(chance)
        answer = await post(http, "/v1/completions", {"prompt": text, "max_tokens": 4})
        usage = answer["usage"]
        expect(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "usage does not add up")
        return True

    async def structured(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"messages": message(chance), "max_tokens": 200, "response_format": form}
        (choice,) = (await post(http, "/v1/chat/completions", body))["choices"]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            expect(value["name"] in ("a", "b") and 0 <= value["count"] <= 99, f"{value} does not follow the schema")
        return True

    async def called(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
        body = {"messages": message(chance), "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        arguments, reason = "", None
        async for chunk in stream(http, "/v1/chat/completions", {**body, "max_tokens": 200}):
            (choice,) = chunk["choices"]
            arguments += "".join(c["function"].get("arguments", "") for c in choice["delta"].get("tool_calls", ()))
            reason = choice["finish_reason"]
        expect(reason == "tool_calls" and set(json.loads(arguments)) == {"name", "count"}, f"{reason}: {arguments}")
        return True

    async def wrong(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        body = chance.choice([{"max_tokens": -1}, {"temperature": "hot"}, {"prompt": 5}, {"model": "x"}, {"n": 10**6}])
        response = await http.post("/v1/completions", json={"prompt": "a", "model": NAME, **body})
        expect(response.status_code in (400, 404) and response.json()["error"]["message"], response.text[:200])
        return True

    async def tokens(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        text = prompt(chance)
        ids = (await post(http, "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        back = (await post(http, "/detokenize", {"tokens": ids}))["prompt"]
        expect(back == text, f"{text!r} became {back!r}")
        return True

    async def slow_reader(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        last = None
        async for chunk in stream(http, "/v1/completions", {"prompt": prompt(chance), "max_tokens": 40}):
            last = chunk
            await asyncio.sleep(0.05)
        expect(last is not None and last["choices"][0]["finish_reason"] is not None, "no finish reason")
        return True

    async def left_while_streaming(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        count = chance.randint(1, 5)
        async for _ in stream(http, "/v1/completions", {"prompt": prompt(chance), "max_tokens": 900}):
            count -= 1
            if not count:
                return False
        return True

    async def left_early(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        body = {"prompt": " ".join(WORDS * 20), "max_tokens": 500}
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(post(http, "/v1/completions", body), chance.uniform(0, 0.3))
            return True
        return False

    async def left_with_several(self, http: httpx.AsyncClient, chance: random.Random) -> bool:
        async for _ in stream(http, "/v1/chat/completions", {"messages": message(chance), "n": 4, "max_tokens": 500}):
            return False
        return True


def prompt(chance: random.Random) -> str:
    """A few words."""
    return " ".join(chance.choices(WORDS, k=chance.randint(1, 12)))


def message(chance: random.Random) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": prompt(chance)}]


def expect(is_so: bool, otherwise: str) -> None:
    """Raise ``AssertionError`` unless a promise is kept."""
    if not is_so:
        raise AssertionError(otherwise)


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The JSON answer to a request that should succeed."""
    response = await http.post(path, json={"model": NAME, **body})
    response.raise_for_status()
    return response.json()


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The chunks of a streamed answer, which must end with ``[DONE]``. To stop reading is to leave."""
    async with http.stream("POST", path, json={"model": NAME, **body, "stream": True}) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                expect("error" not in chunk, f"an error in the stream: {chunk}")
                yield chunk
        raise AssertionError("the stream ends without [DONE]")


# -- what the server keeps --------------------------------------------------------------------------------------------


class Watch:
    """Samples what a server's processes hold, once in ``interval`` seconds."""

    def __init__(self, server: ServerProcess, interval: float):
        self.samples: list[dict[str, int]] = []
        self._process = psutil.Process(server.process.pid)
        self._interval = interval

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.samples.append(self.sample())
            await asyncio.sleep(self._interval)

    def sample(self) -> dict[str, int]:
        """Bytes of memory that no other process shares, and open files."""
        held = Counter(bytes=0, files=0)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                held.update(bytes=process.memory_full_info().uss, files=process.num_fds())
        return dict(held)

    def processes(self) -> list[psutil.Process]:
        """The server's processes."""
        return [self._process, *self._process.children(recursive=True)]

    def growth(self) -> int:
        """Bytes by which the median of the last quarter exceeds that of the second."""
        sizes = [sample["bytes"] for sample in self.samples]
        quarter = max(1, len(sizes) // 4)
        return median(sizes[-quarter:]) - median(sizes[quarter : 2 * quarter] or sizes)


def median(values: list[int]) -> int:
    """The middle value."""
    return sorted(values)[len(values) // 2]


def metrics(url: str) -> dict[str, float]:
    """The server's gauges of what it does now."""
    text = httpx.get(f"{url}/metrics", timeout=120).raise_for_status().text
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples if sample.name in wanted}


def idle_problems(url: str, seconds: float = 120) -> list[str]:
    """What does not come to rest after the last request."""
    end = time.monotonic() + seconds
    while any((found := metrics(url)).values()) and time.monotonic() < end:
        time.sleep(0.2)
    if len(found) < 3:
        return [f"/metrics lacks gauges: it has {', '.join(found)}"]
    return [f"{name} is {value} {seconds:g} s after the last request" for name, value in found.items() if value]


async def soak(traffic: Soak, watch: Watch, clients: int, seconds: float) -> None:
    """Run the traffic with a watch beside it."""
    sampling = asyncio.create_task(watch.run())
    await traffic.run(clients, seconds)
    sampling.cancel()
    await asyncio.sleep(1)  # the server closes its connections


def run(
    folder: Path | None, clients: int, seconds: float, allowed_growth: int, seed: int = 0, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Soak a new server, with more ``options`` of its command.

    The report has the counts, and ``problems``, which is empty if all checks pass.
    """
    with tempfile.TemporaryDirectory() as work:
        server = ServerProcess(folder or demo_folder(Path(work) / "model", TEMPLATE), *SERVER_OPTIONS, *options)
        try:
            traffic, watch = Soak(server.url, seed), Watch(server, max(0.5, seconds / 200))
            asyncio.run(traffic.start_processes())
            asyncio.run(soak(traffic, watch, clients, WARM_UP * seconds))
            before, files = watch.processes(), watch.sample()["files"]
            asyncio.run(soak(traffic, watch, clients, (1 - WARM_UP) * seconds))
            problems = traffic.problems + idle_problems(server.url)
            if not set(before) <= set(watch.processes()):
                problems.append("a process of the server has ended")
            if (now := watch.sample()["files"]) > files + MORE_FILES:
                problems.append(f"{now} files are open, after the warm-up it was {files}")
            if watch.growth() > allowed_growth:
                grown = watch.growth() / MEBIBYTE
                problems.append(f"memory has grown by {grown:.1f} MiB from the second quarter to the last")
            if code := server.stop():
                problems.append(f"the server has ended with the exit code {code}")
            if "Traceback" in server.log:
                problems.append(f"the server's log has a traceback:\n{server.log[-3000:]}")
        finally:
            if server.process.poll() is None:
                server.kill()
    return {
        "seconds": seconds,
        "clients": clients,
        "sent": sum(traffic.sent.values()),
        "answered": dict(traffic.answered),
        "left": dict(traffic.left),
        "refused": traffic.refused,
        "memory_mib": [round(sample["bytes"] / MEBIBYTE, 1) for sample in (watch.samples[0], watch.samples[-1])],
        "growth_mib": round(watch.growth() / MEBIBYTE, 2),
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint with a chat template; by default the demo model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8, help="how many requests at a time")
    parser.add_argument("--allowed-growth", type=float, default=8, metavar="MIB", help="of memory, in MiB")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    allowed = int(options.allowed_growth * MEBIBYTE)
    report = run(options.folder, options.clients, options.seconds, allowed, options.seed)
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
