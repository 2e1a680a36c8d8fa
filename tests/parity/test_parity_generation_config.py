"""``generation_config.json``: greedy tokens are those of transformers, or the field that would change them is named."""

from __future__ import annotations

import json
from pathlib import Path

import parity_kit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bminf_lite
from bminf_lite.errors import CheckpointError

pytestmark = pytest.mark.parity
VOCAB, NEW = 40, 10
PROMPTS = {"llama": [3, 7, 20, 7], "t5": [5, 30, 12, 8, 1]}
CONFIGS = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 11,
    },
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 11,
    },
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request, tmp_path_factory):
    """A random model of transformers, its folder, and a prompt."""
    torch, transformers = parity_kit.torch, parity_kit.transformers
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(request.param, vocab_size=VOCAB, **CONFIGS[request.param])
    kind = transformers.AutoModelForSeq2SeqLM if request.param == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.4)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder, PROMPTS[request.param]


def both(case, values: dict) -> tuple[list[int], list[int]]:
    """The new tokens of transformers, and ours, by a file with ``values``."""
    model, folder, prompt = case
    path = Path(folder) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 11, "pad_token_id": 0, "decoder_start_token_id": 0} | values))
    model.generation_config = parity_kit.transformers.GenerationConfig.from_pretrained(folder)
    ids = parity_kit.torch.tensor([prompt])
    with parity_kit.torch.no_grad():
        tokens = model.generate(ids, attention_mask=parity_kit.torch.ones_like(ids), max_new_tokens=NEW)[0].tolist()
    with bminf_lite.load(folder) as loaded:
        ours = loaded.generate(prompt, max_new_tokens=NEW)
    return tokens[1 if model.config.is_encoder_decoder else len(prompt) :], list(ours.token_ids)


tokens = st.integers(0, VOCAB - 1)
several = st.lists(tokens, max_size=12, unique=True)
fields = st.fixed_dictionaries(
    {},
    optional={
        "suppress_tokens": st.lists(st.integers(0, VOCAB + 9), max_size=12, unique=True),
        "bad_words_ids": st.lists(tokens.map(lambda token: [token]), min_size=1, max_size=6),
        "sequence_bias": st.lists(
            st.tuples(tokens, st.floats(-20, 20, width=16).filter(bool)).map(lambda pair: [[pair[0]], pair[1]]),
            min_size=1,
            max_size=6,
            unique_by=lambda entry: entry[0][0],
        ),
        "begin_suppress_tokens": several,
        "min_new_tokens": st.integers(0, 1),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "decoder_start_token_id": tokens,
        "eos_token_id": st.lists(tokens, min_size=1, max_size=3, unique=True),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=fields)
def test_fields_that_the_sampler_obeys(case, values):
    expected, found = both(case, values)
    assert found == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(tokens, min_size=1, max_size=3, unique=True), length=st.integers(0, NEW))
def test_an_end_that_is_held_back(case, tokens, length):
    """Also one that may not come first, beside it."""
    names = ["min_new_tokens", *(["min_length"] if case[0].config.is_encoder_decoder else [])]
    for name in names:
        values = {"eos_token_id": tokens, name: length, "begin_suppress_tokens": tokens[:1]}
        expected, found = both(case, values)
        assert found == expected


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 3},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 1.5},
        {"bad_words_ids": [[3, 4], [5]]},
        {"sequence_bias": [[[3, 4], -5.0]]},
        {"exponential_decay_length_penalty": [2, 1.5]},
        {"forced_bos_token_id": 4},
        {"forced_eos_token_id": 4},
        {"guidance_scale": 1.5},
        {"min_length": 9},
        {"do_sample": True, "typical_p": 0.9},
        {"do_sample": True, "epsilon_cutoff": 0.1},
        {"do_sample": True, "eta_cutoff": 0.1},
    ],
    ids=lambda values: list(values)[-1],
)
def test_fields_that_it_cannot_obey_are_named(case, values):
    model, folder, prompt = case
    if "min_length" in values and model.config.is_encoder_decoder:
        return
    (Path(folder) / "generation_config.json").write_text(json.dumps(values))
    name = list(values)[-1]
    with pytest.warns(UserWarning, match=rf"not obeyed here: {name}"), bminf_lite.load(folder) as loaded:
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} (is|has) "):
            loaded.generate(prompt, max_new_tokens=NEW)
        params = bminf_lite.SamplingParams(max_new_tokens=3)
        assert len(loaded.generate(prompt, params).token_ids) <= 3
        if values.get("do_sample"):
            assert len(loaded.generate(prompt, temperature=0, max_new_tokens=3).token_ids) <= 3


@pytest.mark.parametrize(
    "values",
    [
        {"num_beams": 1, "num_beam_groups": 1, "length_penalty": 2.0, "early_stopping": True, "diversity_penalty": 0.0},
        {"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0},
        {"typical_p": 0.9, "epsilon_cutoff": 0.1, "top_k": 5, "top_p": 0.5, "temperature": 0.3},
        {"typical_p": 1.0, "do_sample": False, "min_length": 0, "max_length": 20, "use_cache": True},
        {"bad_words_ids": [[11]], "suppress_tokens": [], "begin_suppress_tokens": None, "forced_bos_token_id": None},
        {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.1, "transformers_version": "4.9"},
    ],
)
def test_fields_without_an_effect_are_not_mentioned(case, values, recwarn):
    expected, found = both(case, values)
    assert found == expected
    assert not [w for w in recwarn if "not obeyed" in str(w.message)]
