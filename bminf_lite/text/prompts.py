"""Prompts as callers give them: text to continue, token ids, or a conversation to answer; one prompt or a list."""

from __future__ import annotations

import secrets
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError, UsageError, is_whole, listed, require_bool
from .chat_template import ChatTemplate, Message, check_messages, content_text
from .checkpoint_files import has_tokenizer, load_tokenizer
from .control_tokens import ControlTokens, GuardedText, new_mark
from .long_text import check_length
from .tokenizer import Tokenizer
from .tool_calls import (
    Tool,
    ToolFormat,
    check_tools,
    find_tool_format,
    generic_instructions,
    generic_messages,
    tool_format,
)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens, checked.

    - ``token_ids``: :meth:`PromptEncoder.encode` packs them into an int32 array, which the engine uses as it is.
    - ``continues``: the completion reads as the continuation of the prompt's text, so its first word keeps the space
      before it. False after a conversation and for an encoder-decoder, whose completion is a text of its own.
    - ``target``: tokens with which the decoder of an encoder-decoder begins, after its start tokens.
    - ``stop_ids``: tokens that end the completion, in addition to the end-of-sequence tokens.
    """

    token_ids: Sequence[int]
    continues: bool = True
    target: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()

    def before_text(self, has_grammar: bool) -> Sequence[int]:
        """The tokens that the completion's text continues; none if it is a text of its own.

        A grammar counts the space before the first word, which a text of its own would leave out.
        """
        return self.token_ids if self.continues or has_grammar else ()


Prompt = str | Sequence[int] | np.ndarray | Sequence[Message] | EncodedPrompt


class PromptLimits(Protocol):
    """The prompts that a model takes. Lengths are in tokens.

    A sequence has ``context_length`` tokens at most; of an encoder-decoder, that is the decoder's, which starts with
    ``decoder_start_token_ids``, and the encoder reads ``max_source_length`` at most.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def is_encoder_decoder(self) -> bool: ...
    @property
    def max_source_length(self) -> int: ...
    @property
    def decoder_start_token_ids(self) -> Sequence[int]: ...


def _only_host(array: Any) -> np.ndarray:
    raise UsageError("a prompt is text, token ids or messages, and no array of a device")


