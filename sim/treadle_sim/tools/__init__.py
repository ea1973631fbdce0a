"""Action traces under a virtual clock: the tools' elastic scheduler against what it replaces (ARL-Tangram §6).

`trace` has the nouns, `play` runs a batch on an executor. Executors of actions that this product's scheduler places:
`elastic_cores`, `elastic_gpus`, `managed_quota`; baselines: `pods`, `gpu_groups`, `loading`, `unmanaged_calls`.
"""
