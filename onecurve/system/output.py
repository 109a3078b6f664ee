"""Sets up the logger for the package's messages, which are plain lines without a prefix.

The logger prints INFO messages to stdout, and warnings and errors to stderr. To silence the messages, a
program that embeds the package can call `logging.getLogger("onecurve").setLevel("ERROR")` or replace the
handler.
"""

import logging
import sys


class _PlainLines(logging.Handler):
    """Handler that prints messages to stdout, and warnings and errors to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        # Look up sys.stdout and sys.stderr for each line, because progress bars and tests replace these
        # streams.
        output_stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=output_stream, flush=True)


log = logging.getLogger("onecurve")
if log.level == logging.NOTSET:  # no program has set a level yet
    log.setLevel(logging.INFO)
log.addHandler(_PlainLines())
log.propagate = False  # otherwise, the root logger's handlers would print each message again
