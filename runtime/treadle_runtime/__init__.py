"""The shell around every Treadle service: settings, lifecycle, errors, telemetry, bus, request records.

It knows gRPC and NATS and no domain noun; `docs/architecture.md` says what each module owns.
"""
