"""What an engine tells of itself, all of one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and what is held now."""

    num_steps: int
    num_model_calls: int
    num_rows: int
    num_padding_rows: int
    """Rows the model computed beyond those asked for: 0, but for those that fill up the static steps of a GPU."""
    num_free_blocks: int
    """Blocks that no open sequence holds, those kept for their content included."""
    num_blocks: int
    num_sequences: int
    num_waiting: int
    num_cached_blocks: int
    """Of the free blocks those kept for their content."""
    num_cached_tokens: int
    """Tokens that were not computed since the prefix cache had them."""
    num_copied_blocks: int
    num_preemptions: int
    """Sequences whose blocks were taken while a forward of theirs waited or was half done."""
    num_idle_evictions: int
    """Sequences whose blocks were taken between their forwards."""
    num_layer_rows: int = 0
    """Rows of passes, each times the layers that it ran through; 0 where the model does not count them."""
    num_promised_blocks: int = 0
    """To open sequences for their whole lives, whether they hold them yet or not."""
    max_promised_blocks: int = 0
    """At once; 0: as many as are asked for."""
