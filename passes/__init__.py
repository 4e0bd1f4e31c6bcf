"""Functions over fx graphs that turn marks into one staging node.

`prepare.prepare_graph` is the list that says their order; `insert_staging.insert_staging_node` comes last, once per
captured instance. Where a graph runs on the host at every step, `run_on_host.host_method` makes a method of it.
"""
