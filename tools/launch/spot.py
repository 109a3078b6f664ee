"""Runs a command on a spot machine, and sends it SIGTERM at the cloud's notice of preemption.

    python -m tools.launch.spot aws -- torchrun --nproc_per_node=4 train_vit.py

Start it on each host; `launch.py --spot_notice aws` does. It polls the cloud's metadata service.
AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, two minutes before,
and rebalance-recommendations.html, earlier. GCP: cloud.google.com/compute/docs/instances/create-use-spot, 30
seconds. Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events, 30 seconds.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

from common.system.cli import command_parser, run_command
from common.system.env import report
from common.system.files import parse_json
from common.system.processes import adopt_orphans, end_with_parent, running_descendants
from common.system.text import printable

POLL_S = 2.0
TIMEOUT_S = 2.0  # of a request to a service on the host's own link
SAVE_S = 120  # from the command's end, until its processes must have ended: accelerate does not wait for them
TOKEN_TTL_S = 60
ANSWER = "its answer"
LINK_LOCAL = "http://169.254.169.254"

Service = Callable[[], str | None]  # the notice in words, if there is one


def main() -> int:
    parser = command_parser(__doc__, "python -m tools.launch.spot CLOUD -- COMMAND")
    parser.add_argument("cloud", choices=SERVICES)
    parser.add_argument("command", nargs="+")
    flags = parser.parse_args()
    return watch(SERVICES[flags.cloud](), flags.command)


def watch(service: Service, words: list[str]) -> int:
    """Runs the command until all its processes have ended. Returns its exit status, or 128 + a signal."""
    adopt_orphans()
    command = subprocess.Popen(words, preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: command.terminate())
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the command, too
        signal.signal(number, lambda *_: None)
    is_noticed, complained = False, False
    while command.poll() is None:
        try:
            notice = None if is_noticed else service()
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            notice = None
            if not complained:
                what = printable(f"{type(error).__name__}: {error}"[:200])
                print(f"the metadata service does not answer as expected ({what})", file=sys.stderr)
                complained = True
        if notice:
            print(f"preemption notice ({printable(notice)}): sending SIGTERM", flush=True)
            report("leaving", why=notice)
            command.terminate()
            is_noticed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(POLL_S)
    deadline = time.monotonic() + SAVE_S
    while running_descendants([command.pid]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return 128 - command.returncode if command.returncode < 0 else command.returncode


class Aws:
    """AWS's IMDSv2: a request carries a token, which each poll asks for anew."""

    def __init__(self) -> None:
        mode = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
        own = "http://[fd00:ec2::254]" if mode == "ipv6" else LINK_LOCAL
        self.url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", own).rstrip("/") + "/latest/"
        self.is_old: bool | None = None  # True when rebalancing was recommended before this process began

    def __call__(self) -> str | None:
        life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        token = {"X-aws-ec2-metadata-token": _get(self.url + "api/token", life, method="PUT") or ""}
        if text := _get(self.url + "meta-data/spot/instance-action", token):
            action = parse_json(text, ANSWER)
            return f"aws: {action['action']} at {action['time']}"
        text = _get(self.url + "meta-data/events/recommendations/rebalance", token)
        if self.is_old is None:
            self.is_old = text is not None  # it may last for hours: a job started after it is meant to run
        if text and not self.is_old:
            return f"aws: rebalance recommended, since {parse_json(text, ANSWER)['noticeTime']}"
        return None


class Gcp:
    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self.url = f"http://{host}/computeMetadata/v1/instance/preempted"

    def __call__(self) -> str | None:
        text = _get(self.url, {"Metadata-Flavor": "Google"})
        return "gcp: preempted" if (text or "").strip() == "TRUE" else None


class Azure:
    """AZURE_METADATA_ENDPOINT is our own variable, as Azure's SDKs have none."""

    def __init__(self) -> None:
        self.url = os.environ.get("AZURE_METADATA_ENDPOINT", LINK_LOCAL).rstrip("/") + "/metadata/"
        self.own: str | None = None  # this host's name in events

    def __call__(self) -> str | None:
        if self.own is None:
            self.own = self._get("instance/compute/name?api-version=2021-02-01&format=text").strip()
        for event in parse_json(self._get("scheduledevents?api-version=2020-07-01"), ANSWER)["Events"]:
            if event["EventType"] == "Preempt" and self.own in event["Resources"]:
                return f"azure: preempted, not before {event.get('NotBefore') or 'now'}"
        return None

    def _get(self, path: str) -> str:
        text = _get(self.url + path, {"Metadata": "true"})
        if text is None:
            raise ValueError(f"no {path.partition('?')[0]}")
        return text


SERVICES: dict[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}

# No proxy: the service is on the host's own link, and a proxy must not see the token.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The text of the answer; None for 404. OSError without an answer."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


if __name__ == "__main__":
    sys.exit(run_command(main))