@dataclass(eq=False)
class PromptEncoder:
    """Encodes prompts for one model, and checks that they fit it.

    ``folder`` holds the tokenizer and the chat template, which are read when they are first needed; without a folder,
    prompts are token ids. ``to_host`` copies the array of another library, which may be on a device, into a NumPy
    array. ``template_processes`` is how many conversations a chat template may render at a time. ``tool_format_name``,
    one of ``TOOL_FORMATS``, replaces what the chat template and the vocabulary tell about how the model writes calls of
    functions.
    """

    folder: Path | None
    limits: PromptLimits
    to_host: Callable[[Any], np.ndarray] = _only_host
    template_processes: int = 1
    tool_format_name: str | None = None
    _templates: dict[str, ChatTemplate] = field(default_factory=dict, init=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ``CheckpointError`` if its files are missing or malformed."""
        if self.folder is None:
            raise UsageError("this model was made without a tokenizer: give prompts as lists of token ids")
        return load_tokenizer(self.folder, self.limits.vocab_size)

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to read."""
        return self.folder is not None and has_tokenizer(self.folder)

    def close(self) -> None:
        """End the processes of the chat templates."""
        self._templates.clear()

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Keeps texts of others from becoming control tokens."""
        return ControlTokens(self.tokenizer)

    def encode(
        self, prompt: Prompt, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> EncodedPrompt:
        """See :meth:`bminf_lite.Model.encode`. A text may be guarded already."""
        encoded = self._tokenize(prompt, add_special_tokens, split_special_tokens)
        limits = self.limits
        context, longest = limits.context_length, limits.max_source_length
        reads = f"the model's encoder reads {longest:,} at most"
        if not limits.is_encoder_decoder:
            longest, reads = context - 1, f"the model's context is {context:,} and a new token must fit"
        if isinstance(encoded.token_ids, list):  # of JSON, which may have millions
            _check_length(encoded.token_ids, longest, reads)
        ids = self.validate_token_ids(encoded.token_ids)
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        _check_length(ids, longest, reads)
        if not limits.is_encoder_decoder:
            return replace(encoded, token_ids=ids, target=())
        target = self.validate_token_ids(encoded.target)
        if len(target) + len(limits.decoder_start_token_ids) >= context:
            raise UsageError(f"the target has {len(target):,} tokens, but the decoder's context is {context:,}")
        return replace(encoded, token_ids=ids, target=tuple(target))

    def encode_all(
        self, prompts: Any, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[EncodedPrompt]:
        """The tokens of one prompt or of a list. The ``UsageError`` lists all invalid prompts of a list by number."""
        if not is_batch(prompts):
            return [self.encode(prompts, add_special_tokens, split_special_tokens)]
        encoded, problems = [], []
        for i, prompt in enumerate(prompts):
            try:
                encoded.append(self.encode(prompt, add_special_tokens, split_special_tokens))
            except UsageError as error:  # noqa: PERF203, the other prompts' problems are wanted too
                problems.append(f"prompt {i}: {error}")
        if problems:
            raise UsageError(problems[0] if len(problems) == 1 else listed(f"{len(prompts)} prompts", problems))
        return encoded

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The form in which this model writes calls of functions. Raises ``UsageError`` for an unknown name."""
        if self.tool_format_name is not None:
            return tool_format(self.tool_format_name)
        tokenizer = self.tokenizer
        return find_tool_format(tokenizer.tool_chat_template, lambda text: tokenizer.piece_to_id(text) is not None)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """A conversation as text; see :meth:`.ChatTemplate.render`. ``UsageError`` if there is no chat template.

        If :attr:`tool_format` is generic, the template gets messages that describe ``tools``, calls and their results
        in words; see :func:`.generic_messages`. With ``continue_final_message`` the text ends where the content of the
        last message does, with its white space; that message must be the assistant's, and have no calls.
        """
        require_bool("add_generation_prompt", add_generation_prompt)
        require_bool("continue_final_message", continue_final_message)
        check_messages(messages)
        check_tools(tools)
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, tools, variables)
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise UsageError("the last message cannot be continued: it must be one of the assistant, without calls")
        # A text that nothing else has is found where the template puts the end of the content. The content itself may
        # also stand elsewhere, in the template's own marks for example.
        mark = f"end{secrets.token_hex(16)}"
        text = self._render([*messages[:-1], _with_mark(messages[-1], mark)], False, tools, variables)
        start, found, _ = text.rpartition(mark)
        if not found:
            raise UsageError("the last message cannot be continued: the chat template does not write it as it is")
        return start

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any],
    ) -> str:
        template = self._template(with_tools=bool(tools))
        uses_tools = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if not uses_tools or not self.tool_format.is_generic:
            return template.render(messages, add_generation_prompt, tools=tools, **variables)
        refusal: UsageError | None = None
        try:
            text = template.render(generic_messages(messages, tools or ()), add_generation_prompt, **variables)
            if not tools or generic_instructions(tools) in text:
                return text
        except UsageError as error:
            refusal = error
        if not tools or messages[0]["role"] == "system":
            raise refusal or UsageError("the chat template drops the system message, which describes the tools")
        instructed = generic_messages(messages, tools, has_system=False)
        return template.render(instructed, add_generation_prompt, **variables)

    def _template(self, with_tools: bool) -> ChatTemplate:
        tokenizer = self.tokenizer
        source = tokenizer.tool_chat_template if with_tools else tokenizer.chat_template
        if source is None:
            remedy = "give a plain prompt instead of messages (bminf-lite generate without --chat; /v1/completions)"
            raise UsageError(f"this checkpoint has no chat template: {remedy}")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, tokenizer.special_tokens, processes=self.template_processes)
        return self._templates[source]

    def validate_token_ids(self, token_ids: Any) -> array[int]:
        """See :func:`validate_token_ids`; takes arrays of other libraries and devices too."""
        is_array = hasattr(token_ids, "__dlpack__") or hasattr(token_ids, "__cuda_array_interface__")
        if is_array and not isinstance(token_ids, np.ndarray):
            token_ids = self.to_host(token_ids)
        return validate_token_ids(token_ids, self.limits.vocab_size)

    def _tokenize(self, prompt: Any, add_special_tokens: bool, split_special_tokens: bool) -> EncodedPrompt:
        """A prompt's tokens, not checked yet: they may be no token ids, or too many."""
        continues = not self.limits.is_encoder_decoder
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, str):
            target = self.tokenizer.target_ids if add_special_tokens else ()
            if split_special_tokens and not isinstance(prompt, GuardedText):
                prompt = self.control_tokens.guard(prompt)
            return EncodedPrompt(self._encode_text(prompt, add_special_tokens), continues, target)
        if not (isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], dict)):
            return EncodedPrompt(prompt, continues)
        check_messages(prompt)
        self.check_length(content_text(prompt[-1]))
        ids = self.tokenizer.encode_turns([content_text(m) for m in prompt], self.limits.max_source_length)
        if ids is None and split_special_tokens:
            mark = new_mark()
            text = self.render(self.control_tokens.guard_messages(prompt, mark))
            ids = self._encode_text(GuardedText.of(text, mark), add_special_tokens=False)
        elif ids is None:
            ids = self._encode_text(self.render(prompt), add_special_tokens=False)
        return EncodedPrompt(ids, continues=False)

    def check_length(self, text: str) -> None:
        """Raise ``UsageError`` for a text that has far more tokens than the model takes, without tokenizing all of it.

        See :func:`.long_text.check_length`.
        """
        limits = self.limits
        check_length(self.tokenizer, text, limits.max_source_length or limits.context_length)

    def tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text, which may be guarded; not checked."""
        if isinstance(text, GuardedText):
            return self.control_tokens.encode(text, add_special_tokens)
        return self.tokenizer.encode(text, add_special_tokens)

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text; ``CheckpointError`` for a tokenizer whose tokens the model does not have."""
        self.check_length(text)
        ids = self.tokens_of(text, add_special_tokens)
        largest = max(ids, default=0)
        if largest >= (vocab_size := self.limits.vocab_size):
            problem = f"the tokenizer gives the token id {largest}, but the model's largest is {vocab_size - 1}"
            raise CheckpointError(f"{self.folder}: {problem}; the tokenizer's files must be those of this checkpoint")
        return ids


