"""What tests of the doctor's checks share: the levels of findings, and a ledger as it was read."""

from pathlib import Path

from dra_driver.cli.doctor.host_checks import LedgerSnapshot
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import DeviceName
from dra_driver.node.state.ledger_files import DamagedRecord


def levels(findings):
    return [finding.level for finding in findings]


def ledger(*records, damaged=None):
    """*damaged*: by the UID of its claim, the names of the GPUs that an unreadable record may hold;
    None: any."""
    unreadable = {
        ClaimUid(uid): DamagedRecord(
            ClaimUid(uid),
            Path(f"/s/{uid}"),
            "it is cut short",
            names=frozenset(map(DeviceName, names or ())),
        )
        for uid, names in (damaged or {}).items()
    }
    return LedgerSnapshot({record.claim.uid: record for record in records}, unreadable)
