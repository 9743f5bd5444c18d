"""Entries of NodeProfiles, right ones and wrong ones, as the API server and a node judge them."""

from typing import Any

Entries = list[dict[str, Any]]

EVERYTHING: dict[str, Any] = {
    "select": {"index": [0, 255], "uuid": ["GPU-1"], "product": ["*H100*", "NVIDIA L40S"]},
    "include": True,
    "fractions": "Capacity",
    "replicas": 4,
    "rename": True,
    "failRequestsGreaterThanOne": True,
    "allocationPolicy": "Packed",
    "strategies": ["TimeSlicing", "MPS"],
    "defaultStrategy": "MPS",
    "mpsTenants": "NonRoot",
    "mpsServer": "Shared",
    "memory": {"least": "2Gi", "step": "512Mi"},
    "memoryGuard": {"policy": "Warn", "grace": "1m30.5s"},
    "memoryLimit": "BestEffort",
    "mig": {
        "mode": "Dynamic",
        "profiles": ["1g.10gb", "*+me"],
        "strategy": "Single",
        "replicas": {"1g.10gb": 4, "1g.10gb+me.all": 1000},
    },
    "health": {
        "effects": {"gpuLost": "NoExecute", "xid": "None", "rowRemapPending": "NoSchedule"},
        "xids": {"31": "NoSchedule", "9999": "NoExecute"},
        "recovery": "1m30s",
    },
}

RIGHT: dict[str, Entries] = {
    "every field": [EVERYTHING],
    "the other fields": [
        {"shares": 8, "timeSliceInterval": "Any", "mig": {"layout": "all-balanced"}}
    ],
    "nothing": [{}],
    "empty parts": [{"memory": {}, "memoryGuard": {}, "mig": {}, "health": {"effects": {}}}],
    "not offered": [{"select": {"index": [0]}, "include": False}, {"fractions": "Never"}],
    "64 entries": [{"select": {"index": [index]}} for index in range(63)] + [{}],
    "replicas of which none is renamed": [{"replicas": 1, "rename": False}],
    "replicas of partitions that are renamed": [
        {"rename": True, "mig": {"replicas": {"1g.5gb": 2}}}
    ],
    "one strategy twice": [{"strategies": ["MPS", "MPS"], "mpsServer": "PerNamespace"}],
    **{f"at least {text}": [{"memory": {"least": text}}] for text in ("256Mi", "0.25Gi", "1e9")},
    **{
        f"in steps of {text}": [{"memory": {"step": text}}]
        for text in ("1Mi", "0.5Gi", "1.5Gi", "1024Ki", "1048576", "1073741824000m", "3Ti", "1e30")
    },
    **{
        f"after {text}": [{"memoryGuard": {"grace": text}}]
        for text in ("0s", "500ms", "24h", "23h60m", "0.5h")
    },
}

