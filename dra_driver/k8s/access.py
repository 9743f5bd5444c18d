"""Where the API server is and who we are there: a kubeconfig, or our pod's service account."""

import os
import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

from dra_driver.base.errors import SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.base.yaml_documents import load_document

SERVICE_ACCOUNT_DIRECTORY = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")

_PATHS = ("certificate-authority", "client-certificate", "client-key")


@frozen
class ApiServerAccess:
    """One context of a kubeconfig.

    The token's file is kept apart because it is read again and again (``TokenFile``). Certificates
    stay paths too; every new connection reads them.
    """

    cluster: Mapping[str, Any]
    user: Mapping[str, Any]  # without the token
    token: str | None = field(default=None, repr=False)
    token_file: pathlib.Path | None = None  # wins over the token, as in client-go's AuthInfo

    @property
    def config(self) -> Mapping[str, Any]:
        """A kubeconfig with this one context, without the token."""
        return {
            "clusters": [{"name": "only", "cluster": dict(self.cluster)}],
            "users": [{"name": "only", "user": dict(self.user)}],
            "contexts": [{"name": "only", "context": {"cluster": "only", "user": "only"}}],
            "current-context": "only",
        }


_TOKEN_SECONDS: Final = 60.0  # as client-go has it


class TokenFile:
    """A token whose file is replaced from time to time. Safe to use from several threads.

    The kubelet replaces a pod's token once four fifths of its life are over, which lasts ten
    minutes at least: so the old one is good for a minute more.
    """

    def __init__(self, path: pathlib.Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._read: tuple[str, float] | None = None  # and until when nobody has to look again

    def token(self, refused: str = "") -> str:
        """The token that was there at most a minute ago; now, where that is the one that was
        *refused*. OSError: it cannot be read."""
        now, read = self._clock(), self._read
        if read is None or now >= read[1] or read[0] == refused:
            self._read = read = self._path.read_text().strip(), now + _TOKEN_SECONDS
        return read[0]


def load_kubeconfig(path: pathlib.Path, may_run_programs: bool = False) -> ApiServerAccess:
    """The current context of the kubeconfig at *path*.

    *may_run_programs*: whether a user may be known by a program that gives a token or a certificate
    (``exec``), as those of most clouds are; no image of a service carries one. SettingsError: it
    cannot be read, names what it does not define, or knows its user only by a program that is not
    run (always ``auth-provider``, which Kubernetes 1.26 removed).
    """
    document = _load(path)
    context_name = document.get("current-context")
    if not context_name:
        raise SettingsError(f"kubeconfig {path} has no current-context: kubectl config use-context")
    context = _named(document, "context", context_name, path)
    cluster = _named(document, "cluster", context.get("cluster"), path)
    user = dict(_named(document, "user", context["user"], path)) if context.get("user") else {}
    if not cluster.get("server"):
        raise SettingsError(f"kubeconfig {path}: cluster {context['cluster']!r} has no server")
    programs = [
        key
        for key in ("auth-provider", *(() if may_run_programs else ("exec",)))
        if user.pop(key, None)
    ]
    if programs and not user:
        raise SettingsError(
            f"kubeconfig {path}: user {context['user']!r} has only {programs[0]!r}, "
            "which is not run here; give it a token, a tokenFile or a client certificate"
        )
    token, token_file = user.pop("token", None), user.pop("tokenFile", None)
    directory = path.absolute().parent
    return ApiServerAccess(
        _from(directory, cluster),
        _from(directory, user),
        token,
        directory / token_file if token_file else None,
    )


def load_access(kubeconfig: pathlib.Path | None, may_run_programs: bool = False) -> ApiServerAccess:
    """What *kubeconfig* says; None: the service account of our pod. SettingsError: it cannot be."""
    return load_kubeconfig(kubeconfig, may_run_programs) if kubeconfig else load_in_cluster()


def load_in_cluster(
    directory: pathlib.Path = SERVICE_ACCOUNT_DIRECTORY, environ: Mapping[str, str] = os.environ
) -> ApiServerAccess:
    """The service account that the kubelet mounts into our pod, at *directory*.

    SettingsError: we are in no pod, or its service account token is not mounted.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise SettingsError(
            "not in a pod (KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set): "
            "name a kubeconfig with --kubeconfig"
        )
    for name in ("token", "ca.crt"):
        if not (directory / name).is_file():
            raise SettingsError(
                f"{directory / name} is missing: the pod needs automountServiceAccountToken: true"
            )
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    cluster = {"server": server, "certificate-authority": str(directory / "ca.crt")}
    return ApiServerAccess(cluster, {}, token_file=directory / "token")


def _load(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        document = load_document(path.read_bytes())
    except (OSError, ValueError) as e:
        raise SettingsError(f"kubeconfig {path} cannot be read: {e}") from e
    if not isinstance(document, dict):
        raise SettingsError(f"kubeconfig {path} is empty or no kubeconfig")
    return document


def _named(
    document: Mapping[str, Any], kind: str, name: str | None, path: pathlib.Path
) -> Mapping[str, Any]:
    for entry in document.get(f"{kind}s") or ():
        if entry.get("name") == name:
            return entry.get(kind) or {}
    raise SettingsError(f"kubeconfig {path} names the {kind} {name!r} but does not define it")


def _from(directory: pathlib.Path, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """*entry* with the paths in it made absolute: they start at the kubeconfig's directory."""
    return {
        key: str(directory / value) if key in _PATHS and value else value
        for key, value in entry.items()
    }
