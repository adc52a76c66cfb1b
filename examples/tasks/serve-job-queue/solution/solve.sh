#!/bin/sh
set -eu
cat > /srv/queue/queued.py <<'PY'
"""A job queue over TCP. One thread; clients take turns, request by request."""

import asyncio
import heapq

LIMIT = 1000


class Queue:
    def __init__(self):
        self.last, self.done, self.held = 0, 0, 0
        self.waiting = []

    def put(self, text):
        self.last += 1
        heapq.heappush(self.waiting, (self.last, text))
        return self.last


class Client:
    def __init__(self, queue):
        self.queue, self.mine = queue, {}

    def answer(self, line):
        word, blank, rest = line.partition(" ")
        if word == "PUT" and blank:
            if len(rest) > LIMIT or any(not " " <= c <= "~" for c in rest):
                return "ERR bad request"
            return f"ID {self.queue.put(rest)}"
        if line == "TAKE":
            return self.take()
        if line == "STATS":
            return f"STATS {len(self.queue.waiting)} {self.queue.held} {self.queue.done}"
        if word in ("DONE", "BACK") and rest.isascii() and rest.isdigit():
            return self.end(word, int(rest))
        return "ERR bad request"

    def take(self):
        if not self.queue.waiting:
            return "EMPTY"
        number, text = heapq.heappop(self.queue.waiting)
        self.mine[number] = text
        self.queue.held += 1
        return f"JOB {number} {text}"

    def end(self, word, number):
        if number not in self.mine:
            return "ERR not yours"
        text = self.mine.pop(number)
        self.queue.held -= 1
        if word == "DONE":
            self.queue.done += 1
        else:
            heapq.heappush(self.queue.waiting, (number, text))
        return "OK"

    def leave(self):
        for number in list(self.mine):
            self.end("BACK", number)


async def serve_client(queue, reader, writer):
    client, skipping = Client(queue), False
    try:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as overrun:
                await reader.readexactly(overrun.consumed)
                skipping = True
                continue
            text = line[:-1].decode("latin-1")
            answer = "ERR bad request" if skipping else client.answer(text)
            skipping = False
            writer.write(answer.encode() + b"\n")
            await writer.drain()
            await asyncio.sleep(0)  # many requests at once must not hold up the other clients
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has left; its jobs go back below
    finally:
        client.leave()
        writer.close()


async def main():
    queue = Queue()
    server = await asyncio.start_server(
        lambda r, w: serve_client(queue, r, w), "127.0.0.1", 7070, limit=8192, backlog=256
    )
    async with server:
        await server.serve_forever()


asyncio.run(main())
PY
setsid -f python3 /srv/queue/queued.py </dev/null >/srv/queue/log 2>&1
python3 - <<'PY'
import socket, time

for _ in range(100):
    try:
        with socket.create_connection(("127.0.0.1", 7070), timeout=5) as one:
            one.sendall(b"STATS\n")
            assert one.makefile().readline() == "STATS 0 0 0\n"
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
else:
    raise SystemExit("the daemon did not come up")
PY
