"""A loaded model: prompts of every kind in, text and tokens out, and errors that say what to do."""

from __future__ import annotations

import copy
import json
import pickle
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import tokenizer_kit
from model_kit import WatchedBackend, make_model, prompt_of

import bminf_lite
from bminf_lite import backend
from bminf_lite.api import Model
from bminf_lite.checkpoint.opened_model import configured_eos_ids
from bminf_lite.cuda import doctor
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import CheckpointError, DeviceError, NoDriverError, UsageError
from bminf_lite.text import prompts
from bminf_lite.text.chat_template import ChatTemplate
from bminf_lite.text.prompts import EncodedPrompt

MESSAGES = [{"role": "user", "content": "hi"}]
CONTEXT = 128


@pytest.fixture(scope="module")
def model(source: Path) -> Iterator[Model]:
    with bminf_lite.load(source, device="cpu") as model:
        yield model


def load(path: Path) -> Model:
    return bminf_lite.load(path, device="cpu")


def without_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    return folder


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_gives_a_result_and_a_list_gives_a_list(model):
    result = model.generate("hello", max_new_tokens=5)
    assert (result.prompt_tokens, len(result.token_ids), str(result)) == (6, 5, result.text)
    many = model.generate(["a longer one", "hello", model.tokenizer.encode("hello")], max_new_tokens=5)
    assert [r.prompt_tokens for r in many] == [13, 6, 6]
    assert many[1].token_ids == many[2].token_ids == result.token_ids
    assert model.generate([]) == []
    assert list(model.stream([])) == []


def test_every_kind_of_prompt_means_the_same(model):
    ids = model.tokenizer.encode("hello")
    expected = model.generate("hello", max_new_tokens=6)
    for prompt in (ids, tuple(ids), np.array(ids), model.encode("hello"), EncodedPrompt(tuple(ids))):
        result = model.generate(prompt, max_new_tokens=6)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
    batch = model.generate(np.array([ids, ids]), max_new_tokens=6)
    assert [r.token_ids for r in batch] == [expected.token_ids] * 2
    assert model.generate("hello", add_special_tokens=False, max_new_tokens=1).prompt_tokens == 5


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        np.array(3),
        [1.5],
        [True],
        ["a", None],
        {"role": "user"},
        [[1], [None]],
    ],
)
def test_invalid_prompts(model, prompt):
    with pytest.raises(UsageError, match=r"a prompt is text, token ids or messages|a token id is a whole number"):
        model.generate(prompt)


def test_all_arguments_are_checked_before_the_first_piece(model):
    for prompt, options, words in (
        ([1] * 140, {}, "too long: it has 140 tokens, but the model's context is 128 .* shorten it by 13"),
        ([5, -1], {}, "token 1 is -1, but a token id is a whole number from 0 to 259"),
        (["fine", [1] * 500, [], [999]], {}, "(?s)prompt 1: .* has 500.*prompt 2: .* empty.*prompt 3: token 0 is 999"),
        ("ok", {"temperature": -1}, "temperature"),
        ("ok", {"temprature": 1}, "temprature"),
        ([], {"top_p": 2}, "top_p"),
    ):
        with pytest.raises(UsageError, match=words):
            model.stream(prompt, **options)
    assert len(model.generate([1] * (CONTEXT - 1), ignore_eos=True).token_ids) == 1


# -- text -------------------------------------------------------------------------------------------------------------


def test_the_pieces_together_are_the_result(model):
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"stop": ["e", "\ufffd"], "temperature": 1.0, "seed": 4}):
        pieces = list(model.stream(["one", "and two"], max_new_tokens=20, **options))
        for index in (0, 1):
            mine = [p for p in pieces if p.index == index]
            assert [p.result is None for p in mine] == [True] * (len(mine) - 1) + [False]
            assert "".join(p.text for p in mine) == mine[-1].result.text
            assert [t for p in mine for t in p.token_ids] == mine[-1].result.token_ids


def test_a_stop_text_ends_the_completion(model):
    full = model.generate("hello", temperature=1.0, seed=1, max_new_tokens=60, ignore_eos=True)
    stop = full.text[10:12]
    cut = model.generate("hello", temperature=1.0, seed=1, max_new_tokens=60, ignore_eos=True, stop=stop)
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 60


