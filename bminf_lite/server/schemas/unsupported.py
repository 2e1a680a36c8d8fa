"""Fields of other servers (OpenAI's, vLLM's, SGLang's, llama.cpp's, TEI's) that would change an answer here.

Unknown fields are ignored, but a caller who gives one of these would get another answer than the one that it asks for.
So a request with one is refused, and the message says what to use instead. A value that asks for nothing is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any

from .base import Body, refused

_BEAMS = "there is no beam search: leave it out"
_STRUCTURE = "is not supported: use structured_outputs"
_SAMPLER = "this way of choosing tokens is not supported: use temperature, top_k, top_p and min_p"
_FORMAT = "is not supported here: use text.format, output_config.format or /v1/chat/completions"
_LONGER = "is not supported here: its name is max_tokens"


class UnsupportedFields(Body):
    """The fields of requests that generate."""

    use_beam_search: Annotated[Any, refused(_BEAMS, False)] = None
    num_beams: Annotated[Any, refused(_BEAMS, 1)] = None
    length_penalty: Annotated[Any, refused(_BEAMS, 1)] = None
    early_stopping: Annotated[Any, refused(_BEAMS, False)] = None

    mirostat: Annotated[Any, refused(_SAMPLER, 0, False)] = None
    mirostat_mode: Annotated[Any, refused(_SAMPLER, 0)] = None
    typical_p: Annotated[Any, refused(_SAMPLER, 1)] = None
    tfs_z: Annotated[Any, refused(_SAMPLER, 1)] = None
    top_a: Annotated[Any, refused(_SAMPLER, 0)] = None
    top_n_sigma: Annotated[Any, refused(_SAMPLER, 0, -1)] = None
    xtc_probability: Annotated[Any, refused(_SAMPLER, 0)] = None
    dry_multiplier: Annotated[Any, refused(_SAMPLER, 0)] = None
    dynatemp_range: Annotated[Any, refused(_SAMPLER, 0)] = None
    samplers: Annotated[Any, refused(_SAMPLER)] = None
    logits_processors: Annotated[Any, refused("is not supported, because it is a program: use logit_bias")] = None
    custom_logit_processor: Annotated[Any, refused("is not supported, because it is a program: use logit_bias")] = None
    allowed_token_ids: Annotated[Any, refused("is not supported: use logit_bias, or structured_outputs")] = None
    bad_words: Annotated[Any, refused("is not supported: forbid a token by a logit_bias of -100", [])] = None
    no_repeat_ngram_size: Annotated[Any, refused("is not supported: use repetition_penalty", 0)] = None
    repetition_detection: Annotated[Any, refused("is not supported: use max_tokens or a deadline")] = None
    thinking_token_budget: Annotated[Any, refused("is not supported: use max_tokens", -1)] = None

    n_predict: Annotated[Any, refused(_LONGER, -1)] = None
    max_new_tokens: Annotated[Any, refused(_LONGER)] = None
    min_new_tokens: Annotated[Any, refused("is not supported here: its name is min_tokens", 0)] = None
    stop_regex: Annotated[Any, refused("is not supported: use stop")] = None
    no_stop_trim: Annotated[Any, refused("is not supported: use include_stop_str_in_output", False)] = None
    truncate_prompt_tokens: Annotated[
        Any, refused("is not supported: send a shorter prompt; /tokenize counts its tokens")
    ] = None

    json_schema: Annotated[Any, refused(_STRUCTURE)] = None
    regex: Annotated[Any, refused(_STRUCTURE)] = None
    ebnf: Annotated[Any, refused(_STRUCTURE)] = None
    grammar: Annotated[Any, refused(_STRUCTURE, "")] = None
    guided_whitespace_pattern: Annotated[Any, refused("is not supported: white space in JSON is limited anyway")] = None

    skip_special_tokens: Annotated[Any, refused("special tokens have no text here: leave it out", True)] = None
    return_token_ids: Annotated[Any, refused("is not supported: /tokenize gives the ids of a text", False)] = None
    return_tokens_as_token_ids: Annotated[Any, refused("is not supported: tokens are named by their texts", False)] = (
        None
    )
    prompt_logprobs: Annotated[
        Any, refused("is not supported: use echo with logprobs on /v1/completions, which needs max_tokens 0 or more")
    ] = None
    prompt_embeds: Annotated[Any, refused("is not supported: give a text, token ids or messages")] = None
    mm_processor_kwargs: Annotated[Any, refused("is not supported: the model reads text only", {})] = None
    lora_path: Annotated[Any, refused("is not supported: name an adapter of the server as the model")] = None
    logprob_token_ids: Annotated[Any, refused("is not supported: use logprobs or top_logprobs", [])] = None
    watermarking: Annotated[Any, refused("is not supported: texts have no watermark", False)] = None
    vllm_xargs: Annotated[Any, refused("is not supported: there are no extensions", {})] = None
    return_hidden_states: Annotated[Any, refused("is not supported: the server gives tokens and texts", False)] = None


_TRUNCATION = "is not supported: truncate says whether a text that is too long is cut off, at its end, or is an error"
_ACTIVATION = "is not supported: scores are those that the model's configuration asks for"


class FieldsOfTexts(Body):
    """Fields of vLLM's and TEI's requests for vectors and scores that would change them."""

    truncate_prompt_tokens: Annotated[Any, refused(_TRUNCATION, -1)] = None
    truncation_side: Annotated[Any, refused(_TRUNCATION, "right")] = None
    truncation_direction: Annotated[Any, refused(_TRUNCATION, "right", "Right")] = None
    add_special_tokens: Annotated[
        Any, refused("is not supported: give /v1/embeddings token ids, which are taken as they are", True)
    ] = None
    use_activation: Annotated[Any, refused(_ACTIVATION, True)] = None
    activation: Annotated[Any, refused(_ACTIVATION, True)] = None
    softmax: Annotated[Any, refused(_ACTIVATION, True)] = None
    raw_scores: Annotated[Any, refused(_ACTIVATION, False)] = None
    embed_dtype: Annotated[Any, refused("is not supported: vectors are fp32", "float32")] = None
    endianness: Annotated[Any, refused("is not supported: numbers are little-endian", "native", "little")] = None
    late_chunking: Annotated[Any, refused("is not supported: each text has its own vector", False)] = None


class FieldsOfChats(Body):
    """Fields of chat completions that the other interfaces of conversations have under other names."""

    structured_outputs: Annotated[Any, refused(_FORMAT)] = None
    response_format: Annotated[Any, refused(_FORMAT)] = None
    guided_json: Annotated[Any, refused(_FORMAT)] = None
    guided_regex: Annotated[Any, refused(_FORMAT)] = None
    guided_choice: Annotated[Any, refused(_FORMAT)] = None
    guided_grammar: Annotated[Any, refused(_FORMAT)] = None
    n: Annotated[Any, refused("is not supported here: send the request again, or use /v1/chat/completions", 1)] = None
    max_completion_tokens: Annotated[
        Any, refused("is a field of chat completions: use max_output_tokens in a response, max_tokens in a message")
    ] = None
