"""A stand-in for `python` in tests: it has warm_server.py fork a process that has imported torch.

The forked process has this one's streams, folder, environment and ignored signals. This one waits for it,
passes signals on, and ends as it does. Needs the standard library alone, so that it starts in 30 ms.
"""

import array
import ctypes
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to pass them on to
    request = {
        "words": sys.argv[1:],
        "folder": os.getcwd(),
        "python": os.path.abspath(__file__),
        "env": dict(os.environ),
        "ignored": [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "server"))
    data = json.dumps(request).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(data)
    answers = server.makefile("r")
    pid = int(answers.readline())
    for number in PASSED_ON:
        if number not in request["ignored"]:
            signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for stream in (0, 1, 2):
        os.close(stream)  # who reads what the process prints sees the end when that ends
    status = int(answers.readline() or signal.SIGKILL)  # a wait status; none where the server is gone
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
