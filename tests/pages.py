"""The pages of an HTTP server on this machine's loopback."""

import urllib.error
import urllib.request


def read_page(port: int, path: str, seconds: float = 10) -> tuple[int, str]:
    """The status and text of a page; 0 and why where nobody answers within *seconds*."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=seconds) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()
    except OSError as e:
        return 0, str(e)