def test_a_stop_text_within_the_first_tokens_ends_nothing(model):
    options = {"temperature": 1.0, "seed": 1, "max_new_tokens": 60, "ignore_eos": True}
    full = model.generate("hello", **options)
    stop = full.text[10:12]
    needed = len(model.generate("hello", stop=stop, **options).token_ids)
    assert len(model.generate("hello", stop=stop, min_tokens=needed - 1, **options).token_ids) == needed
    assert len(model.generate("hello", stop=stop, min_tokens=needed, **options).token_ids) > needed
    assert model.generate("hello", stop=stop, min_tokens=60, **options).text == full.text


def test_a_stop_text_ends_its_request_while_others_go_on(model):
    options = {"temperature": 1.0, "seed": 1, "max_new_tokens": 100, "ignore_eos": True}
    full = model.generate(["hello", "hello"], **options)
    stop = next(full[0].text[i : i + 2] for i in range(4, 40) if full[0].text[i : i + 2] not in full[1].text)
    before = model.stats()
    pieces = list(model.stream(["hello", "hello"], stop=stop, **options))
    ends = {p.index: p.result for p in pieces if p.result is not None}
    assert (ends[0].finish_reason, ends[1].finish_reason) == ("stop", "length")
    assert ends[1].token_ids == full[1].token_ids and len(ends[0].token_ids) < 60
    after = model.stats()
    assert after.steps - before.steps <= 103 and after.blocks_used == 0


def test_the_end_token_is_reported_but_has_no_text(source, tmp_path):
    """Even if the vocabulary does not call it special."""
    with load(source) as model:
        plain = model.generate("hello", max_new_tokens=12)
    end = plain.token_ids[6]
    first = plain.token_ids.index(end)
    with load(tiny_checkpoint.write(tmp_path / "m", generation_config={"eos_token_id": [257, end]})) as model:
        ended = model.generate("hello", max_new_tokens=12)
        ignored = model.generate("hello", max_new_tokens=12, ignore_eos=True)
        assert ended.text == model.tokenizer.decode(plain.token_ids[:first])
    assert (ended.token_ids, ended.finish_reason) == (plain.token_ids[: first + 1], "stop")
    assert (ignored.token_ids, ignored.finish_reason, ignored.text) == (plain.token_ids, "length", plain.text)


def test_a_completion_keeps_the_space_before_its_first_word_and_an_answer_does_not(tmp_path):
    """With a tokenizer that makes the space part of the word, and drops it at the start of a text."""
    spm = tokenizer_kit.sentencepiece_like()
    folder = tiny_checkpoint.write(tmp_path, vocab_size=spm.get_vocab_size(), bos_token_id=1, eos_token_id=2)
    (folder / "generation_config.json").write_text("{}")
    spm.save(str(folder / "tokenizer.json"))
    with load(folder) as model:
        head = model.network.output.head.weight
        bias = np.where(np.arange(len(head.values)) == spm.token_to_id("▁the"), 1e6, 0)
        object.__setattr__(head, "bias", bias.astype(np.float32))  # the model always says "the"
        ids = model.tokenizer.encode("cat")
        for prompt, options in (("cat", {}), (ids, {}), ("cat", {"add_special_tokens": False})):
            assert model.generate(prompt, max_new_tokens=2, **options).text == " the the"
        assert model.generate(model.encode(MESSAGES), max_new_tokens=2).text == "the the"
        assert [r.text for r in model.generate(["cat", MESSAGES], max_new_tokens=2)] == [" the the", "the the"]


# -- conversations ----------------------------------------------------------------------------------------------------


def test_messages_are_a_prompt(model):
    text = model.chat(MESSAGES)
    assert text == "[user]hi\n[assistant]"
    assert model.chat(MESSAGES, add_generation_prompt=False) == "[user]hi\n"
    expected = model.generate(text, add_special_tokens=False, max_new_tokens=6).token_ids
    assert model.generate(MESSAGES, max_new_tokens=6).token_ids == expected
    batch = model.generate([MESSAGES, text], add_special_tokens=False, max_new_tokens=6)
    assert [r.token_ids for r in batch] == [expected] * 2
    assert not model.encode(MESSAGES).continues
    with pytest.raises(UsageError, match="each message must be an object whose role is text; not so: 1"):
        model.generate([*MESSAGES, {"role": 1}])


