"""Read the settings of the sidecar once, from TREADLE_SIDECAR_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, SecretStr, model_validator
from treadle_core.engine_queue.preemptive_queue import DEFAULT_HYSTERESIS, DEFAULT_MIN_RUN_TOKENS
from treadle_runtime.config import (
    Json,
    Key,
    OptionalAddress,
    OptionalAddresses,
    OptionalFolder,
    Settings,
    url,
)

WILDCARD_HOSTS = ("0.0.0.0", "[::]", "::")

DEFAULT_ENGINE_URL = "http://127.0.0.1:30000"

# as treadle_runtime.fields.identifier
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
EngineUrl = Annotated[
    str, AfterValidator(lambda value: url(value, ("http", "https"), DEFAULT_ENGINE_URL).rstrip("/"))
]
Count = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]


class SidecarSettings(Settings):
    """Settings of one engine and of the queue in front of it."""

    service: ClassVar[str] = "sidecar"

    listen: str = "127.0.0.1:7410"
    engine_id: Identifier  # name of the engine in this mesh
    engine_url: EngineUrl = DEFAULT_ENGINE_URL  # SGLang's HTTP server
    engine_key: Key = SecretStr("")  # its --api-key; empty: none
    advertise: OptionalAddress = (
        ""  # where others reach this sidecar; empty: the address it listens at
    )
    scheduler: OptionalAddresses = (
        ""  # all of its processes, with commas between; empty: stand alone
    )
    slots: Count = 0  # steps that decode at once; 0: what the engine was started for
    queue_limit: Annotated[int, Field(ge=1)] = 4096  # steps that may wait
    preempt: bool = True
    # Priority units by which a waiting step must outrank a running one to evict it.
    hysteresis: NotNegative = DEFAULT_HYSTERESIS
    min_run_tokens: Count = (
        DEFAULT_MIN_RUN_TOKENS  # tokens that a step makes before it may be evicted
    )
    kv_storage_dir: OptionalFolder = (
        ""  # folder of HiCache's file storage, to see what is stored; empty: not known
    )
    export_wait_s: NotNegative = (
        2.0  # how long after a step ExportPrefix waits for the engine's asynchronous backup
    )
    # An engine without progress for so long, beyond what its work takes by its curve, counts as
    # lost. SGLang's own check of its health gives it 20 s.
    engine_stall_s: Annotated[float, Field(gt=0)] = 30.0
    # A push of weights of which no part comes for so long is given up; the engine then waits for
    # another one.
    push_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    tell_tokens: Count = (
        0  # most ids of a step's output that its fact carries, for a learned predictor; 0: none
    )
    # JSON list, e.g. ["h200", "compute-bound"]
    hardware_tags: Annotated[tuple[str, ...], Json] = ()
    probe_s: NotNegative = 10.0  # longest probe of an idle engine for its decode curve; 0: none
    # Declared decode curve (treadle.engine.v1.DecodeCurve); the first two 0: it is measured.
    decode_base_s: NotNegative = 0.0
    decode_per_sequence_s: NotNegative = 0.0
    decode_per_kv_token_s: NotNegative = 0.0
    prefill_tokens_per_s: NotNegative = 0.0
    prefill_pair_s: NotNegative = 0.0

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> "SidecarSettings":
        if (
            self.scheduler
            and not self.advertise
            and self.listen.rpartition(":")[0] in WILDCARD_HOSTS
        ):
            raise ValueError(
                "TREADLE_SIDECAR_ADVERTISE is needed (host:port) where LISTEN is a wildcard and a "
                "scheduler is given"
            )
        return self
