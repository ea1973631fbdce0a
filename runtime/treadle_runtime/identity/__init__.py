"""Who calls, what that caller may call, what belongs to its tenant, and the seal on a ticket.

The rules stand in the protos (treadle/common/v1/access.proto) and are read from the descriptors: an
RPC without a rule admits nobody. No service keeps a list of tenants. A mesh without certificates
knows neither callers nor tenants, and asks for nothing (ADR 0047).
"""