def test_the_files_of_text_are_read_once_and_when_needed(tmp_path, monkeypatch):
    folder = tiny_checkpoint.write(tmp_path / "m", chat_template="{{ mood }}{{ messages[0].content }}")
    reads, made = [], []
    original, template = prompts.load_tokenizer, ChatTemplate.__init__
    monkeypatch.setattr(prompts, "load_tokenizer", lambda *a: reads.append(a) or original(*a))
    monkeypatch.setattr(ChatTemplate, "__init__", lambda self, *a, **k: made.append(self) or template(self, *a, **k))
    with load(folder) as model:
        model.logits([1, 2])
        assert not reads
        model.generate(["a", "b"], max_new_tokens=1)
        assert model.chat(MESSAGES, mood="!") == "!hi"
        assert model.chat(MESSAGES) == "hi"
    assert len(reads) == len(made) == 1


def test_without_a_chat_template(tmp_path):
    with load(tiny_checkpoint.write(tmp_path / "m", chat_template=None)) as model:
        for call in (model.chat, model.generate):
            with pytest.raises(UsageError, match="no chat template"):
                call(MESSAGES)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_token_ids_need_no_tokenizer(source, tmp_path):
    bare = without_tokenizer(tiny_checkpoint.write(tmp_path / "m"))
    with load(source) as complete, load(bare) as model:
        ids = complete.tokenizer.encode("hello")
        expected = complete.generate(ids, max_new_tokens=8).token_ids
        for call in (
            lambda: model.generate("hello"),
            lambda: model.generate(ids, stop="x"),
            lambda: model.chat(MESSAGES),
            lambda: model.tokenizer,
        ):
            with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*token ids work without"):
                call()
        result = model.generate(ids, max_new_tokens=8)
        assert (result.token_ids, result.text) == (expected, "")


def test_a_model_made_without_a_checkpoint_takes_ids():
    model = make_model()
    assert len(model.generate(prompt_of(3), max_new_tokens=2).token_ids) == 2
    with pytest.raises(UsageError, match="token ids"):
        model.generate("hello")


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 4}, {3}),
        ({"eos_token_id": [3, 5]}, {}, {3, 5}),
        ({"eos_token_id": None}, {"eos_token_id": 4}, {4}),
        ({"eos_token_id": []}, {"eos_token_id": 4}, set()),
        ({"eos_token_id": [9, 3]}, {"eos_token_id": 4}, {3}),
        ({"eos_token_id": [9, 10]}, {"eos_token_id": 4}, {4}),
        ({}, {"eos_token_id": 50256}, None),  # GPT-2's, which transformers saves with a smaller vocabulary too
        ({}, {}, None),
    ],
)
def test_where_end_tokens_are_configured(generation_config, config, expected):
    assert configured_eos_ids(generation_config, config, 9) == expected


@pytest.mark.parametrize("value", ["</s>", -1, [1, -1], [True], 1.0, {"id": 1}])
def test_end_tokens_that_are_no_ids(value):
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id is .* from 0 to 8"):
        configured_eos_ids({}, {"eos_token_id": value}, 9)


def test_the_tokenizer_s_end_token_is_the_last_resort(tmp_path):
    folder = tiny_checkpoint.write(tmp_path / "m", eos_token_id=None)
    (folder / "generation_config.json").write_text("{}")
    with load(folder) as model:
        assert model.eos_ids == {257}
    with load(without_tokenizer(folder)) as model:
        assert model.eos_ids == set()


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_batch": 2.5},
        {"max_batch": True},
        {"max_queue": 0},
        {"context": -1},
        {"context": "x"},
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": 1 << 17},
        {"memory_limit": -1},
        {"memory_limit": "6 apples"},
        {"memory_limit": []},
        {"kv_cache": "fp8"},
        *({"device": d} for d in ("tpu", "cuda:-1", "cuda:", "", 0, None)),
    ],
)
def test_invalid_arguments_of_load(source, options):
    (value,) = options.values()
    with pytest.raises(UsageError, match=re.escape(repr(value))):
        bminf_lite.load(source, **{"device": "cpu"} | options)


def test_a_model_that_fails_to_load_gives_its_device_back(source, monkeypatch):
    closed = []
    ops = WatchedBackend()
    monkeypatch.setattr(ops, "close", lambda: closed.append(True))
    monkeypatch.setattr(ops, "table", lambda *_: 1 / 0)
    monkeypatch.setattr(backend, "create", lambda *_: ops)
    with pytest.raises(ZeroDivisionError):
        bminf_lite.load(source)
    assert closed == [True]


