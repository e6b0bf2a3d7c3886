"""Flags of a request become client options, and only those that were given."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.flags import with_parameters
from outrider.cli.options import given_options, request_parameters
from outrider.client import GenerateOptions, build_request
from outrider.errors import InvalidArgument


def options_of(*flags: str) -> GenerateOptions:
    seen: list[Any] = []
    app = typer.Typer()
    app.command()(with_parameters(lambda **values: seen.append(values), request_parameters()))
    result = CliRunner().invoke(app, list(flags))
    assert result.exit_code == 0, result.output
    return given_options(seen[0])


def test_nothing_given_is_nothing_asked() -> None:
    assert options_of() == {}


def test_repeated_and_json_flags() -> None:
    options = options_of(
        "--bad-words=a b", "--bad-words=c", "--allowed-token-ids=3", "--allowed-token-ids=5",
        '--chat-template-kwargs={"enable_thinking": false}',
    )  # fmt: skip
    assert options == {
        "bad_words": ["a b", "c"],
        "allowed_token_ids": [3, 5],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = build_request([{"role": "user", "content": "x"}], options)
    assert list(request.sampling.allowed_token_ids.ids) == [3, 5]
    assert request.chat.chat_template_kwargs == '{"enable_thinking": false}'


@pytest.mark.parametrize(("value", "says"), [("{'a': 1}", "is no JSON"), ("[1]", "must be a JSON object")])
def test_a_json_flag_that_is_none_is_refused(value: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--chat-template-kwargs {says}"):
        options_of(f"--chat-template-kwargs={value}")


def test_flags_of_two_forms_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="json_schema and regex both give the text a form"):
        build_request("x", options_of("--json-schema={}", "--regex=[0-9]{3}"))