WRONG: dict[str, tuple[Entries, str, str]] = {
    "select: empty": ([{"select": {}}], "[0].select", "is empty; say which GPUs are meant"),
    "select: no GPU": ([{"select": {"uuid": ["MIG-1"]}}], "[0].select.uuid[0]", "write GPU-…"),
    "select: no index": ([{"select": {"index": [-1]}}], "[0].select.index[0]", ""),
    "select: an empty list": ([{"select": {"product": []}}], "[0].select.product", ""),
    "select: an empty text": ([{"select": {"product": [""]}}], "[0].select.product[0]", ""),
    "no entry": ([], "", ""),
    "65 entries": ([{"select": {"index": [0]}}] * 65, "", ""),
    "never reached": ([{}, {"select": {"index": [0]}}], "", "put"),
    "never reached, either": ([{"select": {"index": [0]}}, {}, {}], "", "put"),
    "replicas: none": ([{"replicas": 0}], "[0].replicas", ""),
    "replicas: too many": ([{"replicas": 1001}], "[0].replicas", ""),
    "replicas: text": ([{"replicas": "4"}], "[0].replicas", ""),
    "no such word": ([{"fractions": "Sometimes"}], "[0].fractions", ""),
    "no such strategy": ([{"strategies": ["Magic"]}], "[0].strategies[0]", ""),
    "least: no quantity": ([{"memory": {"least": "much"}}], "[0].memory.least", "for example 1Gi"),
    "least: negative": ([{"memory": {"least": "-1Gi"}}], "[0].memory.least", "for example 1Gi"),
    "least: too little": ([{"memory": {"least": "255Mi"}}], "[0].memory.least", "256Mi or more"),
    **{
        f"step: {text}": ([{"memory": {"step": text}}], "[0].memory.step", "no multiple of 1Mi")
        for text in ("1500k", "0", "1.5Mi", "250m", "1048577", "0.0001Mi")
    },
    "effect: no such word": (
        [{"health": {"effects": {"xid": "Evict"}}}],
        "[0].health.effects.xid",
        "",
    ),
    "xids: no number": ([{"health": {"xids": {"x": "None"}}}], "[0].health.xids", "of an Xid"),
    "xids: too large": ([{"health": {"xids": {"99999": "None"}}}], "[0].health.xids", ""),
    "xids: no such effect": ([{"health": {"xids": {"79": "Evict"}}}], "[0].health.xids.79", ""),
    "recovery: more than a day": (
        [{"health": {"recovery": "24h1s"}}],
        "[0].health.recovery",
        "is more than a day",
    ),
    "grace: no duration": (
        [{"memoryGuard": {"grace": "10"}}],
        "[0].memoryGuard.grace",
        "is not a duration; write for example 10s",
    ),
    "grace: more than a day": (
        [{"memoryGuard": {"grace": "24h1ms"}}],
        "[0].memoryGuard.grace",
        "is more than a day; policy Warn never ends a process",
    ),
    "layout: no label": ([{"mig": {"layout": "a b"}}], "[0].mig.layout", "a node's label"),
    "layout: too long": ([{"mig": {"layout": "a" * 64}}], "[0].mig.layout", ""),
    "partitions: no such": ([{"mig": {"replicas": {"gpu": 2}}}], "[0].mig.replicas", "1g.10gb"),
    "partitions: none": ([{"mig": {"replicas": {}}}], "[0].mig.replicas", ""),
    "a strategy that is not allowed": (
        [{"strategies": ["MPS"], "defaultStrategy": "TimeSlicing"}],
        "[0].defaultStrategy",
        "TimeSlicing is not among strategies: MPS",
    ),
    **{
        f"{field}: not offered": (
            [{"include": False, field: value}],
            f"[0].{field}",
            "has no effect with include: false; remove one of them",
        )
        for field, value in (EVERYTHING | {"timeSliceInterval": "Any", "shares": 2}).items()
        if field not in ("select", "include")
    },
    **{
        f"{field}: whole GPUs": (
            [{"fractions": "Never", field: value}],
            f"[0].{field}",
            "has no effect with fractions: Never; remove one of them",
        )
        for field, value in (
            *(("replicas", 2), ("rename", True), ("shares", 2), ("timeSliceInterval", "Any")),
            *(("failRequestsGreaterThanOne", False), ("memory", {}), ("memoryGuard", {})),
            ("memoryLimit", "Strict"),
        )
    },
    "rename: without replicas": ([{"rename": True}], "[0].rename", "write how many, from 2 on"),
    "rename: one replica": (
        [{"rename": True, "replicas": 1}],
        "[0].rename",
        "has no effect without replicas",
    ),
    "shares: replicas": ([{"shares": 2, "replicas": 4}], "[0].shares", "which are the shares"),
    "interval: replicas": (
        [{"replicas": 2, "timeSliceInterval": "WholeGPUs"}],
        "[0].timeSliceInterval",
        "each of which may set the interval; remove it",
    ),
    "interval: no time slices": (
        [{"strategies": ["MPS"], "timeSliceInterval": "Any"}],
        "[0].timeSliceInterval",
        "where TimeSlicing is not among strategies",
    ),
    **{
        f"{field}: no MPS": (
            [{"strategies": ["TimeSlicing"], field: value}],
            f"[0].{field}",
            "has no effect where MPS is not among strategies; add it, or remove this",
        )
        for field, value in (("mpsTenants", "Any"), ("mpsServer", "Shared"))
    },
    "partitions: not created": (
        [{"mig": {"profiles": ["1g.5gb"]}}],
        "[0].mig.profiles",
        "has no effect without mode: Dynamic; add it, or remove this",
    ),
    "partitions: created and laid out": (
        [{"mig": {"mode": "Dynamic", "layout": "all-1g.5gb"}}],
        "[0].mig.layout",
        "which creates what claims need",
    ),
    "partitions: not divided": (
        [{"fractions": "Never", "mig": {"replicas": {"1g.5gb": 2}}}],
        "[0].mig.replicas",
        "has no effect with fractions: Never; remove one of them",
    ),
    "partitions: no limit in a part": (
        [{"memoryLimit": "Strict", "mig": {"replicas": {"1g.5gb": 2}}}],
        "[0].mig.replicas",
        "the GPU's driver limits no part of a partition",
    ),
}
"""Which entries are wrong, the field below ``spec.gpus`` that is named, and some of the words."""

OTHERWISE_SPELLED: dict[str, Entries] = {
    "a word in another case": [{"fractions": "never"}],
    "a word that YAML takes for false": [{"memoryGuard": {"policy": False}}],
    "a short form": [{"mig": "Dynamic"}],
    "a number for a quantity": [{"memory": {"least": 2**30}}],
}
"""What a file may say, and an object not."""
