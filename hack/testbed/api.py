"""The few calls that the testbed itself makes to its API server."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hack.testbed.errors import ClusterError

CALL_SECONDS = 5

Document = dict[str, Any]


class ApiServer:
    """The API server on loopback, or the kubelet, which has the same administrator."""

    def __init__(self, pki: Path, port: int) -> None:
        self._url = f"https://127.0.0.1:{port}"
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        # No proxy, whatever the environment says: this is loopback.
        self._open = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        ).open

    def ready(self) -> bool:
        return self._request("GET", "/readyz", None) is not None

    def get(self, path: str) -> Document | None:
        """The object, or None when it, or the server, is not there."""
        answer = self._request("GET", path, None)
        return json.loads(answer) if answer is not None else None

    def create(self, path: str, document: Document) -> None:
        """Create it; one that is there already is left as it is."""
        if self._request("POST", path, document) is None:
            raise ClusterError(f"the API server refused {document['kind']} at {path}")

    def _request(self, method: str, path: str, document: Document | None) -> bytes | None:
        request = urllib.request.Request(
            f"{self._url}{path}",
            method=method,
            data=json.dumps(document).encode() if document else None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with self._open(request, timeout=CALL_SECONDS) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as e:
            with e:
                return b"" if e.code == 409 else None
        except OSError:
            return None


def answers(url: str) -> bool:
    """Whether a health page on loopback says 200; the certificate there is made up."""
    context = ssl._create_unverified_context()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=CALL_SECONDS) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as e:
        e.close()
        return False
    except OSError:
        return False
