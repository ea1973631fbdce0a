"""Action traces under a virtual clock: the tools' elastic scheduler against what it replaces (ARL-Tangram §6).

`trace` has the nouns and plays a batch on an executor. Executors with this product's scheduler: `cores.ElasticCores`,
`gpus.ElasticGpus`, `api_calls.ManagedCalls`; baselines: `pods.Pods`, `gpus.StaticGroups`, `gpus.LoadingGroups`,
`api_calls.UnmanagedCalls`.
"""
