"""Polls a cloud's metadata service for a notice of this host's preemption, which then acts like SIGTERM.

AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, two minutes before,
and rebalance-recommendations.html, earlier. GCP: cloud.google.com/compute/docs/instances/create-use-spot, 30
seconds. Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events, 30 seconds.
"""

import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from common.distributed.preemption import request_stop
from common.system.env import is_hosts_first, report
from common.system.files import parse_json
from common.system.text import printable

POLL_S = 2.0
TIMEOUT_S = 2.0  # of a request to a service on the host's own link
MOST_BYTES = 2**16  # of an answer that are read
TOKEN_TTL_S = 21600
ANSWER = "its answer"
LINK_LOCAL = "http://169.254.169.254"


@dataclass(frozen=True)
class Notice:
    why: str  # `aws: terminate`
    until: str  # when, in the service's words; empty if it does not say


def watch_for_notice(cloud: str | None) -> None:
    """Starts to poll in one process of each host. Without a cloud nothing is contacted."""
    if cloud and is_hosts_first():
        threading.Thread(target=_poll, args=(SERVICES[cloud](),), daemon=True).start()


def _poll(find: Callable[[], Notice | None]) -> None:
    """Polls until there is a notice. A failing service is reported once, and polling continues."""
    complained = False
    while True:
        try:
            notice = find()
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            notice = None
            if not complained:
                print(f"--spot_notice: {printable(_reason(error))}; asking on", file=sys.stderr, flush=True)
                complained = True
        if notice:
            until = f" at {printable(notice.until)}" if notice.until else ""
            print(f"notice from {printable(notice.why)}{until}: saving and ending", flush=True)
            report("notice", why=notice.why, until=notice.until)
            request_stop(notice.why)
            if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
                os.kill(os.getppid(), signal.SIGTERM)  # else torchrun would restart this host's processes
            return
        time.sleep(POLL_S)


def _reason(error: BaseException) -> str:
    return f"the metadata service does not answer as expected ({type(error).__name__}: {error})"[:200]


class Aws:
    """AWS's IMDSv2: each request carries a token, renewed when it is refused or at half of its lifetime."""

    def __init__(self) -> None:
        mode = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
        own = "http://[fd00:ec2::254]" if mode == "ipv6" else LINK_LOCAL
        self.url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", own).rstrip("/") + "/latest/"
        self.token, self.renew_at = "", 0.0
        self.is_old: bool | None = None  # True when rebalancing was recommended before this process began

    def __call__(self) -> Notice | None:
        if found := self._get("meta-data/spot/instance-action"):
            action = parse_json(found, ANSWER)
            return Notice(f"aws: {str(action['action'])[:20]}", str(action["time"])[:40])
        found = self._get("meta-data/events/recommendations/rebalance")
        if self.is_old is None:
            self.is_old = found is not None  # it may last for hours: a job started after it is meant to run
        if found and not self.is_old:
            since = str(parse_json(found, ANSWER)["noticeTime"])[:40]
            return Notice(f"aws: rebalance recommended, since {since}", "")
        return None

    def _get(self, path: str) -> str | None:
        if time.monotonic() > self.renew_at:
            self._renew()
        try:
            return _get(self.url + path, {"X-aws-ec2-metadata-token": self.token})
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            self._renew()
            return _get(self.url + path, {"X-aws-ec2-metadata-token": self.token})

    def _renew(self) -> None:
        header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        self.token = _get(self.url + "api/token", header, method="PUT") or ""
        self.renew_at = time.monotonic() + TOKEN_TTL_S / 2


class Gcp:
    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self.url = f"http://{host}/computeMetadata/v1/instance/preempted"

    def __call__(self) -> Notice | None:
        found = _get(self.url, {"Metadata-Flavor": "Google"})
        return Notice("gcp: preempted", "") if (found or "").strip() == "TRUE" else None


class Azure:
    """AZURE_METADATA_ENDPOINT is our own variable, as Azure's SDKs have none."""

    def __init__(self) -> None:
        self.url = os.environ.get("AZURE_METADATA_ENDPOINT", LINK_LOCAL).rstrip("/") + "/metadata/"
        self.own: str | None = None  # this host's name in events

    def __call__(self) -> Notice | None:
        if self.own is None:
            self.own = self._get("instance/compute/name?api-version=2021-02-01&format=text").strip()
        for event in parse_json(self._get("scheduledevents?api-version=2020-07-01"), ANSWER)["Events"]:
            if event["EventType"] == "Preempt" and self.own in event["Resources"]:
                return Notice("azure: preempted", str(event.get("NotBefore", ""))[:40])
        return None

    def _get(self, path: str) -> str:
        found = _get(self.url + path, {"Metadata": "true"})
        if found is None:
            raise ValueError(f"no {path.partition('?')[0]}")
        return found


SERVICES: dict[str, type[Aws] | type[Gcp] | type[Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


# No proxy: the service is on the host's own link, and a proxy must not see the token.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def _get(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """The text of the answer; None for 404. OSError without an answer."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
