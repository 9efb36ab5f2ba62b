"""Connections that never become a call: ``python -m tests.support.hostile.half_open PORT COUNT KIND``.

KIND is what each says: ``silent`` nothing, ``preface`` the begin of HTTP/2, ``headers`` the begin of an HTTP
request, and then a byte each second. Prints when all are open, and ends when the server has closed them all.
"""

import asyncio
import resource
import sys

BEGINS = {
    "silent": b"",
    "preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "headers": b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: ",
}
AT_ONCE = 50


async def main(port: int, count: int, kind: str) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with turns:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(BEGINS[kind])
            return reader, writer

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(1):
                        if not await reader.read(65_536):
                            return
                except TimeoutError:
                    if kind == "headers":
                        writer.write(b"x")
        except ConnectionError:
            return
        finally:
            writer.transport.abort()

    opened = await asyncio.gather(*(begin() for _ in range(count)))
    print("open", flush=True)
    await asyncio.gather(*(hold(*one) for one in opened))
    print("all were closed", flush=True)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
