"""launch.py's part in a job that hangs: collects the ranks' reports and shows them as a table."""

import contextlib
import time
from pathlib import Path

from common.system.hangs import Evidence, hang_table

COLLECT_S = 4.0  # from the first report to the table; ranks without a report by then are silent


class HangReports:
    """The ranks' reports. Writes their stacks to files beside the hosts' logs."""

    def __init__(self, log_dir: Path):
        self.log_dir = log_dir
        self.found: dict[int, Evidence] = {}
        self.began_at: float | None = None
        self.is_shown = False

    def add(self, host: str, event: Evidence) -> None:
        self.began_at = self.began_at or time.monotonic()
        if stacks := event.pop("stacks", ""):
            with contextlib.suppress(OSError):
                self.log_dir.mkdir(parents=True, exist_ok=True)
                (self.log_dir / f"hang_rank_{event['rank']}.txt").write_text(stacks)
        self.found[event["rank"]] = event | {"host": host}

    def lines_due(self, at_once: bool = False) -> list[str]:
        """The table's lines when they are due, once; otherwise []."""
        if self.began_at is None or self.is_shown:
            return []
        if not at_once and time.monotonic() - self.began_at < COLLECT_S:
            return []
        self.is_shown = True
        return [
            *hang_table(list(self.found.values())),
            f"the stacks of all threads: {self.log_dir}/hang_rank_*.txt",
        ]
