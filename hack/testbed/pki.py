"""The certificates of a cluster, made with openssl: one authority, and who everybody is."""

import shutil
import subprocess
from pathlib import Path

from hack.testbed.errors import ClusterError
from hack.testbed.packages import system_program

OPENSSL_SECONDS = 30
DAYS = "3650"

# Without it openssl would put the extensions of its default configuration into each certificate.
_CONFIGURATION = "[req]\ndistinguished_name = name\n[name]\n"

_CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    # The API server calls the kubelet as this one; masters may everything, logs and exec too.
    "apiserver-kubelet-client": "/O=system:masters/CN=kube-apiserver-kubelet-client",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
}


def write_pki(directory: Path, node_name: str, service_address: str) -> None:
    """Write all keys and certificates; complete or not there."""
    if directory.is_dir():
        return
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    (partial / "openssl.cnf").write_text(_CONFIGURATION)
    _certificate(
        partial,
        "ca",
        "/CN=dra-testbed",
        {
            "basicConstraints": "critical,CA:TRUE",
            "keyUsage": "critical,keyCertSign,digitalSignature",
        },
    )
    kubelet = f"/O=system:nodes/CN=system:node:{node_name}"
    for name, subject in {**_CLIENTS, "kubelet": kubelet}.items():
        _certificate(partial, name, subject, {"extendedKeyUsage": "clientAuth"})
    names = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    for name, alternatives in {
        "apiserver": f"{names},IP:127.0.0.1,IP:{service_address}",
        "kubelet-server": f"DNS:{node_name},DNS:localhost,IP:127.0.0.1",
    }.items():
        _certificate(
            partial,
            name,
            f"/CN={name}",
            {
                "extendedKeyUsage": "serverAuth",
                "subjectAltName": alternatives,
            },
        )
    _openssl(
        partial,
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-out",
        "service-accounts.key",
    )
    _openssl(
        partial, "pkey", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub"
    )
    partial.rename(directory)


def _certificate(directory: Path, name: str, subject: str, extensions: dict[str, str]) -> None:
    issuer = [] if name == "ca" else ["-CA", "ca.crt", "-CAkey", "ca.key"]
    added = [word for key, value in extensions.items() for word in ("-addext", f"{key}={value}")]
    _openssl(
        directory,
        "req",
        "-x509",
        "-config",
        "openssl.cnf",
        "-nodes",
        "-days",
        DAYS,
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-subj",
        subject,
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.crt",
        *issuer,
        *added,
    )


def _openssl(directory: Path, *arguments: str) -> None:
    program = system_program("openssl")
    if program is None:
        raise ClusterError("openssl is not installed")
    answer = subprocess.run(
        [program, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=OPENSSL_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        raise ClusterError(
            f"openssl {' '.join(arguments)} failed (3.0 or newer is needed):\n{answer.stderr}"
        )
