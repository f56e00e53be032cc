"""Webhook: posts important events of a run to a URL while training continues."""

import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from threading import Lock, Thread
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from trainer_plugins.finding import Severity
from trainer_plugins.printable import printable
from trainer_plugins.record.folder import DRY
from trainer_plugins.record.timeline import Entry, Failure, Remark, Sample

logger = logging.getLogger(__name__)

VARIABLE = "TRAINER_PLUGINS_WEBHOOK"
"""Environment variable with the URL. Anyone who knows the URL can post, so it is never shown."""

_SURVIVED = ("out-of-memory-survived", "out-of-memory-foreseen", "micro-batches-divided")
_MOST_WAITING = 16
_ANSWER_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 30.0
_END_SECONDS = 3.0
# The limit of Discord's `content`: discord.com/developers/docs/resources/webhook#execute-webhook
_LONGEST_CHARACTERS = 2000


class Webhook:
    """Posts ERROR findings, survival's actions, an out-of-memory error and the end of a run.

    Rank 0 posts everything, other ranks only their OOM, from a thread. If more than 16 messages
    wait, the oldest is dropped; the end of a run waits up to three seconds for the others.
    """

    def __init__(self, url: str, output_dir: str, rank: int) -> None:
        self._url = url
        self._run = Path(output_dir).absolute().name
        self._rank = rank
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._lock = Lock()
        self._thread: Thread | None = None  # delivers the waiting messages, then ends
        self._has_failed = False

    def tell(self, entry: Entry) -> None:
        is_first = self._rank == 0
        match entry:
            case Remark(finding=finding) if is_first and (
                finding.severity >= Severity.ERROR or finding.code in _SURVIVED
            ):
                self._post(entry.step, finding.code, str(finding))
                return
            case Failure(record=record, words=words) if record:
                self._post(entry.step, "out-of-memory", f"ran out of memory ({record}): {words}")
            case Failure(words=words) if is_first:
                self._post(entry.step, "run-failed", f"failed: {words}")
            case Sample(moment="end") if is_first:
                self._post(entry.step, "run-ended", "training has ended")
            case _:
                return
        if (thread := self._thread) is not None:
            thread.join(_END_SECONDS)

    def _post(self, step: int, code: str, words: str) -> None:
        from html import escape  # slow to import

        host = socket.gethostname()
        line = f"{self._run}, rank {self._rank} on {host}, step {step}: {words}"
        text = printable(line)[:_LONGEST_CHARACTERS]
        message = {
            "content": text,  # Discord
            "allowed_mentions": {"parse": []},  # Discord: an @everyone in an error notifies no one
            "text": escape(text, quote=False),  # Slack, which treats <!channel> as a mention
            "run": self._run,
            "step": step,
            "rank": self._rank,
            "host": host,
            "code": code,
        }
        with self._lock:
            self._waiting.append(json.dumps(message).encode())
            if self._thread is None:
                thread = Thread(target=self._deliver, name="webhook", daemon=True)
                thread.start()
                self._thread = thread

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                body = self._waiting.popleft()
            problem, pause_seconds = self._send(body)
            if problem and 0 <= pause_seconds <= _LONGEST_PAUSE_SECONDS:
                time.sleep(pause_seconds)
                problem, _ = self._send(body)
            if problem and not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "a message to the webhook was not delivered (%s); training continues"
                    " (logged once). Check the URL in %s",
                    problem,
                    VARIABLE,
                )

    def _send(self, body: bytes) -> tuple[str, float]:
        """Return an error's class (its message may hold the URL) and seconds until a retry."""
        if not self._url.startswith(("https://", "http://")):
            return "it starts with neither https:// nor http://", math.inf
        # Discord answers 403 to urllib's own User-Agent (discord/discord-api-docs#4908).
        headers = {"Content-Type": "application/json", "User-Agent": "trainer-plugins"}
        try:
            request = Request(self._url, body, headers)
            build_opener(_NoRedirect).open(request, timeout=_ANSWER_SECONDS).close()
        except HTTPError as error:
            error.close()
            is_temporary = error.code == 429 or error.code >= 500
            after = error.headers.get("Retry-After", "")
            return f"HTTP {error.code}", _seconds(after) if is_temporary else math.inf
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", None)  # URLError keeps the real error there
            return type(reason if isinstance(reason, OSError) else error).__name__, math.inf
        return "", 0.0


class _NoRedirect(HTTPRedirectHandler):  # urllib would follow with a GET, without the message
    def redirect_request(self, *_: object) -> None:
        return None


def _seconds(retry_after: str) -> float:
    try:
        return float(retry_after)
    except ValueError:  # absent, or a date
        return 1.0


def webhook_of_run(output_dir: str, rank: int) -> Callable[[Entry], None] | None:
    """Return a function that posts this rank's entries; None without a URL, and in a dry run."""
    url = os.environ.get(VARIABLE, "").strip()
    return Webhook(url, output_dir, rank).tell if url and DRY not in os.environ else None
