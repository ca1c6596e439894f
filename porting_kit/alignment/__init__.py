"""Does a port say what its base model says? The oracle, the measured noise, the comparisons, layer by layer.

Order of reading: `reference` (the base), `noise` (how far numbers may differ), `oracle` (judging tokens), `comparison`
(runs against each other), `layers` (where numbers part), `result` (what is reported), `run` (all of it in order).
"""