def test_options_of_the_engine(source):
    options = {"max_batch": 2, "prefix_cache": False, "max_queue": 3, "max_num_batched_tokens": 40}
    with bminf_lite.load(source, device="cpu", **options) as model:
        assert model.engine_config.max_num_seqs == 2 and model.engine_config.max_num_batched_tokens == 40
        results = [model.generate([1] * 100, max_new_tokens=2) for _ in range(2)]
        assert [r.cached_tokens for r in results] == [0, 0]
        with pytest.raises(UsageError, match=r"4 more would exceed the bound of 3 \(max_queue\)"):
            model.generate([[1]] * 4)
    with load(source) as model:
        results = [model.generate([1] * 100, max_new_tokens=2) for _ in range(2)]
        assert [r.cached_tokens for r in results] == [0, 99]


# -- a closed model ---------------------------------------------------------------------------------------------------


def test_a_closed_model_raises_an_error(tmp_path):
    model = load(tiny_checkpoint.write(tmp_path / "m", max_position_embeddings=2**17))
    stream = model.stream("hello", max_new_tokens=100_000, ignore_eos=True)  # which takes minutes
    unused = model.stream("hello")
    next(stream)
    model.close()
    model.close()
    for call in (
        lambda: next(stream),
        lambda: next(unused),
        lambda: model.generate("x"),
        lambda: model.stream("x"),
        lambda: model.logits([1]),
    ):
        with pytest.raises(UsageError, match="the model is closed"):
            call()


def test_a_model_is_not_copied(model):
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied, pickled or sent to another process: load its folder"):
            copied(model)


def test_a_model_that_is_dropped_is_freed_at_once():
    model = make_model()
    model.generate(prompt_of(3), max_new_tokens=3)
    dropped = weakref.ref(model)
    engine = model._engine
    del model
    assert dropped() is None and not engine._thread.is_alive()
    assert len(list(make_model().stream(prompt_of(3), max_new_tokens=3))) == 3, "a stream keeps its model"


# -- results and logits -----------------------------------------------------------------------------------------------


def test_results_are_timed_and_serialisable(model):
    result = model.generate("hello", max_new_tokens=5, ignore_eos=True, logprobs=0)
    t = result.timings
    assert (t.prompt_tokens, t.new_tokens) == (6, 5)
    assert 0 < t.prompt_seconds < t.total_seconds == t.prompt_seconds + t.decode_seconds
    assert (t.prompt_tokens_per_second, t.decode_tokens_per_second) == (6 / t.prompt_seconds, 4 / t.decode_seconds)
    value = json.loads(json.dumps(result.to_dict()))
    assert (value["token_ids"], value["logprobs"]) == (result.token_ids, result.logprobs)
    one = model.generate("hello", max_new_tokens=1)
    assert one.timings.decode_tokens_per_second == 0 and one.logprobs is None and "logprobs" not in one.to_dict()


def test_logits_do_not_depend_on_the_chunk():
    whole = make_model().logits(prompt_of(40))
    assert whole.shape == (40, 61) and whole.dtype == np.float32
    np.testing.assert_allclose(make_model(chunk=7).logits(prompt_of(40)), whole, atol=1e-5)
    np.testing.assert_allclose(make_model(chunk=7).logits(prompt_of(40), device=True), whole, atol=1e-5)


@pytest.mark.parametrize("ids", [[], [61], [-1], [1] * 97, [1.5], [[1, 2]], "text", None])
def test_invalid_token_ids_for_logits(ids):
    ops = WatchedBackend()
    with pytest.raises(UsageError):
        make_model(ops).logits(ids)
    assert not ops.arrays


def test_logits_and_generation_take_what_encode_returns():
    model = make_model()
    with model:
        ids = prompt_of(12)
        encoded = model.encode(ids)
        assert np.array_equal(model.logits(encoded), model.logits(ids))
        assert np.array_equal(model.logits(encoded, start=3), model.logits(ids, start=3))
        assert model.generate(encoded, max_new_tokens=3).token_ids == model.generate(ids, max_new_tokens=3).token_ids
        with pytest.raises(UsageError, match="either an encoded prompt"):
            model.logits(encoded, source=[1])


