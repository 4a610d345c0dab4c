"""The engine behind HTTP: requests come at any time, and those that are there run together.

curl http://127.0.0.1:8000/generate -d '{"prompt": "The assignment", "new": 20}'
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from engine import Engine, Request


class Service:
    """One thread runs the model; those of the clients add requests, and wait for their ends. Should
    the model fail, all of them are told so, and those that come later."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.arrived = Event()
        self.done: dict[Request, Future[None]] = {}
        self.failure: Exception | None = None
        Thread(target=self._work, daemon=True).start()

    def answer(self, prompt: str, new: int) -> str:
        request = Request(self.tokenizer.encode(prompt).ids, new)
        done = self.done[request] = Future[None]()
        try:
            if self.failure is not None:
                raise self.failure
            self.engine.add(request)
        except Exception:
            del self.done[request]
            raise
        self.arrived.set()
        done.result()
        answer: str = self.tokenizer.decode(request.answer)
        return answer

    def _work(self) -> None:
        while self.arrived.wait():
            self.arrived.clear()  # before the engine is asked: what comes later sets it again
            try:
                while self.engine.busy:
                    for request in self.engine.step():
                        self.done.pop(request).set_result(None)
            except Exception as error:
                self.failure = error  # first: whoever comes from here on looks at it
                for done in list(self.done.values()):
                    done.set_exception(error)
                return


class Handler(BaseHTTPRequestHandler):
    service: Service

    def do_POST(self) -> None:
        try:
            status, reply = 200, {"answer": self.service.answer(*self._asked())}
        except ValueError as error:
            status, reply = 400, {"error": str(error)}
        except Exception as error:
            status, reply = 500, {"error": f"the model failed: {error!r}"}
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _asked(self) -> tuple[str, int]:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        match asked:
            case {"prompt": str(prompt), "new": int(new)}:
                return prompt, new
        raise ValueError('expected {"prompt": a text, "new": so many tokens} as JSON')


def server(service: Service, port: int) -> ThreadingHTTPServer:
    """Of this machine alone; port 0: any that is free."""
    handler = type("Handler", (Handler,), {"service": service})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def run(service: Service, port: int) -> None:
    """Until it is interrupted."""
    with server(service, port) as served:
        print(f"http://127.0.0.1:{served.server_port}/generate", flush=True)
        try:
            served.serve_forever()
        except KeyboardInterrupt:
            print("interrupted")
