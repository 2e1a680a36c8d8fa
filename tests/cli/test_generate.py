"""``bminf-lite generate``: its output, its streams, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny_checkpoint
from adapter_files import random_adapter
from cli_kit import run
from click.testing import Result

import bminf_lite


@pytest.fixture
def model(source: Path) -> Path:
    return source


def generate(model: Path, *arguments: str, stdin: bytes | None = None) -> Result:
    return run("generate", model, "--device", "cpu", *arguments, stdin=stdin)


def test_text_goes_to_stdout_and_equals_the_api(model: Path) -> None:
    options = ["--max-new-tokens", "12", "--temperature", "1", "--seed", "3"]
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = loaded.generate("hello", max_new_tokens=12, temperature=1.0, seed=3).text
    for stop in ([], [expected[6], expected[3]]):
        result = generate(model, "hello", *options, *(part for text in stop for part in ("--stop", text)))
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected[: min(map(expected.index, stop), default=None)] + "\n" and not result.stderr


def test_drafts_are_options_of_the_command(model: Path) -> None:
    options = ["hello", "--max-new-tokens", "12"]
    plain = generate(model, *options)
    for value in ("none", "ngram", json.dumps({"model": str(model), "num_speculative_tokens": 3})):
        found = generate(model, *options, "--speculative", value)
        assert (found.exit_code, found.stdout, found.stderr) == (0, plain.stdout, "")
    wrong = generate(model, *options, "--speculative", "medusa")
    assert wrong.exit_code == 2 and "method is 'medusa', but must be one of" in wrong.stderr


def test_an_adapter_is_an_option_of_the_command(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", model)
    with bminf_lite.load(model, device="cpu", adapters={"french": adapter}) as loaded:
        expected = loaded.generate("hello", max_new_tokens=12, adapter="french").text
    found = generate(model, "hello", "--max-new-tokens", "12", "--adapter", f"french={adapter}")
    assert (found.exit_code, found.stdout, found.stderr) == (0, expected + "\n", "")
    assert generate(model, "hello", "--max-new-tokens", "12").stdout != found.stdout
    wrong = generate(model, "hello", "--adapter", str(adapter))
    assert wrong.exit_code == 2 and "is not NAME=FOLDER, such as french=adapters/french" in wrong.stderr
    missing = generate(model, "hello", "--adapter", "a=nothing")
    assert missing.exit_code == 1 and "give the folder that PEFT saved the adapter in" in missing.stderr


def test_a_dash_reads_stdin_without_its_last_newline_and_stats_go_to_stderr(model: Path) -> None:
    result = generate(model, "-", "--max-new-tokens", "5", "--stats", stdin="à bientôt\n".encode())
    assert result.stdout == generate(model, "à bientôt", "--max-new-tokens", "5").stdout
    for words in ("prompt 12 tokens", "new 5 tokens", "tokens/s", "finished by length"):
        assert words in result.stderr


def test_json_is_one_object_for_one_prompt(model: Path) -> None:
    result = generate(model, "hello", "--json", "--max-new-tokens", "4")
    value = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1 and "id" not in value
    assert (len(value["token_ids"]), value["finish_reason"], value["prompt_tokens"]) == (4, "length", 6)


def test_an_empty_prompt_starts_from_the_begin_of_text_token(model: Path, tmp_path: Path) -> None:
    value = json.loads(generate(model, "", "--json", "--max-new-tokens", "4").stdout)
    with bminf_lite.load(model, device="cpu") as loaded:
        assert value["token_ids"] == loaded.generate("", max_new_tokens=4).token_ids
    without = tiny_checkpoint.write(tmp_path / "without")
    tokenizer = json.loads((without / "tokenizer.json").read_text())
    (without / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    result = generate(without, "")
    assert result.exit_code == 2 and "the prompt is empty" in result.stderr


def test_the_statistics_tell_which_length_ended_a_completion(model: Path) -> None:
    ended = generate(model, "x" * 100, "--stats", "--max-new-tokens", "60").stderr
    assert "finished by context (the model's 128 tokens are full)" in ended
    ended = generate(model, "x", "--stats", "--max-new-tokens", "3").stderr
    assert "finished by length (--max-new-tokens 3)" in ended


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
    value = json.loads(generate(model, "hi", "--chat", "--system", "be kind", "--json", "--max-new-tokens", "6").stdout)
    text = "[system]be kind\n[user]hi\n[assistant]"
    with bminf_lite.load(model, device="cpu") as loaded:
        expected = loaded.generate(text, add_special_tokens=False, max_new_tokens=6)
    assert (value["prompt_tokens"], value["token_ids"]) == (len(text), expected.token_ids)


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
        (["x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--stop", ""], "stop"),
        (["x", "--device", "tpu"], "tpu"),
        (["x" * 200], "128"),
        (["x", "--memory-limit", "6 elephants"], "6 elephants"),
        (["x", "--memory-limit", "0"], "0"),
    ],
)
def test_wrong_usage_is_2_and_names_the_value(model: Path, arguments: list[str], words: str) -> None:
    result = generate(model, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr and "Traceback" not in result.stderr


def test_all_values_out_of_range_are_reported_before_loading() -> None:
    result = generate(Path("no such folder"), "x", "--temperature", "-1", "--top-p", "0", "--min-p", "nan")
    assert result.exit_code == 2
    assert all(word in result.stderr for word in ("temperature", "top_p", "min_p"))


def test_stdin_that_is_not_utf8(model: Path) -> None:
    result = generate(model, "-", stdin=b"caf\xe9")
    assert result.exit_code == 2 and "stdin" in result.stderr and "UTF-8" in result.stderr


def test_every_invalid_line_of_a_file_of_prompts_is_reported(model: Path, tmp_path: Path) -> None:
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
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.findall(r"line (\d+):", result.stderr) == [str(i) for i in range(2, 2 + len(bad))]
    prompts.write_text("\n \n")
    assert "no prompts" in generate(model, "--prompts", str(prompts)).stderr


def test_every_prompt_of_a_file_that_cannot_be_encoded_is_reported(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    wrong = {"half": "\ud800", "long": "x" * 200}
    lines = [{"prompt": "fine"}, *({"prompt": text, "id": name} for name, text in wrong.items())]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    result = generate(model, "--prompts", str(prompts))
    assert result.exit_code == 2
    for words in ("prompt half: ", "surrogate", "prompt long: ", "201", "128"):
        assert words in result.stderr


def test_a_byte_order_mark_is_dropped(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}', encoding="utf-8-sig")
    options = ["--json", "--max-new-tokens", "2"]
    assert json.loads(generate(model, "--prompts", str(prompts), *options).stdout)["prompt_tokens"] == 6
    assert json.loads(generate(model, "-", *options, stdin="\ufeffhello".encode()).stdout)["prompt_tokens"] == 6


def test_a_chat_without_a_template(tmp_path: Path) -> None:
    result = generate(tiny_checkpoint.write(tmp_path / "model", chat_template=None), "x", "--chat")
    assert result.exit_code == 2 and "chat template" in result.stderr


def test_log_probabilities_and_tokens_after_the_end(tmp_path: Path) -> None:
    model = tiny_checkpoint.write(tmp_path / "m", generation_config={"eos_token_id": list(range(256))})
    assert len(json.loads(generate(model, "x", "--json").stdout)["token_ids"]) == 1
    value = json.loads(generate(model, "x", "--json", "--logprobs", "--ignore-eos", "--max-new-tokens", "5").stdout)
    assert len(value["token_ids"]) == len(value["logprobs"]) == 5
    result = generate(model, "x", "--logprobs")
    assert result.exit_code == 2 and "--logprobs needs --json" in result.stderr


@pytest.mark.parametrize("option", ["--max-batch", "--context"])
def test_limits_of_the_engine_reach_it(model: Path, option: str) -> None:
    assert generate(model, "x", option, "2", "--max-new-tokens", "2").exit_code == 0
    result = generate(model, "x", option, "0")
    assert result.exit_code == 2 and f"{option[2:].replace('-', '_')} is 0" in result.stderr


def test_the_text_follows_a_grammar(model: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}')
    result = generate(model, "hello", "--json-schema", str(schema), "--temperature", "2", "--seed", "1")
    assert isinstance(json.loads(result.stdout), list), result.stderr
    assert re.fullmatch("[a-c]{2,4}\n", generate(model, "hello", "--regex", "[a-c]{2,4}").stdout)
    assert generate(model, "hello", "--choice", "yes", "--choice", "no").stdout in ("yes\n", "no\n")
    schema.write_text('{"type": "arra"}')
    for arguments, message in (
        (["--regex", "a", "--choice", "b"], "only one of them"),
        (["--regex", "a("], "unclosed group"),
        (["--json-schema", str(schema)], "Invalid type: arra"),
    ):
        refused = generate(tmp_path / "no model is loaded", "hello", *arguments)
        assert refused.exit_code == 2 and message in refused.stderr
