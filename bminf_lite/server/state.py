"""What the routes of one HTTP process share."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..engine.sampling_params import SamplingParams
from ..errors import BminfError, UsageError
from ..pooling.yes_no import Questions
from ..text.prompts import PromptEncoder
from ..text.token_bytes import TokenTexts
from ..text.tokenizer import Tokenizer
from .client import EngineClient
from .grammar_checks import GrammarChecks
from .request_log import RequestLog
from .request_record import Observer
from .settings import ServerSettings

_TEMPLATE_PROCESSES = 4
"""Conversations that the chat template renders at a time; a process starts when it is needed."""


@dataclass(eq=False)
class ServerState:
    """The engine's client, the settings, and the model's tokenizer and chat template."""

    client: EngineClient
    settings: ServerSettings
    _tokenizers: dict[tuple[str, ...], Tokenizer] = field(default_factory=dict, init=False)

    @cached_property
    def observer(self) -> Observer:
        """What counts and logs requests. Its counts go to the engine's process, which adds up those of all."""
        path = self.settings.request_log
        log = None if path is None else RequestLog(path)
        observer = Observer(self.client.info.context_length, self.client.observe, log)
        self.client.on_close = observer.close
        return observer

    @cached_property
    def prompts(self) -> PromptEncoder:
        """Turns texts, token ids and conversations into checked tokens; blocks while a template renders."""
        info = self.client.info
        return PromptEncoder(
            None if info.folder is None else Path(info.folder),
            info,
            template_processes=_TEMPLATE_PROCESSES,
            tool_format_name=self.settings.tool_call_format,
        )

    @cached_property
    def grammar_checks(self) -> GrammarChecks:
        """The checks of grammars in requests."""
        return GrammarChecks()

    @cached_property
    def has_chat(self) -> bool:
        """Whether the model answers conversations: it has a chat template, or a tokenizer that needs none."""
        if not self.client.info.generates:
            return False
        try:
            tokenizer = self.prompts.tokenizer
        except BminfError:  # each request that needs it gets the reason
            return False
        return tokenizer.chat_template is not None or tokenizer.answers_dialogues

    @cached_property
    def ranks_by_answers(self) -> bool:
        """Whether the model generates and can be asked about texts: it chats, and has tokens of "yes" and "no"."""
        try:
            return self.has_chat and bool(Questions(self.prompts).answers)
        except UsageError:  # each request that ranks gets the reason
            return False

    @cached_property
    def default_sampling(self) -> dict[str, float | None]:
        """The sampling parameters of a request that gives none; empty if the checkpoint's are wrong.

        ``max_tokens`` is that of an answer in a conversation, and None if only the context bounds it.
        """
        config = self.client.info.generation_config
        try:
            params = SamplingParams.from_checkpoint(config)
        except BminfError:  # each request gets the reason
            return {}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        limit = None if config.get("max_new_tokens") is None else params.max_new_tokens
        return {**{name: getattr(params, name) for name in names}, "max_tokens": limit}

    def splits(self, wanted: bool | None) -> bool:
        """Whether special tokens in texts are split, if a request says ``wanted`` of it."""
        return self.settings.split_special_tokens if wanted is None else wanted

    @cached_property
    def default_stops(self) -> tuple[str, ...]:
        """The stop strings of requests that have none: those of the checkpoint."""
        return SamplingParams.from_checkpoint(self.client.info.generation_config).stop

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens, for log-probabilities."""
        return TokenTexts(self.prompts.tokenizer)

    def tokenizer_showing(self, marks: tuple[str, ...]) -> Tokenizer:
        """The tokenizer with some of its special tokens as text. It is kept, because it remembers texts of tokens."""
        if marks not in self._tokenizers:
            self._tokenizers[marks] = self.prompts.tokenizer.showing(marks)
        return self._tokenizers[marks]

    def warm_up(self) -> None:
        """Read the tokenizer, for which the first request would wait: seconds, with every other request."""
        with suppress(BminfError):  # each request that needs it gets the reason
            _ = self.max_characters

    @cached_property
    def max_characters(self) -> int:
        """Characters of a prompt that cannot fit any more, so that it need not be tokenized, which takes seconds."""
        tokenizer, info = self.prompts.tokenizer, self.client.info
        longest = max(len(tokenizer.id_to_piece(i) or "") for i in range(len(tokenizer)))
        return longest * (info.max_source_length if info.is_encoder_decoder else info.context_length)

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter whose name a request gives as its model; None for the model itself."""
        return model if self.has_adapter(model) else None

    def has_adapter(self, name: str | None) -> bool:
        """Whether the model has an adapter with this name."""
        return name in self.client.adapters

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may give as its model: the names of the model, and of its adapters."""
        return (*self.settings.served_model_names, *self.client.adapters)

    @property
    def model_name(self) -> str:
        """The name that responses report."""
        return self.settings.served_model_names[0]
