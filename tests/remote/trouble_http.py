"""Faults of an HTTP service: of its answers, or of its line."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote

from tests.remote.backends import Scene
from tests.remote.object_stub import BREAK, Answer, Request
from tests.remote.serving import Link

Make = Callable[[Scene], object]
Which = Callable[[Request], bool]


def error(code: str) -> bytes:
    """Return an error as services word one; it repeats what must not be passed on."""
    return f"<Error><Code>{code}</Code><Message>AKIAZQXWVA zqxwvb</Message></Error>".encode()


def is_record(request: Request) -> bool:
    return "/pack/" in request.path.replace("%2F", "/") or "/kv/kv/" in request.path


def is_write(request: Request) -> bool:
    return request.method not in ("GET", "HEAD")


def answers(status: int, code: str = "", body: bytes = b"", which: Which = lambda request: True, **more: str) -> Make:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    answer = Answer(status, body or error(code), headers)

    def make(scene: Scene) -> None:
        scene.patch.setattr(scene.site.way, "trouble", lambda request: answer if which(request) else None)

    return make


def in_the_middle(status: int, code: str) -> Make:
    def make(scene: Scene) -> None:
        seen: list[Request] = []

        def answer(request: Request) -> Answer | None:
            seen.extend([request] * is_record(request))
            return Answer(status, error(code)) if len(seen) > 1 else None

        scene.patch.setattr(scene.site.way, "trouble", answer)

    return make


def once(answer: Answer) -> Make:
    def make(scene: Scene) -> None:
        seen: set[str] = set()

        def first(request: Request) -> Answer | None:
            kind = unquote(request.path).split("/")[-2]
            is_new = kind not in seen
            seen.add(kind)
            return answer if is_new else None

        scene.patch.setattr(scene.site.way, "trouble", first)

    return make


def cut_off(scene: Scene) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Answer | None:
        if not is_record(request) or seen:
            return None
        seen.append(request)
        whole = scene.site.way.forwarded(request)
        headers = {**whole.headers, "Content-Length": str(len(whole.body)), "Connection": "close"}
        return Answer(whole.status, whole.body[: len(whole.body) // 2], headers)

    scene.patch.setattr(scene.site.way, "trouble", answer)


def ignores_parts(scene: Scene) -> None:
    def answer(request: Request) -> Answer | None:
        headers = {name: value for name, value in request.headers.items() if name not in ("range", "x-ms-range")}
        return scene.site.way.forwarded(request._replace(headers=headers))

    scene.patch.setattr(scene.site.way, "trouble", answer)


def sent_elsewhere(scene: Scene) -> None:
    """Redirect to the server itself, as web servers do with folders that have moved."""

    def answer(request: Request) -> Answer:
        return Answer(307, headers={"Location": f"http://127.0.0.1:{scene.site.port}{request.target}"})

    scene.patch.setattr(scene.site.way, "trouble", answer)


def says_nothing(scene: Scene) -> None:
    scene.patch.setattr(scene.site.way, "trouble", lambda request: BREAK)


# ---- the line of any server ----


def refused(scene: Scene) -> None:
    scene.later.callback(scene.link.heal)
    scene.link.close()


def _in_the_middle_of_the_line(then: Callable[[Link], None]) -> Callable[[Scene], None]:
    def make(scene: Scene) -> None:
        link = scene.link
        scene.later.callback(link.heal)
        link.after(scene.middle, lambda: then(link))

    return make


dies = _in_the_middle_of_the_line(Link.close)
breaks = _in_the_middle_of_the_line(Link.heal)
stops = _in_the_middle_of_the_line(Link.stop)
crawls = _in_the_middle_of_the_line(Link.crawl)
