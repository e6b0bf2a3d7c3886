"""A draft model whose tokenizer is not the target's: it is given the target's as well, and speaks the target's ids."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tokenizers import Tokenizer

from outrider.drafting.translation import Encode, Translator
from outrider.errors import InvalidArgument
from outrider.lm.fingerprint import tokenizer_fingerprint
from outrider.lm.interface import LoadedModel
from outrider.lm.vocabulary import read_vocabulary

FIELD = "target_tokenizer"


def speak_target_ids(loaded: LoadedModel, path: Path) -> LoadedModel:
    """`loaded` with a translator, described by the tokenizer that it now speaks; unchanged where that is its own.

    path: the target's folder or tokenizer.json. Raises InvalidArgument, naming the setting, when it cannot be read or
    the two have no token in common.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    own, other = loaded.description.tokenizer_json.decode(), _read(file)
    if not own:
        raise InvalidArgument(f"{FIELD}: a toy draft speaks its target's ids already, leave it empty", field=FIELD)
    fingerprint = tokenizer_fingerprint(other)
    if fingerprint == loaded.description.tokenizer_fingerprint:
        return loaded
    target = read_vocabulary(other)
    translator = Translator(
        read_vocabulary(own),
        target,
        _encoder(own),
        _encoder(other),
        target_vocab_size=max(target.bytes_of) + 1,
        bos_id=loaded.description.bos_token_id,
    )
    if not len(translator.token_map):
        raise InvalidArgument(f"{FIELD}: {file} has no token in common with the draft model's tokenizer", field=FIELD)
    description = dataclasses.replace(
        loaded.description,
        tokenizer_fingerprint=fingerprint,
        tokenizer_json=other.encode(),
        vocab_size=translator.target_vocab_size,
        eos_token_ids=tuple(
            target_id
            for own_id in loaded.description.eos_token_ids
            if (target_id := translator.token_map.to_target(own_id)) is not None
        ),
        bos_token_id=None,
        chat_template="",
        special_tokens={},
    )
    return dataclasses.replace(loaded, description=description, translator=translator)


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)["model"]["vocab"]
        return Tokenizer.from_str(text).to_str()
    except Exception as error:  # tokenizers raises plain Exception on what it cannot read
        raise InvalidArgument(
            f"{FIELD}: cannot read {file} as a tokenizer ({error}); give the target's folder or its tokenizer.json",
            field=FIELD,
        ) from error


def _encoder(tokenizer_json: str) -> Encode:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids) if text else []

    return encode
