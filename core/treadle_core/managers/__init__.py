"""Resource managers of action-level scheduling: which cores, GPUs and requests an action holds, and until when.

The policy of ARL-Tangram §5 behind one interface (`protocol.Manager`); `elastic.decide` asks for what is free, the
managers say which units of it. `dispatcher.Dispatcher` puts queue, decision and managers together, for the gateway and
for the simulator. Nothing here has a clock: `now_s` is any number of seconds that never falls.
"""
