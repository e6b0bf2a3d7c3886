"""Several coordinators, TLS, a token that may change, a deadline, and what to do about errors."""

import asyncio

import outrider


async def main() -> None:
    try:
        token = outrider.token_from_file("token")  # read again when it changes; any function that gives one will do
        tls = outrider.TLS(ca="ca.crt")
        async with outrider.Client("localhost:50050,localhost:50060", tls=tls, token=token, timeout_s=30) as client:
            answer = await client.complete("Once upon a time", max_tokens=24, priority=-1)
            print(f"{answer.text}\n{answer.num_resumes} losses were mended on the way")
    except outrider.OutriderError as error:
        print(f"{error.status} {error.reason}: {error.message}")
        if error.retry_delay_s is not None:
            print(f"come back in {error.retry_delay_s:.1f} s")


asyncio.run(main())
