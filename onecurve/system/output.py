"""Messages of the package: the logger `onecurve`, whose lines appear as print() would show them.

INFO goes to stdout; warnings and errors go to stderr. An embedding program silences them with
`logging.getLogger("onecurve").setLevel("ERROR")`, or replaces the handler.
"""

import logging
import sys


class _PlainLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Looked up for each line, because progress bars and tests replace the streams.
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=stream, flush=True)


log = logging.getLogger("onecurve")
if log.level == logging.NOTSET:  # the embedding program has not chosen one
    log.setLevel(logging.INFO)
log.addHandler(_PlainLines())
log.propagate = False