def test_a_token_id_that_only_the_tokenizer_has_does_not_blame_the_prompt(tmp_path):
    folder = tiny_checkpoint.write(tmp_path / "m")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["special_tokens"]["<s>"]["ids"] = [999]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with load(folder) as model, pytest.raises(CheckpointError, match="the tokenizer gives the token id 999, but the"):
        model.generate("hello")


@pytest.mark.parametrize("context", [3, {"a": 1}, None, [], ["a", 1]])
def test_a_dialogue_of_another_type_is_refused(context):
    with pytest.raises(UsageError, match="a dialogue is a list of utterances"):
        make_model().dialogue(context)


def test_sampling_parameters_may_be_an_object():
    """Which is then complete: the checkpoint's defaults do not apply. Keywords replace its fields."""
    model = make_model()
    model.generation_config = {"max_new_tokens": 9}
    params = SamplingParams(max_new_tokens=3, temperature=1.0, seed=5)
    whole = model.generate(prompt_of(4), max_new_tokens=3, temperature=1.0, seed=5)
    assert model.generate(prompt_of(4), params).token_ids == whole.token_ids
    assert len(model.generate([prompt_of(4)], params, max_new_tokens=2)[0].token_ids) == 2
    with pytest.raises(UsageError, match="must be SamplingParams"):
        model.generate(prompt_of(4), 64)
    with pytest.raises(UsageError, match="no sampling option 'do_sample'"):
        model.generate(prompt_of(4), params, do_sample=True)


def test_a_model_says_what_it_is(tmp_path):
    folder = tiny_checkpoint.write(tmp_path / "m")
    with load(folder) as model:
        facts = "2 layers, 260 tokens in the vocabulary, context of 128"
        assert repr(model) == f"<bminf_lite.Model {folder}: {facts}, on cpu>"
    assert repr(model).endswith("closed>")
    assert "a model without a folder" in repr(make_model())


def test_closing_frees_the_memory_of_a_cpu_while_the_model_is_referenced():
    model = make_model()
    network = weakref.ref(model.network)
    model.close()
    assert network() is None
    with pytest.raises(UsageError, match="the model is closed"):
        model.generate(prompt_of(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "path is 3, but must be the path"),
        ({"path": None}, "path is None, but must be the path"),
        ({"device": None}, "device None is not one of"),
        ({"memory_limit": 1.5}, "not 1.5"),
        ({"max_batch": "4"}, "max_batch is '4'"),
        ({"max_batch": 65537}, "max_batch is 65537, but must be a whole number, 1 to 65,536"),
        ({"max_queue": None}, "max_queue is None"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no', but must be True or False"),
        ({"context": 2.0}, "context is 2.0"),
        ({"kv_cache": 8}, "kv_cache is 8"),
        ({"kv_cache": ["int8"]}, "kv_cache is"),
        ({"check": "yes"}, "check is 'yes'"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        bminf_lite.load(**({"path": tmp_path} | arguments))


@pytest.mark.parametrize(
    "arguments",
    [{"kv_cache": "int4"}, {"batch": 1.5}, {"context": "4k"}, {"link": 0}, {"link": "25"}, {"bandwidth": -1}],
)
def test_arguments_of_plan_are_refused_by_name(source, arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(UsageError, match=f"^{name} is {value!r}, but must be"):
        bminf_lite.plan(source, **({"gpu_memory": "8GiB", "link": 2e10} | arguments))


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_checkpoint.write(tmp_path / "m")
    report = bminf_lite.migrate("~/m", "~/int8")
    assert (tmp_path / "int8" / "model.safetensors").is_file() and "~" not in str(report)
    with bminf_lite.load("~/int8", device="cpu") as model:
        assert model.generate("x", max_new_tokens=1).token_ids


def test_no_gpu_is_no_news_and_an_unusable_one_is_reported_once(tmp_path, monkeypatch, capsys, caplog):
    def missing(error):
        def require_usable(index):
            raise error

        return require_usable

    folder = tiny_checkpoint.write(tmp_path / "m")
    for error, messages in ((NoDriverError("there is no driver"), 0), (DeviceError("CuPy is not installed"), 1)):
        monkeypatch.setattr(doctor, "require_usable", missing(error))
        caplog.clear()
        for _ in range(2):
            bminf_lite.load(folder).close()
        assert [record.name for record in caplog.records] == ["bminf_lite"] * messages
    assert "CuPy is not installed; computing on the CPU" in caplog.text
    assert capsys.readouterr() == ("", "")