def _with_mark(message: Message, mark: str) -> Message:
    """A message whose content, a text or a list of parts, ends with ``mark``."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *before, last = content
    return {**message, "content": [*before, {**last, "text": last["text"] + mark}]}


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of prompts: a list of texts, of lists or of conversations, or an empty list."""
    if isinstance(prompt, str) or not _is_list(prompt):
        return False
    return len(prompt) == 0 or not isinstance(prompt[0], (int, np.integer, dict))


def dialogue_messages(turns: Sequence[str]) -> list[Message]:
    """The utterances of two speakers as messages; the last is the user's.

    Raises ``UsageError`` for a value that is not a list of texts.
    """
    is_list = isinstance(turns, Sequence) and not isinstance(turns, str)
    if not is_list or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UsageError("a dialogue is a list of utterances, one at least, each a text")
    roles = ("user", "assistant")
    return [{"role": roles[(len(turns) - 1 - i) % 2], "content": turn} for i, turn in enumerate(turns)]


def validate_token_ids(token_ids: Any, vocab_size: int) -> array[int]:
    """Token ids as a new int32 array; ``UsageError`` for another type, and for ids outside the vocabulary."""
    if not _is_list(token_ids):
        raise UsageError(f"a prompt is text, token ids or messages, but this one is {type(token_ids).__name__}")
    with suppress(TypeError, OverflowError, struct.error):
        packed = _packed(token_ids)
        ids = np.frombuffer(packed, np.uint32)  # -1 is larger than any vocabulary
        if ids.max(initial=0) < vocab_size:
            may_be_bool = np.flatnonzero(ids <= 1) if ids.min(initial=2) <= 1 else ids[:0]
            if all(is_whole(token_ids[i]) for i in may_be_bool.tolist()):  # a look at each item would take long
                return packed
    position, wrong = next((n, i) for n, i in enumerate(token_ids) if not is_whole(i) or not 0 <= i < vocab_size)
    raise UsageError(f"token {position} is {wrong!r}, but a token id is a whole number from 0 to {vocab_size - 1}")


def _packed(token_ids: Any) -> array[int]:
    """The integers of a list of any kind as int32, True as 1; ``TypeError`` and others for what int32 cannot hold."""
    if isinstance(token_ids, array):
        return array("i", token_ids)
    if isinstance(token_ids, np.ndarray) and token_ids.dtype.kind in "iu" and token_ids.ndim == 1:
        narrow = np.ascontiguousarray(token_ids, np.int32)
        if token_ids.dtype != np.int32 and not np.array_equal(narrow, token_ids):
            raise OverflowError
        return array("i", narrow.tobytes())
    values = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    return array("i", struct.Struct(f"{len(values)}i").pack(*values))  # in half the time of array("i", values)


def validate_lists(lists: Sequence[Any], vocab_size: int) -> list[np.ndarray] | None:
    """Several lists of token ids, int32, in a fraction of the time that :func:`validate_token_ids` takes for each.

    None if that function must look at each: because one of them is wrong, or because they are not all of one kind.
    """
    if not lists or not all(isinstance(x, list) or (isinstance(x, np.ndarray) and x.ndim == 1) for x in lists):
        return None
    counts = [len(ids) for ids in lists]
    ends = np.cumsum(counts)
    if all(isinstance(ids, list) for ids in lists):
        try:
            flat = np.frombuffer(b"".join(struct.pack(f"{len(ids)}i", *ids) for ids in lists), np.int32)
        except (TypeError, OverflowError, struct.error):
            return None
        may_be_bool = np.flatnonzero((flat == 0) | (flat == 1))
        owners = np.searchsorted(ends, may_be_bool, side="right")
        if not all(is_whole(lists[b][i - ends[b]]) for b, i in zip(owners, may_be_bool, strict=True)):
            return None
    else:
        dtypes = {ids.dtype if isinstance(ids, np.ndarray) else None for ids in lists}
        if len(dtypes) > 1 or (dtype := dtypes.pop()) is None or dtype.kind not in "iu":
            return None
        flat = np.concatenate(lists)
    if flat.size and not 0 <= flat.min() <= flat.max() < vocab_size:
        return None
    flat = flat.astype(np.int32, copy=False)
    return [flat[end - count : end] for count, end in zip(counts, ends.tolist(), strict=True)]


def _check_length(token_ids: Sequence[int], limit: int, reason: str) -> None:
    if len(token_ids) > limit:
        excess = len(token_ids) - limit
        raise UsageError(
            f"the prompt is too long: it has {len(token_ids):,} tokens, but {reason}; shorten it by {excess:,}"
        )


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a list of any kind; bytes are text that was not decoded, and no list."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
