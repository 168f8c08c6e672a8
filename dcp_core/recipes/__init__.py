"""Save and load, stage by stage: the only place that knows the order.

`agreement` holds what travels in the first exchange, `save` and `load` the stages.
"""
