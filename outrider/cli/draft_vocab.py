"""`outrider draft-vocab`: the list of frequent ids that a draft worker's `--draft-vocab` reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import bundles
from outrider.cli.console import out, print_json, reporting_errors
from outrider.cli.flags import refuse_unknown_variables
from outrider.cli.options import Json
from outrider.errors import InvalidArgument


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("draft-vocab", rich_help_panel="Use")(draft_vocab)


def draft_vocab(
    texts: Annotated[list[Path], typer.Argument(help="Files of text like that to be generated, UTF-8.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    model: Annotated[str, typer.Option(help="Bundle name, hub id or folder whose tokenizer counts.")] = "smollm2-135m",
    size: Annotated[int, typer.Option(min=1, help="Ids in the list; what the texts lack is filled up.")] = 16384,
    as_json: Json = False,
) -> None:
    """Count the tokens of texts and write the most frequent ids: a trimmed draft vocabulary."""
    with reporting_errors():
        refuse_unknown_variables()
        import tokenizers

        from outrider.lm.draft_vocab import frequent_ids, write_draft_vocab
        from outrider.lm.fingerprint import tokenizer_fingerprint

        file = Path(bundles.prepare(model)) / "tokenizer.json"
        if not file.is_file():
            raise InvalidArgument(f"--model {model} has no tokenizer.json, which is needed", field="model")
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        counts = Counter(i for path in texts for i in tokenizer.encode(_read(path), add_special_tokens=False).ids)
        ids = frequent_ids(counts, size, tokenizer.get_vocab_size())
        try:
            write_draft_vocab(output, ids, tokenizer_fingerprint(tokenizer.to_str()))
        except OSError as error:
            raise InvalidArgument(f"--output: cannot write {output} ({error})", field="output") from error
        listed = set(ids)
        covered = sum(count for token_id, count in counts.items() if token_id in listed)
        total = counts.total()
        if as_json:
            print_json({"output": str(output), "ids": len(ids), "counted_tokens": total, "covered_tokens": covered})
            return
        share = f", {covered / total:.1%} of {total} counted tokens" if total else ""
        out.print(f"{output}: {len(ids)} ids{share}", markup=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"texts: cannot read {path} ({error})", field="texts") from error
