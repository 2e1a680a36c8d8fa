"""``bminf-lite generate``: what it prints, where, and what it says about wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_checkpoint
from click.testing import CliRunner, Result

import bminf_lite
from bminf_lite.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("generate") / "model")


def generate(model: Path, *arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", str(model), "--device", "cpu", *arguments], input=stdin)


def test_text_goes_to_stdout_and_equals_the_api(model: Path) -> None:
    result = generate(model, "hello", "--max-new-tokens", "12", "--temperature", "1", "--seed", "3")
    assert result.exit_code == 0, result.stderr
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = loaded.generate("hello", max_new_tokens=12, temperature=1.0, seed=3)
    assert result.stdout == f"{expected}\n"
    assert result.stderr == ""


def test_a_dash_reads_stdin_without_its_last_newline(model: Path) -> None:
    from_stdin = generate(model, "-", "--max-new-tokens", "5", stdin="à bientôt\n".encode())
    assert from_stdin.exit_code == 0, from_stdin.stderr
    assert from_stdin.stdout == generate(model, "à bientôt", "--max-new-tokens", "5").stdout


def test_json_is_one_object_for_one_prompt(model: Path) -> None:
    result = generate(model, "hello", "--json", "--max-new-tokens", "4")
    value = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert len(value["token_ids"]) == 4
    assert (value["finish_reason"], value["prompt_tokens"]) == ("length", 6)
    assert "id" not in value


def test_a_file_of_prompts_gives_a_line_each_in_order(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    conversation = [{"role": "user", "content": "b"}]
    lines = [{"prompt": "a"}, {"prompt": "a longer prompt", "id": "second"}, {"messages": conversation}]
    prompts.write_text("\n\n".join(map(json.dumps, lines)))
    result = generate(model, "--prompts", str(prompts), "--json", "--stats", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.stderr
    values = [json.loads(line) for line in result.stdout.splitlines()]
    assert [v["id"] for v in values] == [1, "second", 5]
    assert [v["prompt_tokens"] for v in values] == [2, 16, len("[user]b\n[assistant]")]
    for line, value in zip(lines[:2], values, strict=False):
        alone = json.loads(generate(model, line["prompt"], "--json", "--max-new-tokens", "6").stdout)
        assert alone["token_ids"] == value["token_ids"]
    assert "total 3 prompts" in result.stderr


def test_a_file_of_prompts_as_text_has_headings(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "id": "first"}\n{"prompt": "b"}\n')
    result = generate(model, "--prompts", str(prompts), "--max-new-tokens", "3")
    assert re.findall(r"^--- (\w+)$", result.stdout, re.MULTILINE) == ["first", "2"]


def test_chat_renders_the_template(model: Path) -> None:
    chat = generate(model, "hi", "--chat", "--system", "be kind", "--json", "--max-new-tokens", "6")
    assert chat.exit_code == 0, chat.stderr
    text = "[system]be kind\n[user]hi\n[assistant]"
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = loaded.generate(text, add_special_tokens=False, max_new_tokens=6)
    value = json.loads(chat.stdout)
    assert value["prompt_tokens"] == len(text)
    assert value["token_ids"] == expected.token_ids


def test_stats_go_to_stderr(model: Path) -> None:
    result = generate(model, "hello", "--stats", "--max-new-tokens", "7")
    assert result.stdout == generate(model, "hello", "--max-new-tokens", "7").stdout
    assert "prompt 6 tokens" in result.stderr
    assert "new 7 tokens" in result.stderr
    assert "tokens/s" in result.stderr
    assert "finished by length" in result.stderr


def test_stop_texts_end_the_completion(model: Path) -> None:
    def complete(seed: int, *more: str) -> str:
        options = ("--max-new-tokens", "40", "--temperature", "1", "--seed", str(seed))
        return generate(model, "hello", *options, *more).stdout.removesuffix("\n")

    seed, marks = next(  # the random model writes random bytes: look for two places with two letters each
        (seed, found) for seed in range(50) if len(found := re.findall(r"[!-~]{2}", complete(seed)[3:])) > 1
    )
    text = complete(seed)
    expected = text[: min(text.index(mark) for mark in marks)]
    assert complete(seed, "--stop", marks[1], "--stop", marks[0]) == expected


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path / "model", generation_config={"max_new_tokens": 3})
    assert len(json.loads(generate(model, "x", "--json").stdout)["token_ids"]) == 3
    assert len(json.loads(generate(model, "x", "--json", "--max-new-tokens", "5").stdout)["token_ids"]) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "PROMPT"),
        (["x", "--system", "s"], "--chat"),
        (["x", "--prompts", __file__], "either"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--temperature", "-1", "--top-p", "0", "--top-k", "-2", "--min-p", "2"], "top_k"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--stop", ""], "stop"),
        (["x", "--device", "tpu"], "tpu"),
        (["x" * 200], "128"),
        ([""], "empty"),
        (["x", "--memory-limit", "6 elephants"], "6 elephants"),
        (["x", "--memory-limit", "0"], "0"),
    ],
)
def test_wrong_usage_is_2_and_names_the_value(model: Path, arguments: list[str], words: str) -> None:
    result = generate(model, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_all_that_is_out_of_range_is_told_at_once_and_before_loading() -> None:
    result = generate(Path("no such folder"), "x", "--temperature", "-1", "--top-p", "0", "--min-p", "nan")
    assert result.exit_code == 2
    assert all(word in result.stderr for word in ("temperature", "top_p", "min_p"))


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfe"])
def test_stdin_that_is_not_utf8(model: Path, content: bytes) -> None:
    result = generate(model, "-", stdin=content)
    assert result.exit_code == 2
    assert "stdin" in result.stderr
    assert "UTF-8" in result.stderr


def test_every_bad_line_of_a_file_of_prompts_is_told(model: Path, tmp_path: Path) -> None:
    bad = [
        "{",
        "[]",
        "{}",
        '{"prompt": 1}',
        '{"prompt": "x", "messages": []}',
        '{"promt": "x"}',
        '{"messages": []}',
        '{"messages": [{"content": "x"}]}',
        '{"prompt": "x", "id": [1]}',
        "[" * 100_000,
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(['{"prompt": "fine"}', *bad]))
    result = generate(model, "--prompts", str(prompts))
    assert result.exit_code == 2
    assert re.findall(r"line (\d+):", result.stderr) == [str(i) for i in range(2, 2 + len(bad))]
    assert result.stdout == ""


def test_every_prompt_of_a_file_that_cannot_be_encoded_is_told(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    wrong = {"half": "\ud800", "long": "x" * 200}
    lines = [{"prompt": ""}, {"prompt": "fine"}, *({"prompt": text, "id": name} for name, text in wrong.items())]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    result = generate(model, "--prompts", str(prompts))
    assert result.exit_code == 2
    assert "prompt 1: " in result.stderr
    assert "prompt half: " in result.stderr
    assert "surrogate" in result.stderr
    assert "prompt long: " in result.stderr
    assert "201" in result.stderr
    assert "128" in result.stderr


def test_a_byte_order_mark_is_no_text(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}', encoding="utf-8-sig")
    options = ["--json", "--max-new-tokens", "2"]
    assert json.loads(generate(model, "--prompts", str(prompts), *options).stdout)["prompt_tokens"] == 6
    assert json.loads(generate(model, "-", *options, stdin="\ufeffhello".encode()).stdout)["prompt_tokens"] == 6


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts(model: Path, tmp_path: Path, content: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    result = generate(model, "--prompts", str(prompts))
    assert result.exit_code == 2
    assert "no prompts" in result.stderr


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    result = generate(tmp_path / "none", "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / "none") in result.stderr


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path / "model", chat_template=None)
    result = generate(model, "x", "--chat")
    assert result.exit_code == 2
    assert "chat template" in result.stderr
