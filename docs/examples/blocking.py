"""The same without an event loop: for scripts, notebooks and threads. Start processes by spawn, not by fork."""

import os

import outrider

with outrider.SyncClient("localhost:50050", token=os.getenv("OUTRIDER_TOKEN"), timeout_s=60) as client:
    for event in client.generate("Once upon a time", temperature=0, max_tokens=24):
        if isinstance(event, outrider.Chunk):
            print(event.text, end="", flush=True)
    answer = client.complete("Once upon a time", temperature=0, max_tokens=24, num_speculative_tokens=0)
    print(f"\nplain decoding says the same, in {answer.speculation.num_steps} steps: {answer.text!r}")
