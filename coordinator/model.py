"""A served model: what the coordinator knows of it from its workers' descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.text.chat import ChatTemplate
from coordinator.text.tokenizer import TextCodec, make_codec
from outrider.lm.interface import ModelDescription


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name that clients can ask for. `max_draft_tokens`: drafts that every worker of it can carry in a round.

    drafters: all that a request may name. offered: the same by who offers them, those who offer none left out.
    """

    description: ModelDescription
    codec: TextCodec
    chat_template: ChatTemplate | None
    max_draft_tokens: int
    drafters: tuple[str, ...] = ()
    draft_model: str = ""
    offered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    may_offer_more: bool = False
    """A worker is listed that has not told yet what it is, dead or still starting: its drafters are not known."""

    @property
    def name(self) -> str:
        return self.description.model


@dataclass(frozen=True, slots=True)
class TextTools:
    """Tokenizer and chat template, built once per description (it can take a second)."""

    codec: TextCodec
    chat_template: ChatTemplate | None = field(default=None)


def build_text_tools(description: ModelDescription) -> TextTools:
    """Raises ValueError or jinja2.TemplateError for a tokenizer or template that cannot be read."""
    template = description.chat_template
    return TextTools(
        make_codec(description.tokenizer_json, description.vocab_size),
        ChatTemplate(template, description.special_tokens) if template else None,
    )
