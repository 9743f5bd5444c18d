"""What a node profile says about GPUs, as values: who wrote it and in which file is forgotten."""

from enum import StrEnum

from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.health import DEFAULT_HEALTH_RULES, HealthRules

_MIB = 1024 * 1024


class SharingStrategy(StrEnum):
    """What happens on a GPU that several claims are on; the words of ``GpuConfig``."""

    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"


class GuardPolicy(StrEnum):
    """What the memory guard does about a claim that uses more than its share."""

    OFF = "Off"
    WARN = "Warn"  # an event, a metric, a line in the log
    KILL = "Kill"  # that, and after the grace period its largest process is ended


class MpsTenants(StrEnum):
    """Whose pods may share a GPU by MPS: tenants of one server share faults and bandwidth, and who
    is root on the node can lift limits that the server holds."""

    ANY = "Any"
    NON_ROOT = "NonRoot"  # no container that uses it can run as root of the node
    USER_NAMESPACES = "UserNamespaces"  # pods with hostUsers: false only


class MpsServerScope(StrEnum):
    """Who shares an MPS server of protocol 2, whose clients share memory with it and each other."""

    PER_NAMESPACE = "PerNamespace"  # of Kubernetes: each has servers of its own
    SHARED = "Shared"  # everybody, of any namespace


class AllocationApi(StrEnum):
    """By which API of Kubernetes a node gives its GPUs out: by one at any moment."""

    AUTO = "Auto"  # only in profiles: what the cluster and the kubelet can do decides
    DRA = "DRA"
    DEVICE_PLUGIN = "DevicePlugin"


class AllocationPolicy(StrEnum):
    """Which replicas a container gets by the device-plugin API. Several are of different GPUs where
    possible, unless they are to be packed."""

    AUTO = "Auto"  # of the GPUs of which most is given out already
    PACKED = "Packed"  # as many as possible of one GPU
    DISTRIBUTED = "Distributed"  # of the GPUs of which least is given out


@frozen
class MigRules:
    """What becomes of a GPU that can have partitions. Those that exist are always offered.

    *profiles*: patterns as of a shell on names of profiles ("1g.10gb", "*+me"); empty: all plain
    ones, of several with as many compute slices the one with the least memory.
    """

    dynamic: bool = False  # partitions are created when a claim needs them
    profiles: tuple[str, ...] = ()
    layout: str = ""  # its partitions are those of this named layout; empty: of none
    single: bool = False  # those that exist, all of one kind, serve claims for a GPU, too
    replicas: tuple[tuple[str, int], ...] = ()  # by profile: like ``Rules.replicas``


@frozen
class GuardRules:
    """The memory guard of one claim on one GPU."""

    policy: GuardPolicy
    grace_seconds: float = 10.0  # how long a claim may be above its share before one is killed


@frozen
class Rules:
    """What holds for one GPU. The defaults are what holds without a profile."""

    include: bool = True  # False: it is not offered at all
    fractions: bool = True  # False: one claim at a time takes all of it, as with NVIDIA's driver
    replicas: int = 1  # above 1: a claim that names nothing gets one N-th
    rename: bool = False  # the type is "gpu-shared" where there are replicas
    one_share: bool = False  # failRequestsGreaterThanOne: nobody gets more than one share
    allocation_policy: AllocationPolicy = AllocationPolicy.AUTO
    strategies: tuple[SharingStrategy, ...] = (SharingStrategy.TIME_SLICING, SharingStrategy.MPS)
    default_strategy: SharingStrategy = SharingStrategy.TIME_SLICING
    shares: int | None = None  # the most claims at once; None: what MPS takes on such a board
    memory_least: int = 1024 * _MIB  # bytes: the least that a claim can have
    memory_step: int = _MIB  # bytes: every share is a multiple of it
    limited: bool = True  # False: a share of the memory is booked, and nobody enforces it
    guard: GuardRules = GuardRules(GuardPolicy.KILL)
    strict: bool = False  # without the driver's own limit a fraction is not prepared at all
    tenants: MpsTenants = MpsTenants.ANY
    fractions_set_interval: bool = False  # a GPU has one interval, also for all other claims on it
    mps_servers: MpsServerScope = MpsServerScope.PER_NAMESPACE
    mig: MigRules = MigRules()
    health: HealthRules = DEFAULT_HEALTH_RULES
    without_mps: str = ""  # why this GPU cannot be shared by MPS, whatever the profile says


DEFAULT_RULES = Rules()


@frozen
class GpuSelector:
    """Which GPUs are meant: those that match every field that is not empty."""

    minors: frozenset[int] = frozenset()
    uuids: frozenset[GpuUuid] = frozenset()
    products: tuple[str, ...] = ()  # patterns as of a shell, on the product name: "*H100*"


@frozen
class ProfileEntry:
    """Rules for the GPUs that no earlier entry of the profile selects."""

    selection: GpuSelector
    rules: Rules
    path: str  # where it stands, for messages: "spec.gpus[0]"
    elsewhere: tuple[tuple[str, str], ...] = ()  # fields that its document has in other places

    def where(self, field: str, key: str = "") -> str:
        """Where its document says *field*, for messages: "spec.gpus[0].mig.profiles". *key*: of
        which item of it, where each can stand in a place of its own."""
        paths = dict(self.elsewhere)
        return paths.get(f"{field}.{key}") or paths.get(field, f"{self.path}.{field}")


@frozen
class Profile:
    """One named profile. A GPU that no entry selects follows the default ``Rules``.

    *warnings*: what in its document has no meaning here, one line each, with the field path.
    *revision*: which one of a NodeProfile object it is; empty: it is of a file, or bundled.
    """

    name: str
    entries: tuple[ProfileEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    revision: str = ""
    api: AllocationApi = AllocationApi.AUTO


DEFAULT_PROFILE = Profile("default")
