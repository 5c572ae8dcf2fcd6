"""Faults of a Redis; those of its line are as with any server (`trouble_http`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.remote.backends import Scene
from tests.remote.object_stub import GoogleServer

Make = Callable[[Scene], object]


def client(scene: Scene) -> Any:
    import redis

    made = redis.Redis(port=scene.site.port, socket_timeout=30)
    scene.later.callback(made.close)
    return made


def _key(scene: Scene, name: str) -> str:
    return f"{urlsplit(scene.site.url).query.removeprefix('prefix=')}/{name}"


def wants_a_password(scene: Scene) -> None:
    there = client(scene)
    there.config_set("requirepass", "zqxwva")
    scene.later.callback(there.config_set, "requirepass", "")


def allows_no(command: str) -> Make:
    def make(scene: Scene) -> None:
        there = client(scene)
        there.execute_command("ACL", "SETUSER", "default", f"-{command}")
        scene.later.callback(there.execute_command, "ACL", "SETUSER", "default", f"+{command}")

    return make


def rights_end(scene: Scene) -> None:
    there, mine = client(scene), ("ACL", "SETUSER", "default")
    scene.later.callback(there.execute_command, *mine, "+getrange")
    scene.link.after(scene.middle, lambda: there.execute_command(*mine, "-getrange"))


def no_database(scene: Scene) -> None:
    scene.patch.setattr(scene.site, "url", scene.site.url.replace("/0?", "/99?"))


def is_busy(scene: Scene) -> None:
    import redis

    there, script = client(scene), client(scene)
    there.config_set("busy-reply-threshold", 1)

    def run() -> None:
        with suppress(redis.RedisError):
            script.eval("while true do end", 0)

    def end() -> None:
        there.script_kill()
        running.join(30)
        there.config_set("busy-reply-threshold", 5000)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    scene.later.callback(end)
    while True:
        try:
            there.ping()
            time.sleep(0.001)
        except redis.ResponseError:
            return


def holds_another_type(scene: Scene) -> None:
    """Give the name of the head to another user's list."""
    there, name = client(scene), _key(scene, "head")
    there.rename(name, name + "-aside")
    there.lpush(name, "mine")
    scene.later.callback(there.rename, name + "-aside", name)
    scene.later.callback(there.delete, name)


def is_none(scene: Scene) -> None:
    web = GoogleServer()
    scene.later.callback(web.close)
    scene.patch.setattr(scene.link, "_to", web.port)


def is_full(scene: Scene) -> None:
    there = client(scene)
    there.config_set("maxmemory", 1)
    scene.later.callback(there.config_set, "maxmemory", 0)
