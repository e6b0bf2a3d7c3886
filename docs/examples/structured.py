"""An answer that is valid JSON of a schema, drafted ahead all the same."""

import json
import os

import outrider

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
with outrider.SyncClient("localhost:50050", token=os.getenv("OUTRIDER_TOKEN")) as client:
    messages = [{"role": "user", "content": "Describe a city as JSON."}]
    answer = client.complete(messages, json_schema=SCHEMA, temperature=0, max_tokens=60)
    print(json.loads(answer.text))
    print(f"{answer.speculation.num_accepted_draft_tokens} of {answer.usage.completion_tokens} tokens were drafted")
