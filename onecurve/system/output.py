"""Sets up the logger for the package's messages, which prints plain lines without a prefix.

INFO goes to stdout; warnings and errors go to stderr. An embedding program can silence messages with
`logging.getLogger("onecurve").setLevel("ERROR")`, or replace the handler.
"""

import logging
import sys


class _PlainLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Look up the stream for each line, because progress bars and tests replace sys.stdout and sys.stderr.
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=stream, flush=True)


log = logging.getLogger("onecurve")
if log.level == logging.NOTSET:  # the embedding program has not set a level
    log.setLevel(logging.INFO)
log.addHandler(_PlainLines())
log.propagate = False
