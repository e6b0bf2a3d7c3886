"""docs/api.md is what the protos' comments say."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_is_up_to_date_and_every_link_leads_somewhere() -> None:
    generated = runpy.run_path(str(ROOT / "docs/generate_api.py"))["page"]()
    committed = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert committed == generated, "run `make docs`"
    headings = {line[4:].lower() for line in committed.splitlines() if line.startswith("### ")}
    links = {part.partition(")")[0] for part in committed.split("](#")[1:]}
    assert links
    assert links <= headings


def test_every_element_is_explained() -> None:
    committed = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [line for line in committed.splitlines() if line.endswith("|  |")] == []
