"""Identify callers, check what each may call and what belongs to its tenant, and seal tickets.

The rules stand in the protos (treadle/common/v1/access.proto) and are read from the descriptors: an
RPC without a rule admits nobody. No service keeps a list of tenants. A mesh without certificates
knows neither callers nor tenants, and refuses none (ADR 0047).
"""
