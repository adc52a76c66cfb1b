"""Grade the daemon that was left running, over its port."""

import json
import pathlib
import random
import socket
import struct
import threading
import time

ADDRESS = ("127.0.0.1", 7070)
PATIENCE = 6.0


class Wrong(Exception):
    """An answer that is not the right one."""


class Client:
    def __init__(self):
        try:
            self.socket = socket.create_connection(ADDRESS, timeout=PATIENCE)
        except OSError as error:
            raise Wrong(f"nothing takes connections on {ADDRESS}: {error}") from error
        self.buffer = b""

    def send(self, data):
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Wrong(f"the daemon does not read: {error}") from error

    def line(self):
        while b"\n" not in self.buffer:
            try:
                piece = self.socket.recv(65536)
            except OSError as error:
                raise Wrong(f"no answer: {error}") from error
            if not piece:
                raise Wrong("the daemon closed the connection")
            self.buffer += piece
            if len(self.buffer) > 1 << 20:
                raise Wrong("an answer without end")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode("latin-1")

    def ask(self, request, right):
        self.send(request.encode("latin-1") + b"\n")
        said = self.line()
        if said != right:
            raise Wrong(f"{request[:60]!r}: {said[:80]!r} instead of {right[:80]!r}")

    def reset(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self):
        self.socket.close()


def until(client, right):
    """A client's leaving is noticed soon, not at once: ask until STATS is right."""
    deadline = time.monotonic() + PATIENCE
    while True:
        client.send(b"STATS\n")
        said = client.line()
        if said == right:
            return
        if time.monotonic() > deadline:
            raise Wrong(f"STATS stays {said!r} instead of {right!r}")
        time.sleep(0.02)


def check_basics():
    a, b = Client(), Client()
    a.ask("STATS", "STATS 0 0 0")
    a.ask("TAKE", "EMPTY")
    longest = "~" * 1000
    for number, text in enumerate(["first job", "", "  two  blanks  ", longest, "DONE 1"], start=1):
        a.ask(f"PUT {text}", f"ID {number}")
    b.ask("TAKE", "JOB 1 first job")
    b.ask("TAKE", "JOB 2 ")
    a.ask("TAKE", "JOB 3   two  blanks  ")
    a.ask("DONE 1", "ERR not yours")
    a.ask("BACK 99", "ERR not yours")
    b.ask("DONE 1", "OK")
    b.ask("DONE 1", "ERR not yours")
    a.ask("STATS", "STATS 2 2 1")
    b.ask("BACK 2", "OK")
    b.ask("BACK 2", "ERR not yours")
    a.ask("TAKE", "JOB 2 ")
    a.ask("BACK 3", "OK")
    b.ask("TAKE", "JOB 3   two  blanks  ")
    b.ask("TAKE", f"JOB 4 {longest}")
    for request in ("", "take", "TAKE ", "TAKE 1", "PUT", "DONE", "DONE ", "DONE x", "DONE 3 ", "DONE -3",
                    "DONE \u00b2", "STATS now", "GET 1", "PUT " + "x" * 1001, "PUT a\tb", "PUT \u00e9",
                    "PUT a\r", "PUT " + "y" * 100_000):  # fmt: skip
        b.ask(request, "ERR bad request")
    b.ask("DONE 3", "OK")
    b.ask("DONE 4", "OK")
    a.ask("DONE 2", "OK")
    b.ask("TAKE", "JOB 5 DONE 1")
    b.ask("DONE 5", "OK")
    a.ask("STATS", "STATS 0 0 5")
    a.close()
    b.close()


def check_pieces_and_pipelines():
    a = Client()
    a.send(b"PUT in pie")
    b = Client()
    b.ask("STATS", "STATS 0 0 5")
    a.send(b"ces\nTAKE\nTAKE\nDONE 6\nSTATS\n")
    said = [a.line() for _ in range(5)]
    if said != ["ID 6", "JOB 6 in pieces", "EMPTY", "OK", "STATS 0 0 6"]:
        raise Wrong(f"several requests at once: {said}")
    a.close()
    b.close()


