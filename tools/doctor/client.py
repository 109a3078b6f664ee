"""doctor.py's connection to a host, where tools/doctor/facts.py answers its questions."""

import json
import queue
import sys
import threading
from typing import Any

from common.system.paths import ROOT
from tools.doctor.facts import ANSWER
from tools.launch.hosts import Host, start_on

ASK_S = 30  # time-out of a quick answer


class HostClient:
    def __init__(self, host: Host):
        self.host, self.name = host, host.name
        self.process = start_on(host.name, [sys.executable, "-m", "tools.doctor.facts"], ROOT)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: process ended
        self._other_lines: list[str] = []  # other output
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, name: str, within_s: float = ASK_S, **question: Any) -> dict[str, Any]:
        """The host's answer; if there is none, the keys `error`, with the reason, and `gone`."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"ask": name, **question}) + "\n")
            answer = self._answers.get(timeout=within_s)
        except (OSError, ValueError):
            answer = None
        except queue.Empty:
            self.process.kill()  # else a late answer would be taken for that to the next question
            self._other_lines.append(f"no answer within {within_s:.0f} s")
            answer = None
        if answer is None:
            self._answers = queue.SimpleQueue()
            self._answers.put(None)  # for the next question, too
            status = self.process.wait()
            return {
                "error": self._other_lines[-1] if self._other_lines else f"exit status {status}",
                "gone": True,
            }
        return answer

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
            else:
                self._other_lines.append(line.strip())
        self._answers.put(None)