def check_lost_clients():
    a, keeper = Client(), Client()
    for number in range(7, 13):
        keeper.ask(f"PUT job {number}", f"ID {number}")
    keeper.ask("TAKE", "JOB 7 job 7")
    a.ask("TAKE", "JOB 8 job 8")
    a.ask("TAKE", "JOB 9 job 9")
    b = Client()
    b.ask("TAKE", "JOB 10 job 10")
    a.send(b"DONE")  # half a line counts for nothing
    a.close()
    b.reset()
    until(keeper, "STATS 5 1 6")
    c = Client()
    for number in (8, 9, 10, 11, 12):
        c.ask("TAKE", f"JOB {number} job {number}")
        c.ask(f"DONE {number}", "OK")
    keeper.ask("DONE 7", "OK")
    keeper.ask("STATS", "STATS 0 0 12")
    c.close()
    keeper.close()


def check_slow_clients():
    silent = [Client() for _ in range(190)]
    for one in silent[:60]:
        one.send(b"PUT never finish")
    deaf = Client()
    deaf.socket.setblocking(False)
    try:
        for _ in range(20_000):  # never reads: the daemon's answers pile up
            deaf.socket.send(b"STATS\n" * 100)
    except BlockingIOError:
        pass
    except OSError as error:
        raise Wrong(f"a client that does not read was thrown out: {error}") from error
    quick = Client()
    quick.ask("PUT in time", "ID 13")
    quick.ask("TAKE", "JOB 13 in time")
    quick.ask("DONE 13", "OK")
    for one in (*silent, deaf, quick):
        one.close()


def drain(client, finished):
    """Finish what goes back to the queue, however late the daemon sees a client leave."""
    deadline = time.monotonic() + PATIENCE
    while True:
        client.send(b"TAKE\n")
        said = client.line()
        if said != "EMPTY":
            number = said.split(" ")[1]
            client.ask(f"DONE {number}", "OK")
            finished.append(int(number))
            continue
        client.send(b"STATS\n")
        said = client.line()
        if said == "STATS 0 0 413":
            return
        if time.monotonic() > deadline:
            raise Wrong(f"STATS stays {said!r} instead of 'STATS 0 0 413'")
        time.sleep(0.02)


def check_many_workers():
    rng = random.Random("serve-job-queue/1")
    texts = {}
    lock, problems, finished = threading.Lock(), [], []
    producer = Client()
    for _ in range(400):
        text = "".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.randint(0, 40)))
        producer.send(f"PUT {text}\n".encode())
        word, number = producer.line().split(" ")
        if word != "ID":
            raise Wrong("PUT among many failed")
        texts[int(number)] = text
    if sorted(texts) != list(range(14, 414)):
        raise Wrong("ids do not count on by one")

    def work(seed):
        mine, client = random.Random(seed), Client()
        while True:
            client.send(b"TAKE\n")
            said = client.line()
            if said == "EMPTY":
                break
            _, number, text = said.split(" ", 2)
            if texts.get(int(number)) != text:
                raise Wrong(f"job {number} came back as {text!r}")
            draw = mine.random()
            if draw < 0.1:
                client.ask(f"BACK {number}", "OK")
            elif draw < 0.2:
                client.close()
                client = Client()
            else:
                client.ask(f"DONE {number}", "OK")
                with lock:
                    finished.append(int(number))
        client.close()

    def guarded(seed):
        try:
            work(seed)
        except Exception as error:  # carried over to the grade; a thread cannot raise it
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(16)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if problems:
        raise Wrong(f"many workers: {problems[0]}")
    drain(producer, finished)
    if sorted(finished) != list(range(14, 414)):
        raise Wrong("a job was lost or done twice")
    producer.close()


CHECKS = [check_basics, check_pieces_and_pipelines, check_lost_clients, check_slow_clients, check_many_workers]


def grade():
    for check in CHECKS:
        try:
            check()
        except Wrong as problem:
            return f"{check.__name__}: {problem}"
    return None


if __name__ == "__main__":
    problem = grade()
    print(problem or "all as it should be")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))
